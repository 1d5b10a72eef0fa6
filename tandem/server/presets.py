"""Presets: models that are served with settings of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.load_options import LoadOptions
from tandem.engine.params import SamplingParams
from tandem.errors import RequestError

MOST = 1e9  # of seconds and GB: event loops and memory take no 1e308
# Fields of SamplingParams that a preset may set; a request that sets them itself gets its own.
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "seed",
    "max_tokens", "min_tokens", "stop", "ignore_eos",
)  # fmt: skip
OPTIONS = (
    "context",
    "batch",
    "kv",
    "kv_memory",
    "draft",
    "prompt_lookup",
    "mmproj",
    "chat_template",
)  # of LLM
KINDS: dict[str, tuple[type, ...]] = {
    "name": (str,), "file": (str,), "context": (int,), "batch": (int,), "kv": (str,), "kv_memory": (int, float),
    "draft": (str,), "prompt_lookup": (bool,), "mmproj": (str,), "chat_template": (str,),
    "keep_alive": (int, float), "pinned": (bool,),
    "system": (str,), "sampling": (dict,), "chat_template_kwargs": (dict,),
}  # fmt: skip


@dataclass(frozen=True)
class Preset:
    name: str  # by which requests name it
    file: str  # a name or a file
    context: int | None = None  # these until `chat_template`: None: as for all models
    batch: int | None = None
    kv: str | None = None
    kv_memory: float | None = None  # GB
    draft: str | None = None
    prompt_lookup: bool | None = None
    mmproj: str | None = None
    chat_template: str | None = (
        None  # in Jinja, or the name of a format; in a settings file: its file, or the name
    )
    keep_alive: float | None = None  # seconds until it is unloaded when idle
    pinned: bool = False  # it is loaded at startup and stays loaded
    system: str | None = None  # the system message of conversations without one
    messages: tuple[Mapping[str, str], ...] = ()  # what every conversation begins with
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults of requests: names of SAMPLING
    # Variables of the chat template in requests that do not set them, such as enable_thinking = false.
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or not self.file:
            raise RequestError("a preset has no name or no file: give both")
        if unknown := self.sampling.keys() - set(SAMPLING):
            raise RequestError(
                f"preset {self.name}: sampling has no {min(unknown)}: use some of {', '.join(SAMPLING)}"
            )
        if self.keep_alive is not None and not 0 <= self.keep_alive <= MOST:
            raise RequestError(f"preset {self.name}: keep_alive = {self.keep_alive}: use 0 or more seconds")
        try:
            SamplingParams(**self.sampling)
            LoadOptions(**_LOAD_DEFAULTS | {"model": self.file} | self.options)
        except RequestError as error:
            raise RequestError(f"preset {self.name}: {error}") from None

    @property
    def characters(self) -> int:
        """Of the messages that each conversation begins with."""
        return len(self.system or "") + sum(len(message["content"]) for message in self.messages)

    @property
    def options(self) -> dict[str, Any]:
        """The options of LLM that this preset sets."""
        given = {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}
        return given | ({"kv_memory": self.kv_memory * 1e9} if self.kv_memory else {})


_LOAD_DEFAULTS: dict[str, Any] = {
    "device": "auto", "threads": None, "context": None, "kv": "f16", "batch": 1, "gpu_memory": None, "kv_memory": None,
    "prompt_lookup": False, "draft": None, "split": None, "placement": "layers", "npu": "off",
}  # fmt: skip


def read_preset(values: Mapping[str, Any]) -> Preset:
    """The preset that a table of a settings file describes. An unknown name is an error."""
    name = str(values.get("name", "without a name"))[:100]
    for key, value in values.items():
        if key not in KINDS:
            raise RequestError(f"preset {name}: unknown setting {key}: use some of {', '.join(KINDS)}")
        if type(value) not in KINDS[key]:
            kinds = " or ".join(kind.__name__ for kind in KINDS[key])
            raise RequestError(f"preset {name}: {key} = {value!r} has the wrong type: use {kinds}")
    missing = [field.name for field in dataclasses.fields(Preset)[:2] if field.name not in values]
    if missing:
        raise RequestError(f"preset {name}: {missing[0]} is missing: name the model and its file")
    return Preset(**values)

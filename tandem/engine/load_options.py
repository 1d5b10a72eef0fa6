"""The options of LLM, checked before anything is opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.errors import RequestError
from tandem.kernels.abi import KV_TYPES

UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
DRAFT_HEAD, NO_DRAFT = "mtp", "none"  # as `draft`: the model's own draft head, and no speculation
MAX_COUNT = 1 << 31  # upper bound of threads, tokens and sequences


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """See LLM.__init__ for what they mean. Raises a RequestError that names the first wrong one."""

    model: str | os.PathLike[str]
    device: str
    threads: int | None
    context: int | None
    kv: str
    batch: int
    gpu_memory: float | None
    kv_memory: float | None
    prompt_lookup: bool
    draft: str | os.PathLike[str] | None
    split: Sequence[int] | None
    placement: str
    npu: str
    mmproj: str | os.PathLike[str] | None = None
    disk_cache: str | float | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        self._check_models()
        self._check_names()
        self._check_numbers()
        if not isinstance(self.chat_template, str | None) or self.chat_template == "":
            raise RequestError("chat_template is no text: give a template in Jinja, or the name of a format")
        if not isinstance(self.prompt_lookup, bool):
            raise RequestError(f"prompt_lookup={self.prompt_lookup!r}: give True or False")
        if self.prompt_lookup and self.draft is not None:
            raise RequestError("prompt_lookup and draft exclude each other: give one of the two")

    @property
    def draft_model(self) -> str | os.PathLike[str] | None:
        return None if self.draft in (DRAFT_HEAD, NO_DRAFT) else self.draft

    def _check_models(self) -> None:
        for name, model in (("model", self.model), ("draft", self.draft), ("mmproj", self.mmproj)):
            if not isinstance(model, str | os.PathLike) and not (name != "model" and model is None):
                raise RequestError(f"{name}={model!r}: give the path of a GGUF file or the name of a model")

    def _check_names(self) -> None:
        for name, value, hint in (
            ("device", self.device, "give a name, such as cpu or auto"),
            ("kv", self.kv, "use f16, q8 or f32"),
            ("placement", self.placement, "use layers, columns, columns-overlapped or npu-attention"),
            ("npu", self.npu, "use off, auto or require"),
        ):
            if not isinstance(value, str) or (name == "kv" and value not in KV_TYPES):
                raise RequestError(f"{name}={value!r}: {hint}")

    def _check_numbers(self) -> None:
        for name in ("threads", "context", "batch"):
            value = getattr(self, name)
            is_default = value is None and name != "batch"
            if not is_default and not (isinstance(value, int) and 1 <= value < MAX_COUNT):
                raise RequestError(f"{name}={value!r}: give a whole number, 1 or more, below {MAX_COUNT}")
        for name in ("gpu_memory", "kv_memory"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < 1 << 63):
                raise RequestError(f"{name}={value!r}: give a number of bytes")
        if self.disk_cache is not None:
            disk_bytes(self.disk_cache)
        split = self.split
        if split is not None and not (
            isinstance(split, Sequence) and all(isinstance(layers, int) and layers > 0 for layers in split)
        ):
            raise RequestError(f"split={split!r}: give the number of layers of each device, in a list")


def disk_bytes(size: str | float) -> int:
    """Returns the bytes of a size: a number, or a text such as "20G" or "500M"."""
    try:
        text = size.strip().upper().removesuffix("B") if isinstance(size, str) else str(size)
        unit = UNITS.get(text[-1:], 1)
        number = float(text[:-1] if unit > 1 else text) * unit
        if isinstance(size, bool) or not 1 <= number < 1 << 63:
            raise ValueError
    except (ValueError, OverflowError):
        raise RequestError(f'disk_cache={size!r}: give a size, such as "20G"') from None
    return int(number)

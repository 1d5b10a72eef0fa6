"""What an operator may set: in a TOML file, and over it on the command line of `tandem serve`."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import RequestError

MiB = 1 << 20
MAY_BE_0 = ("port", "keep_alive")


@dataclass(frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"  # only this machine, unless said otherwise
    port: int = 8000
    models: tuple[str, ...] = ()  # the first answers requests that name none
    device: str = "auto"
    context: int | None = None  # tokens of a request, prompt and answer together
    batch: int = 64  # sequences served at a time
    threads: int | None = None  # of the CPU; None: one a core
    kv: str = "f16"  # how keys and values are kept: f16 or q8
    kv_memory: float | None = None  # GB for them; None: by the context and what is free
    gpu_memory: float | None = None  # GB of a GPU's own memory to use at most
    prompt_lookup: bool = False  # speculate on tokens that repeat the prompt
    draft: tuple[str, ...] = ()  # draft models: NAME=MODEL, or MODEL where one is served
    keep_alive: float | None = None  # seconds that a model stays; None: until another needs its memory
    api_keys: Path | None = None  # a file with a key a line; None: whoever reaches the port is served
    cors_origins: tuple[str, ...] = ()  # web pages of others that may call; "*": all
    max_body: int = 16 * MiB  # bytes of a request
    max_prompt: int | None = None  # tokens; None: what the context holds
    max_requests: int = 256  # at a time, waiting ones among them
    max_queue: int = 128  # of them, those that the engine has not begun
    timeout: float = 600.0  # seconds for an answer
    read_timeout: float = 20.0  # seconds for a request to arrive, once it has begun
    write_timeout: float = 30.0  # seconds for a client to take what it is sent
    idle_timeout: float = 60.0  # seconds a connection may stay without a request
    shutdown: float = 30.0  # seconds for answers to end after SIGTERM
    access_log: bool = True
    prefix_routing: bool = True  # with --ray: prefer the replica that has computed a prompt's beginning

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and (value < 0 or (value == 0 and field.name not in MAY_BE_0)):
                raise RequestError(f"{field.name} = {value}: give a number above 0")
        if self.kv not in ("f16", "q8"):
            raise RequestError(f"kv = {self.kv!r}: give f16 or q8")
        if not self.port <= 65535:
            raise RequestError(f"port = {self.port}: give one up to 65535; 0 takes a free one")

    @property
    def is_personal(self) -> bool:
        """For those who sit at this machine, who may fetch models as well."""
        return self.api_keys is None and self.host in ("127.0.0.1", "localhost", "::1")


def read_settings_file(path: Path) -> ServerSettings:
    """Settings of a TOML file; a name it misspells is an error, not ignored."""
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise RequestError(f"there is no settings file {path}: check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not TOML: {error}") from None
    return ServerSettings(**{name: _checked(path, name, value) for name, value in values.items()})


def read_api_keys(path: Path) -> list[str]:
    """The keys of a file, without comments (#) and empty lines."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the file of API keys {path} cannot be read: {error}") from None
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise RequestError(f"{path} holds no API key: write one a line")
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise RequestError(f"{path} holds a key that no header can carry: use printable ASCII without spaces")
    return keys


def _checked(path: Path, name: str, value: Any) -> Any:
    kinds = {field.name: str(field.type) for field in dataclasses.fields(ServerSettings)}
    if name not in kinds:
        raise RequestError(f"{path}: there is no setting {name}; there is: {', '.join(kinds)}")
    kind = kinds[name]
    if kind.startswith("tuple") and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value) if name == "cors_origins" else tuple(_beside(path, item) for item in value)
    if kind.startswith("Path") and isinstance(value, str):
        return path.parent / Path(value).expanduser()
    if kind.startswith("float") and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value).__name__ != kind.split(" ")[0]:
        raise RequestError(f"{path}: {name} = {value!r} is not what it takes ({kind})")
    return value


def _beside(path: Path, model: str) -> str:
    """A model, or NAME=MODEL: where it is a file, it is one beside the settings."""
    name, equals, model = model.rpartition("=")
    found = path.parent / Path(model).expanduser()
    return f"{name}{equals}{found if found.is_file() else model}"

"""The server's settings: a TOML file, overridden by the command line of `tandem serve`."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.engine.load_options import disk_bytes
from tandem.errors import RequestError
from tandem.files import read_regular
from tandem.model.chat_formats import BY_NAME
from tandem.server.presets import MOST, Preset, read_preset

MiB = 1 << 20
MAX_SIZE = MiB  # of a file with settings or API keys
MAX_UNREAD = 4096  # tokens and log-probabilities of a response that its client has not read
ZERO_ALLOWED = ("port", "keep_alive")
HOST = r"[\w.-]+(:\d{1,5})?|[\da-fA-F:.]+"  # of an image's address; an IPv6 address has no brackets
NAME = r"(?a)[\w.-]{1,40}"  # of an MCP server
ORIGIN = r"\*|null|[a-z][a-z\d+.-]*://[^\s/?#]+"


@dataclass(frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"  # only this machine
    port: int = 8000
    models: tuple[str, ...] = ()  # the first one is the default of requests that name none
    presets: tuple[Preset, ...] = ()  # models with settings of their own
    mcp: Mapping[str, tuple[str, ...]] = dataclasses.field(
        default_factory=dict
    )  # MCP servers: name -> command
    aliases: tuple[str, ...] = ()  # other names of the first model; "*": every name that no model has
    device: str = "auto"
    context: int | None = None  # maximum tokens of a request, prompt and response together
    batch: int = 64  # maximum sequences that run at a time
    threads: int | None = None  # CPU threads; None: one per core
    kv: str = "f16"  # data type of the KV cache: f16 or q8
    kv_memory: float | None = None  # GB of KV cache; None: by the context and the free memory
    disk_cache: str | None = None  # size of the prefix cache on disk, such as "20G"; None: in memory only
    gpu_memory: float | None = None  # maximum GB of a GPU's own memory
    prompt_lookup: bool = False  # speculative decoding with n-grams of the prompt
    draft: tuple[str, ...] = ()  # draft models: NAME=MODEL, or MODEL if one model is served
    keep_alive: float | None = None  # seconds until an idle model is unloaded; None: when memory is needed
    api_keys: Path | None = None  # file with one API key per line; None: no keys are required
    responses: Path | None = None  # SQLite file of stored responses; None: in memory, until the server ends
    allow_image_urls: tuple[
        str, ...
    ] = ()  # hosts that images of requests are fetched from, such as "example.com"
    cors_origins: tuple[str, ...] = ()  # origins of web pages that may call the server; "*": all
    max_body: int = 4 * MiB  # bytes of a request body
    max_prompt: int | None = None  # tokens of a prompt; None: the context
    max_requests: int = 256  # running and waiting requests
    max_queue: int = 128  # waiting requests
    max_connections: int = 1024  # open connections, if the limit of open files allows them
    max_connections_per_address: int = 512  # of a client, or of a proxy
    timeout: float = 600.0  # seconds for a response
    read_timeout: float = 20.0  # seconds for the headers, and for the body, of a request
    write_timeout: float = 30.0  # seconds for a client to read what was sent
    idle_timeout: float = 60.0  # seconds between requests of a connection
    shutdown: float = 30.0  # seconds for responses to finish after SIGTERM
    access_log: bool = True
    prefix_routing: bool = True  # with --ray: prefer the replica whose prefix cache has the prompt

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not (value > 0 or (value == 0 and field.name in ZERO_ALLOWED)):
                raise RequestError(f"{field.name} = {value}: use a number above 0")
            if isinstance(value, float) and value > MOST:
                raise RequestError(f"{field.name} = {value}: use {MOST:g} at most")
        for host in self.allow_image_urls:
            if not re.fullmatch(HOST, host):
                raise RequestError(f"allow_image_urls has {host!r}: use names of hosts, such as example.com")
        for origin in self.cors_origins:
            if not re.fullmatch(ORIGIN, origin):
                raise RequestError(f"cors_origins has {origin!r}: use origins, such as https://example.com")
        if self.kv not in ("f16", "q8"):
            raise RequestError(f"kv = {self.kv!r}: use f16 or q8")
        if self.disk_cache is not None:
            disk_bytes(self.disk_cache)
        if not self.port <= 65535:
            raise RequestError(f"port = {self.port}: use 1 to 65535, or 0 for any free port")

    @property
    def is_loopback(self) -> bool:
        """Only this machine can connect."""
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    @property
    def is_personal(self) -> bool:
        """A local server without API keys: its clients may download models."""
        return self.api_keys is None and self.is_loopback

    def warnings(self) -> Iterator[str]:
        """What lets others in, in sentences."""
        if self.api_keys is None and not self.is_loopback:
            yield f"everyone who can reach {self.host} can use this server: give API keys with --api-keys FILE"
        if self.api_keys and self.api_keys.stat().st_mode & 0o077:
            yield f"other users may read the API keys: run `chmod 600 {self.api_keys}`"


def read_settings_file(path: Path) -> ServerSettings:
    """The settings of a TOML file. An unknown name is an error."""
    try:
        values = tomllib.loads(read_regular(path, MAX_SIZE).decode())
    except FileNotFoundError:
        raise RequestError(f"there is no settings file {path}: check the path") from None
    except OSError as error:
        raise RequestError(f"the settings file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also of the encoding, or a number of 5,000 digits
        raise RequestError(f"{path} is not valid TOML: {str(error)[:200]}") from None
    return ServerSettings(**{name: _checked(path, name, value) for name, value in values.items()})


def read_api_keys(path: Path) -> list[str]:
    """The API keys of a file: one per line; lines that start with # are comments."""
    try:
        lines = read_regular(path, MAX_SIZE).decode().splitlines()
    except (OSError, ValueError) as error:
        raise RequestError(f"the API key file {path} cannot be read: {error}") from None
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise RequestError(f"{path} contains no API key: write one per line")
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise RequestError(f"{path} contains an invalid API key: use printable ASCII without spaces")
    return keys


def _checked(path: Path, name: str, value: Any) -> Any:
    kinds = {field.name: str(field.type) for field in dataclasses.fields(ServerSettings)}
    if name not in kinds:
        raise RequestError(f"{path}: unknown setting {name}: use one of {', '.join(kinds)}")
    if name == "presets":
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise RequestError(f"{path}: presets is no list of tables: begin each with [[presets]]")
        return tuple(_with_paths(path, read_preset(item)) for item in value)
    if name == "mcp":
        return _commands(path, value)
    kind = kinds[name]
    if kind.startswith("tuple") and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return (
            tuple(value)
            if name in ("cors_origins", "aliases", "allow_image_urls")
            else tuple(_relative_to(path, item) for item in value)
        )
    if kind.startswith("Path") and isinstance(value, str):
        return path.parent / os.path.expanduser(value)
    if kind.startswith("float") and isinstance(value, int | float) and not isinstance(value, bool):
        is_huge = isinstance(value, int) and abs(value) > MOST
        return math.inf if is_huge else float(value)  # it is refused
    if type(value).__name__ != kind.split(" ")[0]:
        raise RequestError(f"{path}: {name} = {value!r} has the wrong type: use {kind}")
    return value


def _commands(path: Path, value: Any) -> dict[str, tuple[str, ...]]:
    """The programs of MCP servers by their names."""
    for name, command in value.items() if isinstance(value, dict) else [("", value)]:
        words = command if isinstance(command, list) else []
        if (
            not re.fullmatch(NAME, name)
            or not words
            or not all(isinstance(word, str) and "\0" not in word for word in words)
        ):
            raise RequestError(
                f'{path}: mcp has a wrong entry {name!r}: write it as files = ["program", "argument"]'
            )
    return {name: tuple(command) for name, command in value.items()}


def _with_paths(path: Path, preset: Preset) -> Preset:
    given = {name: getattr(preset, name) for name in ("file", "draft", "mmproj")}
    found: dict[str, Any] = {name: _relative_to(path, value) for name, value in given.items() if value}
    if preset.chat_template is not None and preset.chat_template not in BY_NAME:
        file = path.parent / os.path.expanduser(preset.chat_template)
        try:
            found["chat_template"] = read_regular(file, MAX_SIZE).decode()
        except (OSError, ValueError) as error:
            raise RequestError(
                f"preset {preset.name}: the chat template {file} cannot be read: {error}"
            ) from None
    return dataclasses.replace(preset, **found)


def _relative_to(path: Path, model: str) -> str:
    """MODEL or NAME=MODEL, with the path of a file made relative to the settings file."""
    name, equals, model = model.rpartition("=")
    found = path.parent / os.path.expanduser(model)
    return f"{name}{equals}{found if os.path.isfile(found) else model}"

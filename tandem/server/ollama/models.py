"""Ollama's /api/tags, /api/show, /api/ps, /api/pull and /api/version."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NotRequired

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from tandem import __version__
from tandem.engine.model_manager import ModelManager
from tandem.errors import ModelNotFoundError, QueueFullError, RequestError, TandemError
from tandem.files import modified
from tandem.gguf.file import GGUF
from tandem.model.locate import comparable, is_known, resolve_name
from tandem.model.vision import sees
from tandem.server.core.serving import Server, get_server
from tandem.server.http.bodies import (
    JSONRoute,
    StrictModel,
    cancel_on_disconnect,
    json_line,
    stream_response,
)
from tandem.server.ollama.chat import ERRORS, LINES, NDJSON, known_name
from tandem.server.ollama.error_body import OllamaErrorBody
from tandem.server.presets import Preset

router = APIRouter(route_class=JSONRoute, tags=["Ollama"])
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 32: "BF16",
}  # fmt: skip
PULL_ERRORS: dict[int | str, dict[str, Any]] = {
    403: {"model": OllamaErrorBody, "description": "Only the operator of this server can download models"},
    502: {"model": OllamaErrorBody, "description": "The download failed"},
}
NAME = r"(?a)[\w.-]{1,80}"  # perhaps a misspelt short name
MAX_PULLS = 8  # at a time
# Of the metadata that /api/show has: characters of a key or a value, and keys. A file may have 100 MB of them.
MAX_LENGTH, MAX_KEYS = 1000, 500


class ShowRequest(StrictModel):
    ignored = frozenset({"system", "template", "options"})
    model: str | None = None
    name: str | None = None  # the older name of `model`
    verbose: bool | None = None


class PullRequest(StrictModel):
    ignored = frozenset({"insecure"})
    model: str | None = None
    name: str | None = None
    stream: bool | None = None  # default: True


class ModelDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


UNKNOWN = ModelDetails(
    parent_model="", format="gguf", family="unknown", families=[], parameter_size="", quantization_level=""
)


class ListedModel(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ModelTags(TypedDict):
    models: list[ListedModel]


class RunningModel(TypedDict):
    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int


class RunningModels(TypedDict):
    models: list[RunningModel]


class ModelInfo(TypedDict):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    system: NotRequired[str]


class PullStatus(TypedDict):
    status: str


class Version(TypedDict):
    version: str


@router.get("/api/tags")
async def tags(request: Request) -> ModelTags:
    """The models of this server whose files are there."""
    models = get_server(request).models
    found = [await asyncio.to_thread(_listed_if_there, models, name) for name in models.names()]
    return ModelTags(models=[listed for listed in found if listed])


@router.get("/api/ps")
async def processes(request: Request) -> RunningModels:
    """The models in memory."""
    server = get_server(request)
    found = []
    for loaded in server.models.loaded():
        listed = await asyncio.to_thread(_listed_if_there, server.models, loaded.name)
        expires = (
            datetime.fromtimestamp(loaded.expires, UTC)
            if loaded.expires
            else datetime.max.replace(tzinfo=UTC)
        )
        found.append(
            RunningModel(
                name=loaded.name,
                model=loaded.name,
                size=loaded.nbytes,
                digest=listed["digest"] if listed else "",
                details=listed["details"] if listed else UNKNOWN,
                expires_at=expires.isoformat(),
                size_vram=0 if loaded.device == "cpu" else loaded.nbytes,
            )
        )
    return RunningModels(models=found)


@router.post("/api/show", response_model=ModelInfo, responses=ERRORS)
async def show(request: Request, body: ShowRequest) -> Response:
    """The metadata, chat template and capabilities of a model."""
    server = get_server(request)
    name = known_name(server, body.model or body.name or "")
    path, preset = server.models.path(name), server.presets.get(name)
    return JSONResponse(await asyncio.to_thread(_model_info, name, path, preset))


@router.post("/api/pull", response_model=PullStatus, responses=LINES | ERRORS | PULL_ERRORS)
async def pull(request: Request, body: PullRequest) -> Response:
    """Downloads a model as `tandem pull` does, and serves it."""
    server, name = get_server(request), body.model or body.name
    if not name:
        raise RequestError("model is missing: name the model to download")
    if known_name(server, name) not in server.models.names() and not server.settings.is_personal:
        raise HTTPException(
            403, "only the operator of this server can download models: ask for `tandem pull`"
        )
    if not is_known(name) and not re.fullmatch(NAME, name):
        raise RequestError(
            f"model: {name[:80]!r} cannot be downloaded: use a short name or hf.co/user/repo:QUANT"
        )
    if body.stream is not False:
        return await stream_response(request, _pull_progress(server, name), NDJSON)
    await cancel_on_disconnect(request, _drain(_pull_progress(server, name)))
    return JSONResponse(PullStatus(status="success"))


@router.head("/", include_in_schema=False)
async def health_check() -> Response:
    """The health check of Ollama's command line."""
    return Response()


@router.get("/api/version")
async def version() -> Version:
    """The version of Tandem."""
    return Version(version=__version__)


async def _drain(lines: AsyncGenerator[str, None]) -> None:
    async for _ in lines:
        pass


class Pull:
    """A download in progress. It continues if the client disconnects; requests for the same model share it."""

    def __init__(self, server: Server, name: str) -> None:
        self._server, self._name = server, name
        server.pulls[comparable(name)] = self
        self._progress: dict[str, tuple[int, int]] = {}
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            self._server.models.add(self._name, await self._download())
        finally:
            del self._server.pulls[comparable(self._name)]

    async def _download(self) -> Path:
        """Downloads in a daemon thread: a slow hub takes no thread from others, and does not delay the server's end."""
        found: Future[Path] = Future()

        def download() -> None:
            found.set_running_or_notify_cancel()
            try:
                found.set_result(resolve_name(self._name, True, self._note))
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=download, name="pull", daemon=True).start()
        return await asyncio.wrap_future(found)

    def _note(self, file: str, completed: int, size: int) -> None:
        self._progress = {**self._progress, file: (completed, size)}  # another thread reads it

    def lines(self) -> list[str]:
        return [
            json_line({"status": f"pulling {file}", "digest": file, "total": size, "completed": completed})
            for file, (completed, size) in self._progress.items()
        ]


async def _pull_progress(server: Server, name: str) -> AsyncGenerator[str, None]:
    """The progress of a download, a few times a second."""
    if known_name(server, name) not in server.models.names():
        pull: Pull | None = server.pulls.get(comparable(name))
        if pull is None:
            if len(server.pulls) >= MAX_PULLS:
                raise QueueFullError(f"{MAX_PULLS} downloads are running: wait for one of them")
            pull = Pull(server, name)
        yield json_line(PullStatus(status="pulling manifest"))
        while not pull.task.done():
            await asyncio.wait([pull.task], timeout=0.3)
            for progress in pull.lines():
                yield progress
        await pull.task
    yield json_line(PullStatus(status="success"))


def _listed_if_there(models: ModelManager, name: str) -> ListedModel | None:
    """None for a model whose file is missing, or no file: it must not hide the others."""
    try:
        return _listed_model(name, models.path(name))
    except (OSError, ModelNotFoundError):
        return None


def _listed_model(name: str, path: Path) -> ListedModel:
    stat = path.stat()
    digest = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
    try:
        details = _read_metadata(path).details
    except TandemError:  # a broken file must not hide the other models
        details = UNKNOWN
    return ListedModel(
        name=name,
        model=name,
        modified_at=datetime.fromtimestamp(modified(stat), UTC).isoformat(),
        size=stat.st_size,
        digest=digest,
        details=details,
    )


def _model_info(name: str, path: Path, preset: Preset | None = None) -> ModelInfo:
    found = _read_metadata(path)
    sampling = preset.sampling.items() if preset else ()
    lines = [(key, one) for key, value in sampling for one in (value if isinstance(value, list) else [value])]
    parameters = "\n".join(f"{key} {json.dumps(value)}" for key, value in lines)
    modelfile = [f"FROM {name}", *(f"PARAMETER {line}" for line in parameters.splitlines())]
    if preset and preset.system:
        modelfile.append(f'SYSTEM """{preset.system}"""')
    thinks = any(text in found.template for text in ("<think>", "<|channel|>analysis"))
    encodes = found.info.get(f"{found.details['family']}.attention.causal") is False
    more = ["thinking"] * thinks + ["vision"] * sees(path)
    info = ModelInfo(
        modelfile="\n".join(modelfile) + "\n",
        parameters=parameters,
        template=preset.chat_template if preset and preset.chat_template else found.template,
        details=found.details,
        model_info=found.info,
        capabilities=["embedding"] if encodes else ["completion", "tools", "embedding", *more],
        modified_at=_listed_model(name, path)["modified_at"],
    )
    if preset and preset.system:
        info["system"] = preset.system
    return info


class _Metadata(NamedTuple):
    details: ModelDetails
    info: dict[str, Any]
    template: str


_reading = threading.Lock()  # otherwise several requests would read the same file


def _read_metadata(path: Path) -> _Metadata:
    stat = path.stat()
    with _reading:
        return _metadata(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=256)
def _metadata(path: Path, _changed: int, _size: int) -> _Metadata:
    from tandem.model.template_sandbox import MAX_SOURCE  # imported late: with Jinja

    gguf = GGUF.open(path)
    try:
        count = sum(math.prod(tensor.shape) for tensor in gguf.tensors.values())
        family = str(gguf.get("general.architecture", "unknown"))[:MAX_LENGTH]
        details = ModelDetails(
            parent_model="",
            format="gguf",
            family=family,
            families=[family],
            parameter_size=f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M",
            quantization_level=FILE_TYPES.get(gguf.get("general.file_type", -1), "unknown"),
        )
        keys = [key for key in gguf.metadata if len(key) <= MAX_LENGTH]
        values = ((key, _json_value(gguf.get(key, None))) for key in keys)
        info = dict(islice(((key, value) for key, value in values if value is not None), MAX_KEYS))
        template = gguf.get("tokenizer.chat_template", "")
        return _Metadata(details, info, template if len(template) <= MAX_SOURCE else "")
    finally:
        gguf.close()


def _json_value(value: Any) -> Any:
    """A metadata value for JSON; None for arrays, long texts and non-finite numbers."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return value if len(value) <= MAX_LENGTH else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, bool | int) else None

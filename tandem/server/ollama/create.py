"""Ollama's /api/create, /api/copy and /api/delete: models with settings of their own, made of those that are served."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, ValidationError
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from tandem.engine.model_manager import ModelSpec
from tandem.errors import ModelNotFoundError, RequestError, TandemError
from tandem.model import locate
from tandem.model.model_files import CachedModel
from tandem.server.core.prompt import given_params
from tandem.server.core.serving import Server, get_server
from tandem.server.http.background import run_in_thread
from tandem.server.http.bodies import AnyObject, JSONRoute, StrictModel, json_line, stream_response
from tandem.server.ollama.chat import ERRORS, LINES, NDJSON, Options, known_name
from tandem.server.ollama.error_body import OllamaErrorBody
from tandem.server.presets import Preset

router = APIRouter(route_class=JSONRoute, tags=["Ollama"])
MAX_CREATED = 256  # models that clients made
MAX_TEXT, MAX_MESSAGES = 65_536, 256  # characters of a system message or a template, and messages
MAX_TEXTS = 16 << 20  # characters of all created models
NAME = r"(?a)[\w./:-]{1,80}"
FORBIDDEN: dict[int | str, dict[str, Any]] = {
    403: {"model": OllamaErrorBody, "description": "Only the operator of this server can change its models"}
}
# A comment, or an instruction, of a Modelfile.
LINE = re.compile(r'(?ms)^[ \t]*(?:#[^\n]*|(\w+)[ \t]+("""(.*?)"""|[^\n]*))')
SHARED = "{} has the same file: delete it first"
GO = "TEMPLATE is in Go's format: leave it out, for the model's own template, or write one in Jinja"
Text = Annotated[str, Field(max_length=MAX_TEXT)]


class StartMessage(StrictModel):
    ignored = frozenset({"images", "tool_calls", "thinking", "tool_name"})
    role: Annotated[str, Field(pattern="^(system|user|assistant)$")]
    content: Text


class CreateRequest(StrictModel):
    ignored = frozenset({"license", "quantize", "renderer", "parser", "info", "remote_host"})
    neutral = (("files", {}), ("adapters", {}))
    model: str | None = None
    name: str | None = None  # the older name of `model`
    from_: str | None = Field(None, alias="from")
    modelfile: Text | None = None  # in place of the fields below, as older clients send it
    system: Text | None = None
    template: Text | None = None  # in Jinja
    parameters: AnyObject | None = None
    messages: Annotated[list[StartMessage], Field(max_length=MAX_MESSAGES)] | None = None
    stream: bool | None = None  # default: True


class CopyRequest(StrictModel):
    source: str
    destination: str


class DeleteRequest(StrictModel):
    model: str | None = None
    name: str | None = None  # the older name of `model`


class CreateStatus(TypedDict):
    status: str


@router.post("/api/create", response_model=CreateStatus, responses=LINES | ERRORS | FORBIDDEN)
async def create(request: Request, body: CreateRequest) -> Response:
    """Makes a model of a served one: with a system message, parameters and first messages of its own, until the server
    ends."""
    server, name, streams = get_server(request), body.model or body.name or "", body.stream is not False
    require_operator(server)
    if body.modelfile is not None:
        body = await run_in_thread(read_modelfile, body.modelfile)
    source = known_name(server, body.from_ or "")
    preset = await run_in_thread(_preset, server, name, source, body)
    _add(server, preset, source)
    if not streams:
        return JSONResponse(CreateStatus(status="success"))

    async def lines() -> AsyncGenerator[str, None]:
        for status in (f"using {source}", "writing manifest", "success"):
            yield json_line(CreateStatus(status=status))

    return await stream_response(request, lines(), NDJSON)


@router.post("/api/copy", responses=ERRORS | FORBIDDEN)
async def copy(request: Request, body: CopyRequest) -> Response:
    """Gives a served model another name, until the server ends."""
    server = get_server(request)
    require_operator(server)
    source = known_name(server, body.source)
    preset = server.presets.get(source) or Preset(source, str(server.models.spec(source).file))
    _add(server, dataclasses.replace(preset, name=body.destination), source)
    return JSONResponse(None)


@router.delete("/api/delete", responses=ERRORS | FORBIDDEN)
async def delete(request: Request, body: DeleteRequest) -> Response:
    """Forgets a model that a client has made, or deletes a downloaded one's files, as `tandem rm` does."""
    server = get_server(request)
    require_operator(server)
    name, models = _own_name(server, body.model or body.name or ""), server.models
    spec = models.spec(name)
    if name in server.created:
        _forget(server, name)
        return JSONResponse(None)
    model = await run_in_thread(_download_of, server, name)
    for other in models.names():  # also one that was copied meanwhile
        if other != name and models.spec(other).file == spec.file:
            raise RequestError(SHARED.format(other))
    models.remove(name)  # not found if another request has deleted it
    server.presets.pop(name, None)
    await run_in_thread(locate.remove, model)
    return JSONResponse(None)


def require_operator(server: Server) -> None:
    if not server.settings.is_personal:
        raise HTTPException(403, "only the operator of this server can change its models: ask for a preset")


def _own_name(server: Server, name: str) -> str:
    """The name of a served model, by no alias: "*" makes every misspelt name the first model's."""
    names, find = server.models.names(), server.models.known_name
    known = (find(one) for one in (name, name.removesuffix(":latest")))
    return next((one for one in known if one in names), name)


def _download_of(server: Server, name: str) -> CachedModel:
    """The downloaded model that is served by its own name: another file may be served by the name of a download."""
    path = server.models.path(name)
    model = locate.find(name) if locate.is_known(name) else None
    if model is None or path not in model.files:
        raise ModelNotFoundError(f"{name[:80]} was neither created nor downloaded by name: delete its file")
    files = {file.resolve() for file in model.files}
    for other in server.models.names():
        if other != name and not files.isdisjoint(_files_of(server.models.spec(other))):
            raise RequestError(SHARED.format(other))
    return model


def _files_of(spec: ModelSpec) -> Iterator[Path]:
    """The files that a model is loaded from, of those that are there."""
    for file in (spec.file, *(spec.options.get(name) for name in ("draft", "mmproj"))):
        with suppress(TandemError):
            if file is not None:
                yield locate.resolve(os.fspath(file)).resolve()


def _forget(server: Server, name: str) -> None:
    server.models.remove(name)
    server.presets.pop(name)
    server.created.pop(name)


def read_modelfile(text: str) -> CreateRequest:
    """The request that a Modelfile describes."""
    found: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    messages: list[dict[str, str]] = []
    for match in LINE.finditer(text.replace("\r\n", "\n")):
        if match[1] is None:
            continue
        word, value = match[1].upper(), match[3] if match[3] is not None else match[2].strip().strip('"')
        first, _, rest = value.partition(" ")
        if word in ("FROM", "SYSTEM", "TEMPLATE"):
            found[word.lower()] = value
        elif word == "PARAMETER":
            typed = _typed(rest.strip().strip('"')) if first != "stop" else rest.strip().strip('"')
            parameters[first] = [*parameters.get("stop", []), typed] if first == "stop" else typed
        elif word == "MESSAGE":
            messages.append({"role": first, "content": rest.strip().strip('"')})
        elif word != "LICENSE":
            raise RequestError(f"the Modelfile has {word[:40]}, which is not supported: remove it")
    try:
        return CreateRequest.model_validate({**found, "parameters": parameters, "messages": messages})
    except ValidationError as error:
        raise RequestError(f"the Modelfile is not valid: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    found = error.errors()[0]
    return ": ".join([*map(str, found["loc"][:1]), found["msg"]])


def _typed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _preset(server: Server, name: str, source: str, body: CreateRequest) -> Preset:
    if not source:
        raise RequestError("from is missing: name a model that this server has")
    base = server.presets.get(source) or Preset(source, str(server.models.spec(source).file))
    if body.template is not None:
        if "{%" not in body.template and "messages" not in body.template:
            raise RequestError(GO)
        from tandem.model.template_sandbox import compile_template  # imported late: with Jinja

        compile_template(body.template)  # a broken one would be compiled at each request
    given = body.parameters or {}
    context = given.pop("num_ctx", base.context)
    try:
        options = Options.model_validate(given)
    except ValidationError as error:
        raise RequestError(f"parameters: {_first(error)}") from None
    names, values = given_params(options), options.sampling()
    if options.num_predict is not None and options.num_predict <= 0:  # as without it
        names = names - {"max_tokens"}
    return dataclasses.replace(
        base,
        name=name,
        context=context,
        pinned=False,
        system=base.system if body.system is None else body.system,
        messages=base.messages if body.messages is None else tuple(_plain(one) for one in body.messages),
        chat_template=body.template or base.chat_template,
        sampling={**base.sampling, **{key: values[key] for key in names if key in values}},
    )


def _plain(message: StartMessage) -> Mapping[str, str]:
    return {"role": message.role, "content": message.content}


def _add(server: Server, preset: Preset, source: str) -> None:
    name, made_of = preset.name, server.models.spec(source)
    if not re.fullmatch(NAME, name):
        raise RequestError(f"{name[:80]!r} is no name for a model: use letters, digits and ._:/-")
    if (known := _own_name(server, name)) in server.models.names() and known not in server.created:
        raise RequestError(f"{known} is a model that this server was started with: choose another name")
    if name not in server.created and len(server.created) >= MAX_CREATED:
        raise RequestError(f"{MAX_CREATED} models were created: delete one of them first")
    others = [server.presets[one] for one in server.created if one != known]
    if sum(map(_characters, [preset, *others])) > MAX_TEXTS:
        raise RequestError(
            f"created models have {MAX_TEXTS} characters of text at most: delete one of them first"
        )
    own = {key: value for key, value in preset.options.items() if made_of.options.get(key) != value}
    spec = ModelSpec(made_of.file, {**made_of.options, **own}, preset.keep_alive)
    first = server.created.get(source, source)
    if known in server.created:
        _forget(server, known)
    server.models.add(name, spec)
    server.presets[name] = preset
    server.created[name] = first


def _characters(preset: Preset) -> int:
    return (
        preset.characters + len(preset.chat_template or "") + sum(map(len, preset.sampling.get("stop", ())))
    )

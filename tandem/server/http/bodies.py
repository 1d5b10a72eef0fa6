"""JSON bodies. Requests: parsing, and pydantic models with strict types that reject unknown fields by name. Responses:
whole, or streamed as server-sent events or JSON lines; a client that disconnects cancels its request."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from functools import cache
from typing import Annotated, Any, ClassVar, ParamSpec, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from tandem.errors import RequestError, TandemError
from tandem.native import load
from tandem.server.http import errors
from tandem.server.http.background import SMALL, run_in_large_thread, run_inline_if_small, set_size
from tandem.threads import throttle, throttled

P = ParamSpec("P")
T = TypeVar("T")
IGNORED = "Accepted and ignored."  # description of ignored fields in the OpenAPI document
# Maximum number of values in a body; a name counts as eight. Parsing them must not hold the GIL for long.
MAX_VALUES = 1 << 18
MAX_ERRORS = 100  # errors of a body; if it has more, none is named, else the first
LARGE = 10_000  # values of a response above which a thread writes it; a smaller one takes a few milliseconds
DEPTH = 5  # levels of a value that are written one by one: a response's choices, and the tokens of each
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx forwards events immediately
}
# Descriptions of a stream in the OpenAPI document.
EVENT = {
    "description": "A server-sent event with JSON in `data`",
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"schema": EVENT}},
        "description": "The complete response, or a stream",
    }
}
compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

# ---- requests


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)  # accepts 3.0, which is an integer in JSON
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE]
Natural = Annotated[int, Field(ge=0, lt=2**31), WHOLE]
Positive = Annotated[int, Field(ge=1, lt=2**31), WHOLE]


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    """Refuses 1e999, which the parser reads as infinity, and which a response could not repeat."""
    parts: list[Any] = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, dict | list):
            parts += part.values() if isinstance(part, dict) else part
        elif isinstance(part, float) and not math.isfinite(part):
            raise PydanticCustomError("finite_number", "a number is larger than 1.8e308: give a smaller one")
    return value


AnyObject = Annotated[dict[str, Any], AfterValidator(_finite)]  # such as a schema


class StrictModel(BaseModel):
    """A JSON object in a request body, with exact types.

    An unknown field is rejected by name. `ignored` fields are accepted because they cannot change the response;
    `neutral` fields are accepted only with these values, which turn them off. Null is the same as absent.
    """

    model_config = ConfigDict(
        strict=True, allow_inf_nan=False, json_schema_extra=lambda schema, cls: _describe(schema, cls)
    )
    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[tuple[tuple[str, Any], ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        throttle()
        known = _known(cls)
        for name, value in given.items() if isinstance(given, dict) else ():
            if name not in known and value is not None and (name, value) not in cls.neutral:
                raise PydanticCustomError("unsupported", "`{field}` is not supported", {"field": name[:80]})
        return given


@cache
def _known(cls: type[StrictModel]) -> frozenset[str]:
    return cls.ignored | {field.alias or name for name, field in cls.model_fields.items()}


def _describe(schema: dict[str, Any], cls: type[Any]) -> None:
    """Adds the ignored and neutral fields to the OpenAPI document."""
    described = schema.setdefault("properties", {})
    for name in sorted(cls.ignored):
        described[name] = {"description": IGNORED}
    for name in dict.fromkeys(name for name, _ in cls.neutral):
        values = [value for known, value in cls.neutral if known == name]
        described[name] = {"enum": [*values, None], "description": "Other values are not supported."}
    schema["additionalProperties"] = False


def drop_none(**values: Any) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


class JSONRequest(Request):
    """A request whose JSON has been parsed and validated."""

    content: BaseModel

    async def json(self) -> Any:
        return self.content


async def _whole_body(request: Request) -> bytes:
    """As `request.body`, without one more copy: the middleware has put the parts together."""
    message = await request.receive()
    request._body = message.get("body", b"")
    while message.get("more_body"):
        message = await request.receive()
        request._body += message.get("body", b"")
    return request._body


class JSONRoute(APIRoute):
    """A route that parses JSON whatever the content type, because `curl -d` sends a form's. Requests with an Origin
    header must declare JSON: browsers send other content types across origins without a preflight."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model: Any = self.body_field and self.body_field.field_info.annotation

        async def handler(request: Request) -> Response:
            scope, is_json = request.scope, True
            if "origin" in request.headers:
                declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                is_json = declared == "application/json" or declared.endswith("+json")
            else:
                others = [header for header in scope["headers"] if header[0].lower() != b"content-type"]
                scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
            parsed = JSONRequest(scope, request.receive)
            body = await _whole_body(parsed) if model and is_json else b""
            if not body:
                return await handle(parsed)
            set_size(len(body))
            response = respond(parsed, body)
            return await (response if len(body) <= SMALL else cancel_on_disconnect(request, response))

        async def respond(request: JSONRequest, body: bytes) -> Response:
            request.content = await run_inline_if_small(_validated, body, model)
            return await handle(request)

        return handler


def count_values(text: bytes) -> int:
    """The number of values in a JSON text, a name counted as 8. They are not parsed."""
    count: int = load().tandem_json_count(text, len(text))
    return count


def _validated(body: bytes, model: type[BaseModel]) -> BaseModel:
    """The body as an instance of the model. pydantic's parser limits the depth of nesting."""
    if (count := count_values(body)) > MAX_VALUES:
        raise RequestError(
            f"the body has {count} values, a name counted as 8: give {MAX_VALUES} at most, in several requests"
        )
    try:
        return model.model_validate(from_json(body, allow_inf_nan=False))
    except ValidationError as error:
        if error.error_count() > MAX_ERRORS:
            raise RequestError(
                f"the body has {error.error_count()} errors: see /docs for its format"
            ) from None
        found = error.errors(include_url=False, include_input=False)
    except (ValueError, RecursionError, MemoryError) as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from None
    raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found])


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        disconnect.cancel()
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # else asyncio would log it
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ---- responses


async def json_response(size: int, build: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Response:
    """A response with the value that `build` returns; `size`: how many values it has, about."""
    if size <= LARGE:
        return JSONResponse(build(*args, **kwargs))
    return Response(await encoded(build, *args, **kwargs), media_type="application/json")


async def encoded(build: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> str:
    """The JSON of the value that `build` returns, written in a thread, piece by piece: `json` holds the GIL until a
    value is written."""
    return await run_in_large_thread(lambda: "".join(throttled(pieces(build(*args, **kwargs)))))


async def written(value: Any) -> str:
    """The JSON of a value that may repeat the whole request: written in the thread for requests of this size."""
    return await run_inline_if_small(lambda: "".join(throttled(pieces(value))))


def pieces(value: Any, depth: int = DEPTH) -> Iterator[str]:
    """The JSON of a value in pieces, between which other threads run."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not depth or not any(isinstance(item, dict | list) for item in items):
        yield compact(value)
    elif isinstance(value, dict):
        for i, (name, item) in enumerate(value.items()):
            yield f"{',' if i else '{'}{compact(name)}:"
            yield from pieces(item, depth - 1)
        yield "}"
    else:
        for i, item in enumerate(value):
            yield "," if i else "["
            yield from pieces(item, depth - 1)
        yield "]"


# ---- streams


def sse_event(value: Any, name: str = "") -> str:
    """A server-sent event."""
    return sse_text(compact(value), name)


def sse_text(text: str, name: str = "") -> str:
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


def json_line(value: Any) -> str:
    """A line of NDJSON."""
    return compact(value) + "\n"


class EventStream(StreamingResponse):
    """Starlette's StreamingResponse without anyio's task group, whose import would delay the first response."""

    body_iterator: AsyncGenerator[str, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            with suppress(ClientDisconnect):  # the response has started, so no error can be sent
                await cancel_on_disconnect(Request(scope, receive), self.stream_response(send))


async def stream_response(request: Request, events: AsyncGenerator[str, None], media: str) -> EventStream:
    """Streams `events`. An error before the first event becomes a response with its own status."""
    first = await cancel_on_disconnect(request, _next(events))
    return EventStream(_rest(request, first, events), media_type=media, headers=HEADERS)


async def _next(events: AsyncGenerator[str, None]) -> str:
    return await anext(events, "")


async def _rest(request: Request, first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        yield first
        try:
            async for text in events:
                yield text
        except Exception as error:  # the status has been sent: the error is the last event
            status, code = errors.status_of(error)
            if status >= 500:
                unexpected = None if isinstance(error, TandemError) else error
                errors.LOG.error("%s: %s", request.url.path, error, exc_info=unexpected)
            yield errors.stream_error(request.url.path, status, errors.message_of(error), code)

"""Streams responses as server-sent events or JSON lines, and cancels a request when its client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from tandem.errors import TandemError
from tandem.server.http import errors

T = TypeVar("T")
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx forwards events immediately
}
compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def sse_event(value: Any, name: str = "") -> str:
    """A server-sent event."""
    return f"event: {name}\ndata: {compact(value)}\n\n" if name else f"data: {compact(value)}\n\n"


def json_line(value: Any) -> str:
    """A line of NDJSON."""
    return compact(value) + "\n"


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
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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

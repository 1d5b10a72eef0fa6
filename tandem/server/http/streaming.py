"""Answers on their way to a client: whole or as events, and none for a client that has gone."""

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

from tandem.server.http import errors

T = TypeVar("T")
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}  # the latter: proxies pass events on at once


compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def sse_event(value: Any, name: str = "") -> str:
    """A server-sent event."""
    return f"event: {name}\ndata: {compact(value)}\n\n" if name else f"data: {compact(value)}\n\n"


def json_line(value: Any) -> str:
    return compact(value) + "\n"


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client hangs up."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hangs_up(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def _hangs_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """As Starlette's, without the task group: the first of them would import it, which takes a moment."""

    body_iterator: AsyncGenerator[str, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            with suppress(ClientDisconnect):  # the answer has begun, and nobody is there to be told
                await cancel_on_disconnect(Request(scope, receive), self.stream_response(send))


async def stream_response(request: Request, events: AsyncGenerator[str, None], media: str) -> EventStream:
    """Sends `events` as they come. What fails before the first one is an answer with its own status."""
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
        except Exception as error:  # the status has been sent: the last event tells
            status, code = errors.status_of(error)
            if status >= 500:
                errors.LOG.error("%s: %r", request.url.path, error, exc_info=error)
            last = errors.body(request.url.path, status, errors.message_of(error), code)
            path = request.url.path
            yield (
                json_line(last)
                if path.startswith("/api/")
                else sse_event(last, "error" * (path == "/v1/messages"))
            )

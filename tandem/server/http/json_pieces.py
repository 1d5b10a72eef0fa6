"""Writes large responses as JSON in a thread, piece by piece: `json` holds the GIL until a value is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

from fastapi import Response
from starlette.responses import JSONResponse

from tandem.server.http.background import write
from tandem.server.http.streaming import compact
from tandem.threads import breathing

P = ParamSpec("P")
LARGE = 10_000  # values; a smaller response takes a few milliseconds
DEPTH = 5  # levels of a value that are written one by one: a response's choices, and the tokens of each


async def json_response(size: int, build: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Response:
    """A response with the value that `build` returns; `size`: how many values it has, about."""
    if size <= LARGE:
        return JSONResponse(build(*args, **kwargs))
    return Response(await encoded(build, *args, **kwargs), media_type="application/json")


async def encoded(build: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> str:
    """The JSON of the value that `build` returns."""
    return await write(lambda: "".join(breathing(pieces(build(*args, **kwargs)))))


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

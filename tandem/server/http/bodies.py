"""How a request's body is read: as JSON, by a parser that deep nesting does not trouble."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException


class JSONRequest(Request):
    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except (ValueError, RecursionError, MemoryError) as error:
            raise HTTPException(400, f"the body is not JSON: {error}") from None


class JSONRoute(APIRoute):
    """Reads JSON whatever the request calls it, for `curl -d` calls it a form. But not if a web page sends it: from
    other sites, browsers let pass without asking what does not say that it is JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            scope = request.scope
            if "origin" not in request.headers:
                others = [header for header in scope["headers"] if header[0].lower() != b"content-type"]
                scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
            return await handle(JSONRequest(scope, request.receive))

        return handler

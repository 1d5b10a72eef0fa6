"""The web page: static files of this package. A content security policy forbids requests to other hosts."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

FOLDER = Path(__file__).parent / "assets"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # revalidate with the ETag
    "cross-origin-opener-policy": "same-origin",
}


@cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    """name -> (content, content type, ETag). Only these names are served, so there is no path traversal."""
    found = {}
    for path in FOLDER.iterdir():
        if path.suffix in TYPES:
            content = path.read_bytes()
            version = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found[path.name] = content, f"{TYPES[path.suffix]}; charset=utf-8", version
    return found


def page_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    def index(request: Request) -> Response:
        return _respond(request, "index.html")

    @router.get("/page/{name}")
    def file(request: Request, name: str) -> Response:
        return _respond(request, name)

    @router.get("/favicon.ico")
    def icon(request: Request) -> Response:
        return _respond(request, "icon.svg")

    return router


def _respond(request: Request, name: str) -> Response:
    if name not in _files():
        return PlainTextResponse("there is no such file: the page is at /", 404)
    content, kind, version = _files()[name]
    headers = {**HEADERS, "etag": version}
    if request.headers.get("if-none-match") == version:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)

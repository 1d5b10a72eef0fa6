"""The web page: static files of this package. A content security policy forbids requests to other hosts."""

from __future__ import annotations

import base64
import gzip
import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

FOLDER = Path(__file__).parent / "assets"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".woff2": "font/woff2",
    ".png": "image/png",
    ".webmanifest": "application/manifest+json",
}
COMPRESSED = (".woff2", ".png")  # files that gzip does not make smaller
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; frame-src 'self'; "
    "img-src 'self' blob:; font-src 'self'; connect-src 'self'; worker-src 'self'; manifest-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # revalidate with the ETag
    "cross-origin-opener-policy": "same-origin",
    "vary": "accept-encoding",
}


# The worker that talks to MCP servers which the user adds may reach other hosts; the page itself may not.
POLICIES = {"mcp-worker.js": "default-src 'none'; connect-src http: https:"}
DIAGRAM = "diagram.html"  # its scripts are in it; it has an origin of its own, and no network
DIAGRAM_POLICY = (
    "default-src 'none'; script-src {}; style-src 'unsafe-inline'; frame-ancestors 'self'; sandbox {}"
)


@dataclass
class File:
    path: Path

    @cached_property
    def content(self) -> bytes:
        return self.path.read_bytes()

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.content, mtime=0)

    @cached_property
    def version(self) -> str:
        return hashlib.sha256(self.content).hexdigest()[:16]

    @property
    def type(self) -> str:
        kind = TYPES[self.path.suffix]
        return kind if self.path.suffix in COMPRESSED else f"{kind}; charset=utf-8"


@cache
def _files() -> dict[str, File]:
    """Only the names in this table are served, so there is no path traversal."""
    paths = (path for path in FOLDER.rglob("*") if path.suffix in TYPES)
    return {path.relative_to(FOLDER).as_posix(): File(path) for path in paths}


@cache
def _diagram_policy() -> str:
    """Allows the document's own script and the library, by their sums."""
    own = _files()[DIAGRAM].content.partition(b"<script>")[2].partition(b"</script>")[0]
    sums = (hashlib.sha256(script).digest() for script in (own, _files()["vendor/mermaid.js"].content))
    allowed = " ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in sums)
    return DIAGRAM_POLICY.format(allowed, "allow-scripts")


def page_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    def index(request: Request) -> Response:
        return _respond(request, "index.html")

    @router.get("/page/{name:path}")
    def file(request: Request, name: str) -> Response:
        return _respond(request, name)

    @router.get("/favicon.ico")
    def icon(request: Request) -> Response:
        return _respond(request, "icon.svg")

    return router


def _respond(request: Request, name: str) -> Response:
    if not (file := _files().get(name)):
        return PlainTextResponse("there is no such file: the page is at /", 404)
    gzipped = "gzip" in request.headers.get("accept-encoding", "") and file.path.suffix not in COMPRESSED
    headers = {**HEADERS, "etag": f'"{file.version}{"-gzip" * gzipped}"'}
    if name in POLICIES:
        headers["content-security-policy"] = POLICIES[name]
    if name == DIAGRAM:
        headers["content-security-policy"] = _diagram_policy()
    if name == "service-worker.js":
        headers["service-worker-allowed"] = "/"
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    if gzipped:
        headers["content-encoding"] = "gzip"
    return Response(file.compressed if gzipped else file.content, media_type=file.type, headers=headers)

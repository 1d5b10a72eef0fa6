"""`/openapi.json`, and `/docs`, which shows it: FastAPI's own page loads scripts from other hosts.

Both are built in a thread, at the first request.
"""

from __future__ import annotations

from functools import lru_cache
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

from tandem.server.http.background import run_in_large_thread
from tandem.server.http.bodies import IGNORED, compact

router = APIRouter(include_in_schema=False)
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .4rem 0 }
code { font-family: ui-monospace, monospace }
table { border-spacing: 1rem .2rem }
td { vertical-align: top }
.method { display: inline-block; width: 4rem; text-transform: uppercase; opacity: .7 }
"""
HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
LIMITS = {"minimum": "≥ {}", "maximum": "≤ {}", "exclusiveMinimum": "> {}", "exclusiveMaximum": "< {}"}


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    return Response(await run_in_large_thread(_encoded, request.app), media_type="application/json")


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    return HTMLResponse(await run_in_large_thread(_page, request.app), headers=HEADERS)


@lru_cache(1)
def _document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's OpenAPI document without status 422: validation errors are 400 here."""
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for operations in found["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    return found


@lru_cache(1)
def _encoded(app: FastAPI) -> str:
    return compact(_document(app))


@lru_cache(1)
def _page(app: FastAPI) -> str:
    api, tags = _document(app), dict[str, list[str]]()
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            shown = _operation(path, method, operation, api)
            tags.setdefault(operation.get("tags", ["more"])[0], []).append(shown)
    body = "".join(f"<h2>{escape(tag)}</h2>{''.join(shown)}" for tag, shown in tags.items())
    name = f"Tandem {api['info']['version']}"
    head = f"<title>{name}</title><style>{STYLE}</style>"
    intro = f"<h1>{name}</h1><p>Machine-readable: <a href='openapi.json'>openapi.json</a></p>"
    return f"<!doctype html><html lang=en><meta charset=utf-8>{head}{intro}{body}"


def _operation(path: str, method: str, operation: dict[str, Any], document: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    fields = _fields(content.get("schema", {}), document)
    statuses = ", ".join(sorted(operation["responses"]))
    title = f"<span class=method>{escape(method)}</span><code>{escape(path)}</code>"
    about = escape(operation.get("description", ""))
    return f"<details><summary>{title} {about}</summary>{fields}<p>Status codes: {escape(statuses)}</p></details>"


def _fields(schema: dict[str, Any], document: dict[str, Any]) -> str:
    schema = _resolved(schema, document)
    required = schema.get("required", [])
    rows = [
        f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}"
        f"<td>{escape(_kind(field, document))}<td>{escape(field.get('description', ''))}"
        for name, field in schema.get("properties", {}).items()
    ]
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = document["components"]["schemas"][name] if name else schema
    return found


def _kind(schema: dict[str, Any], document: dict[str, Any], depth: int = 0) -> str:
    """A short description of a field's type, with objects two levels deep."""
    if options := schema.get("anyOf"):
        kinds = [_kind(option, document, depth) for option in options if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if values := schema.get("enum", [schema["const"]] if "const" in schema else None):
        return " | ".join(repr(value) for value in values if value is not None)
    schema = _resolved(schema, document)
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}), document, depth)}"
    if properties := schema.get("properties"):
        counting = {name: field for name, field in properties.items() if field.get("description") != IGNORED}
        inner = (f"{name}: {_kind(field, document, depth + 1)}" for name, field in counting.items())
        return "{" + (", ".join(inner) if depth < 2 else ", ".join(counting)) + "}"
    limits = [
        text.format(f"{schema[name]:g}") for name, text in LIMITS.items() if abs(schema.get(name, 2e9)) < 2e9
    ]
    return " ".join([str(schema.get("type", "anything")), *limits])

"""Maps exceptions to HTTP status codes and to the error body of each API (error_formats.py).

An unexpected exception is a 500 that reveals nothing; the log has its traceback.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tandem import errors
from tandem.server.http.error_formats import api_of

LOG = logging.getLogger("tandem.server")
RETRY_SECONDS = "1"
NO_DETAILS: Mapping[str, int] = {}
MAX_MESSAGE = 1000  # characters; a message may repeat what the client has sent
UNION_MEMBER = r"^(str|int|float|bool)$|^[A-Z]|\["  # pydantic's names of the members of a union type
FOLDERS = r"(?<![\w/.:])/(?:[^/:;,\n]+/)+"  # of an absolute path

# (exception, status, OpenAI's error code): the first match counts; any other TandemError is a 500.
STATUS: tuple[tuple[type[errors.TandemError], int, str | None], ...] = (
    (errors.ContextError, 400, "context_length_exceeded"),
    (errors.QueueFullError, 429, "queue_full"),
    (errors.DeadlineError, 408, "timeout"),
    (errors.ResponseNotFoundError, 404, "not_found"),
    (errors.SessionNotFoundError, 404, "not_found"),
    (errors.RequestError, 400, None),
    (errors.TemplateError, 400, "chat_template"),
    (errors.ModelNotFoundError, 404, "model_not_found"),
    (errors.DownloadError, 502, "download"),
    (errors.ToolProgramError, 502, "mcp"),
    (errors.OutOfMemoryError, 503, "out_of_memory"),
    (errors.ResponseStoreError, 503, "responses"),
    (errors.DeviceError, 503, "device"),
    (errors.ModelFileError, 503, "model_file"),
    (errors.UnsupportedModelError, 503, "model_file"),
)
# Errors of Starlette's router.
UNROUTED = {
    404: "there is no endpoint {path}: see /docs; OpenAI's clients need a base URL that ends in /v1",
    405: "{path} does not support {method}: see /docs",
}


def install(app: FastAPI) -> None:
    """Installs the exception handlers."""
    app.add_exception_handler(errors.TandemError, _tandem_error)
    app.add_exception_handler(MemoryError, _no_memory)
    app.add_exception_handler(RuntimeError, _no_thread)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _disconnected)
    app.add_exception_handler(Exception, _unexpected)


def status_of(error: BaseException) -> tuple[int, str | None]:
    """(HTTP status, OpenAI's error code) of an exception."""
    return next(
        ((status, code) for exception, status, code in STATUS if isinstance(error, exception)), (500, None)
    )


def message_of(error: BaseException) -> str:
    """The message for the client: of our own errors only, since others may reveal internals; files without folders."""
    if isinstance(error, errors.RequestError):
        return str(error)  # about what the client sent
    if isinstance(error, errors.TandemError):
        return re.sub(FOLDERS, "", str(error))
    return "internal server error: see the server's log"


def details_of(error: BaseException) -> dict[str, int]:
    """What a client may need besides the message, by llama.cpp's names: of a prompt that is too long, its tokens
    (a lower bound) and the context."""
    if not isinstance(error, errors.ContextError) or error.prompt_tokens is None or error.context is None:
        return {}
    return {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context}


def response(
    path: str,
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    details: Mapping[str, int] = NO_DETAILS,
) -> JSONResponse:
    """An error response in the format of the API that `path` belongs to."""
    headers = {"Retry-After": RETRY_SECONDS, **(headers or {})} if status in (429, 503) else headers
    return JSONResponse(body(path, status, message, code, param, details), status, headers)


def body(
    path: str,
    status: int,
    message: str,
    code: str | None = None,
    param: str | None = None,
    details: Mapping[str, int] = NO_DETAILS,
) -> Any:
    """The error body of the API that `path` belongs to."""
    shown = message[:MAX_MESSAGE] + "..." * (len(message) > MAX_MESSAGE)
    return api_of(path).error_body(status, shown.encode(errors="replace").decode(), code, param, details)


def stream_error(path: str, status: int, message: str, code: str | None = None) -> str:
    """The last event of a stream that failed after its status was sent."""
    text = json.dumps(body(path, status, message, code), ensure_ascii=False, separators=(",", ":"))
    return api_of(path).stream_error.format(text)


async def _tandem_error(request: Request, error: Exception) -> JSONResponse:
    status, code = status_of(error)
    if status >= 500:
        LOG.error("%s: %s", request.url.path, error)
    return response(request.url.path, status, message_of(error), code=code, details=details_of(error))


async def _no_memory(request: Request, error: Exception) -> JSONResponse:
    return await _tandem_error(request, errors.OutOfMemoryError())


async def _no_thread(request: Request, error: Exception) -> JSONResponse:
    if "can't start new thread" not in str(error):
        raise error
    return await _no_memory(request, error)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # Of a field with several types, the error of the type that matched best.
    first = max(error.errors(), key=lambda one: len(one["loc"]))
    place = [str(part)[:80] for part in first["loc"][1:] if not re.search(UNION_MEMBER, str(part))]
    param = first.get("ctx", {}).get("field") or (place[0] if place else None)
    where = f"{'.'.join(place)}: " if place else ""
    return response(request.url.path, 400, f"{where}{first['msg']}", param=param)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path = request.url.path
    unrouted = UNROUTED.get(error.status_code)
    message = unrouted.format(method=request.method, path=path[:80]) if unrouted else str(error.detail)
    return response(path, error.status_code, message, headers=error.headers)


async def _disconnected(request: Request, error: Exception) -> Response:
    """For the log only: the client has disconnected."""
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    LOG.error("%s: %r", request.url.path, error, exc_info=error)
    return response(request.url.path, 500, message_of(error))

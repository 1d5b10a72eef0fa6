"""OpenAI's error body."""

from __future__ import annotations

from typing_extensions import TypedDict

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


def error_body(status: int, message: str, code: str | None, param: str | None) -> ErrorBody:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))

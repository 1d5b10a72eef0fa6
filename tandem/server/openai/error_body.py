"""OpenAI's error body, and the errors of an endpoint in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired

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
    n_prompt_tokens: NotRequired[int]  # of a prompt that is too long, at least; as in llama.cpp
    n_ctx: NotRequired[int]


class ErrorBody(TypedDict):
    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The request is invalid or not supported",
        401: "The API key is missing or wrong",
        404: "There is no such model",
        408: "The request timed out",
        413: "The request body is too large",
        429: "Too many requests: try again later",
        503: "The device or the model is not available",
    }.items()
}


def error_body(
    status: int, message: str, code: str | None, param: str | None, details: Mapping[str, int]
) -> ErrorBody:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    detail = ErrorDetail(message=message, type=kind, param=param, code=code)
    return ErrorBody(error={**detail, **details})  # type: ignore[typeddict-item]

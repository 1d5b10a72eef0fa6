"""Anthropic's error body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import TypedDict

from tandem.server.openai.error_body import ERROR_TYPES as OPENAI_ERROR_TYPES

ERROR_TYPES = {**OPENAI_ERROR_TYPES, 413: "request_too_large", 503: "overloaded_error"}


class AnthropicErrorBody(TypedDict):
    type: str
    error: dict[str, Any]


def error_body(
    status: int, message: str, code: str | None, param: str | None, details: Mapping[str, int]
) -> AnthropicErrorBody:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if param == "thread":  # with these words the client goes on without a stored conversation
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return AnthropicErrorBody(type="error", error=error)

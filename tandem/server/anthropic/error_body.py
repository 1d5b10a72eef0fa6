"""Anthropic's error body."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import TypedDict

from tandem.server.openai.error_body import ERROR_TYPES as OPENAI_ERROR_TYPES

ERROR_TYPES = {**OPENAI_ERROR_TYPES, 413: "request_too_large", 503: "overloaded_error"}


class AnthropicErrorBody(TypedDict):
    type: str
    error: dict[str, str]


def error_body(
    status: int, message: str, code: str | None, param: str | None, details: Mapping[str, int]
) -> AnthropicErrorBody:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return AnthropicErrorBody(type="error", error={"type": kind, "message": message})

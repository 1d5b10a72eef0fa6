"""llama-server's error body: OpenAI's, with the status as its code and llama-server's error types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired

from typing_extensions import TypedDict

from tandem.server.openai.error_body import ERRORS as OPENAI_ERRORS

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
}
CONTEXT = "exceed_context_size_error"


class LlamaErrorDetail(TypedDict):
    code: int
    message: str
    type: str
    param: str | None
    n_prompt_tokens: NotRequired[int]
    n_ctx: NotRequired[int]


class LlamaErrorBody(TypedDict):
    error: LlamaErrorDetail


ERRORS = {status: {**about, "model": LlamaErrorBody} for status, about in OPENAI_ERRORS.items()}


def error_body(
    status: int, message: str, code: str | None, param: str | None, details: Mapping[str, int]
) -> LlamaErrorBody:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "unavailable_error")
    kind = CONTEXT if code == "context_length_exceeded" else kind
    detail = LlamaErrorDetail(code=status, message=message, type=kind, param=param)
    return LlamaErrorBody(error={**detail, **details})  # type: ignore[typeddict-item]

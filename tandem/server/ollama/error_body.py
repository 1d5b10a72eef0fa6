"""Ollama's error body."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import TypedDict


class OllamaErrorBody(TypedDict):
    error: str


def error_body(
    status: int, message: str, code: str | None, param: str | None, details: Mapping[str, int]
) -> OllamaErrorBody:
    return OllamaErrorBody(error=message)

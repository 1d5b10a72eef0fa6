"""Ollama's error body."""

from __future__ import annotations

from typing_extensions import TypedDict


class OllamaErrorBody(TypedDict):
    error: str


def error_body(status: int, message: str, code: str | None, param: str | None) -> OllamaErrorBody:
    return OllamaErrorBody(error=message)

"""The parts of a chat message: texts and images."""

from __future__ import annotations

from typing import Any, Literal

from tandem.errors import RequestError
from tandem.server.core.images import Content, content_of, from_url
from tandem.server.http.bodies import StrictModel


class ImageURL(StrictModel):
    ignored = frozenset({"detail"})
    url: str


class Part(StrictModel):
    ignored = frozenset({"cache_control", "prompt_cache_breakpoint"})
    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageURL | None = None


def content_of_parts(parts: list[Part]) -> Content:
    return content_of([_part(part) for part in parts])


def _part(part: Part) -> dict[str, Any]:
    if part.type == "text" and part.text is not None:
        return {"type": "text", "text": part.text}
    if part.type == "image_url" and part.image_url:
        return from_url(part.image_url.url)
    raise RequestError(f"a part of type {part.type!r} has no {part.type!r}: give it")

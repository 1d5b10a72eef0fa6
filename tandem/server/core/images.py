"""Images in requests: from the forms that APIs give them to the parts of a message that `LLM.chat` takes."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from tandem.errors import RequestError

# Content of a message: a text, or texts and images.
Content = str | list[dict[str, Any]]


def from_url(url: str) -> dict[str, Any]:
    """The image of a data URL. No other URL is fetched: a server must not request what its users name."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise RequestError(
            "an image must be a data URL (data:image/png;base64,...): this server fetches no images"
        )
    return from_base64(data)


def from_base64(data: str) -> dict[str, Any]:
    try:
        return {"type": "image", "image": base64.b64decode(data, validate=True)}
    except (ValueError, binascii.Error):
        raise RequestError("the data of an image is not valid base64: encode it again") from None


def content_of(parts: list[dict[str, Any]]) -> Content:
    """Texts alone become one text, as chat templates expect it."""
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def joined(*contents: Content) -> Content:
    """Contents one after the other. Texts that meet become one part: templates strip each."""
    if all(isinstance(content, str) for content in contents):
        return "".join(map(str, contents))
    parts: list[dict[str, Any]] = []
    for content in contents:
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if parts and parts[-1]["type"] == part["type"] == "text":
                parts[-1] = {**part, "text": parts[-1]["text"] + part["text"]}
            else:
                parts.append(part)
    return parts


def text_of(content: Content, where: str) -> str:
    """A content that cannot have images. `where`: what it is the content of."""
    if not isinstance(content, str):
        raise RequestError(f"{where} cannot have images: leave them out")
    return content

"""Images in requests: from the forms that APIs give them to the parts of a message that `LLM.chat` takes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from itertools import chain, groupby
from typing import Any

from tandem.engine.image_reader import ImageReader
from tandem.engine.images import ImageParts
from tandem.engine.llm import LLM
from tandem.errors import ContextError, QueueFullError, RequestError
from tandem.server.core.image_urls import ImageFetcher, RemoteImage

# Content of a message: a text, or texts and images.
Content = str | list[dict[str, Any]]
MAX_PIXEL_BYTES = 256 << 20  # of the images of all requests in progress, as encoders take them


class RequestImages:
    """Reads the images of requests, and limits the memory of those in progress. For one event loop."""

    def __init__(self, hosts: Collection[str] = ()) -> None:
        """`hosts`: from which images are fetched that a request names by their address."""
        self._reader, self._fetcher = ImageReader(), ImageFetcher(hosts)
        self._bytes = 0  # of pixels, of all requests in progress

    @asynccontextmanager
    async def read(self, llm: LLM, messages: list[Any], limit: int | None = None) -> AsyncIterator[None]:
        """Puts what they are for the encoder in the places of image files, for a request that ends with the block.
        `limit`: tokens that its prompt may have; a prompt whose images alone have more is refused."""
        contents = (message["content"] for message in messages if isinstance(message["content"], list))
        parts = [part for content in contents for part in content if part["type"] == "image"]
        known, taken, tokens = dict[bytes | RemoteImage, ImageParts](), 0, 0
        try:
            for part in parts:
                config = llm.vision(len(parts)).config
                if (file := part["image"]) in known:
                    read = known[file]
                elif isinstance(file, RemoteImage):
                    async with self._fetcher.fetched(file) as data:
                        read = await self._reader.read(data, config)
                else:
                    read = await self._reader.read(file, config)
                part["image"] = known[file] = read
                pixels = [one for one in read if not isinstance(one, str)]
                tokens += sum(map(config.tokens, pixels))
                if limit is not None and tokens >= limit:
                    raise ContextError(
                        f"the prompt is too long: this model's maximum context length is {llm.context} tokens, and its "
                        f"images have {tokens} or more: give fewer",
                        tokens,
                        llm.context,
                    )
                taken += (nbytes := sum(one.nbytes for one in pixels))
                self._bytes += nbytes
                if self._bytes > MAX_PIXEL_BYTES and self._bytes > taken:
                    raise QueueFullError("images of other requests fill the memory for them: try again later")
            yield
        finally:
            self._bytes -= taken

    async def close(self) -> None:
        self._fetcher.close()
        await self._reader.close()


def from_url(url: str) -> dict[str, Any]:
    """The image of a data URL, or of an address that is fetched later if the settings allow it."""
    if not url.startswith("data:"):
        return {"type": "image", "image": RemoteImage(url)}
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RequestError("an image must be a data URL in base64 (data:image/png;base64,...)")
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
    given = [[{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents]
    parts: list[dict[str, Any]] = []
    for is_text, group in groupby(chain.from_iterable(given), lambda part: part["type"] == "text"):
        some = list(group)
        parts += [{"type": "text", "text": "".join(part["text"] for part in some)}] if is_text else some
    return parts


def text_of(content: Content, where: str) -> str:
    """A content that cannot have images. `where`: what it is the content of."""
    if not isinstance(content, str):
        raise RequestError(f"{where} cannot have images: leave them out")
    return content

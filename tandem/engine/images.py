"""Images in prompts: where they are, their embeddings, and a cache of them.

The embeddings of an image take the places of tokens in a sequence. For some models they see each other in attention:
all of them are computed in one step then, unless the first are in the prefix cache.
"""

from __future__ import annotations

from _blake2 import blake2b
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np

from tandem.kernels.abi import TOKEN_POSITION
from tandem.kernels.kernel import Array
from tandem.program.step_inputs import StepInputs

CACHE_BYTES = 256 << 20  # of the embeddings that are kept for the next request with the same image
MAX_CACHED = 1024  # images
NO_PIXELS: Array = np.empty(0, np.uint8)
PLACEHOLDER = 0  # the id that tokens of an image have


class Image:
    """An image as an encoder takes it, and its embeddings once they are computed."""

    __slots__ = ("digest", "embeddings", "grid", "is_whole", "pixels", "tokens")

    def __init__(
        self, pixels: Array, tokens: int, *, is_whole: bool = True, grid: tuple[int, int] = (1, 0)
    ) -> None:
        """`pixels`: uint8 [height, width, channels]. `tokens`: the embeddings that they will become. `is_whole`: these
        see each other in attention. `grid`: their rows and columns, for models whose positions have sections."""
        self.pixels, self.tokens, self.is_whole, self.grid = pixels, tokens, is_whole, grid
        header = repr((pixels.shape, tokens)).encode()
        self.digest = blake2b(header + pixels.tobytes(), digest_size=16).digest()
        self.embeddings: Array | None = None  # float32 [tokens, width]; there are no pixels any more then

    def set_embeddings(self, embeddings: Array) -> None:
        self.embeddings, self.pixels = embeddings, NO_PIXELS


class ImageParts(list[str | Array]):
    """What stands in a prompt for an image that has been read: texts, and pixels."""


class ImageSpan(NamedTuple):
    """The positions of an image in a sequence."""

    begin: int
    image: Image

    @property
    def end(self) -> int:
        return self.begin + self.image.tokens

    @property
    def digest(self) -> bytes:
        return self.image.digest


class ImagePlace(Protocol):
    """What the hashes of KV blocks need of an image: its positions and content."""

    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def digest(self) -> bytes: ...


class PromptIds(list[int]):
    """The token ids of a prompt with images; those of an image's tokens are PLACEHOLDER."""

    images: Sequence[ImageSpan] = ()


def images_in(prompt: list[int]) -> Sequence[ImageSpan]:
    return prompt.images if isinstance(prompt, PromptIds) else ()


def text_ids(prompt: list[int], images: Sequence[ImageSpan]) -> list[int]:
    """The ids of a prompt without those that stand for images."""
    if not images:
        return prompt
    ids, at = list[int](), 0
    for span in images:
        ids += prompt[at : span.begin]
        at = span.end
    return ids + prompt[at:]


def with_context(context: Sequence[int], prompt: list[int], bos_id: int | None) -> PromptIds:
    """The ids of a prompt after those of an earlier one, without its BOS token."""
    images = images_in(prompt)
    skipped = int(prompt[0] == bos_id and not (images and images[0].begin == 0))
    ids, offset = PromptIds([*context, *prompt[skipped:]]), len(context) - skipped
    ids.images = [ImageSpan(span.begin + offset, span.image) for span in images]
    return ids


def whole_images(images: Iterable[ImageSpan], begin: int, count: int, room: int) -> int:
    """Returns how many tokens from `begin` on a step computes: about `count`, so that it cuts no whole image in two.
    One that does not fit into `count` tokens may take up to `room`; 0: it must wait for a step with more room."""
    end = begin + count
    for span in images:
        if span.begin < end < span.end and span.image.is_whole:
            if span.begin > begin:
                return span.begin - begin
            return span.end - begin if span.end - begin <= room else 0
    return count


def sectioned_positions(images: Iterable[ImageSpan], begin: int, end: int) -> Array:
    """int [end - begin, 3]: the positions of tokens in a sequence for models where an image takes as many positions as
    it has rows or columns. Its tokens have its first position, and their row and column after that."""
    positions, shift = np.repeat(np.arange(begin, end)[:, None], 3, axis=1), 0
    for span in images:
        if span.begin >= end:
            break
        rows, columns = span.image.grid
        first, last = max(begin, span.begin), min(end, span.end)
        if first < last:
            inside = np.arange(first, last) - span.begin
            own = np.stack([0 * inside, inside // columns, inside % columns], axis=1)
            positions[first - begin : last - begin] = span.begin + shift + own
        change = max(rows, columns) - span.image.tokens
        positions[max(0, span.end - begin) :] += change
        shift += change
    return positions


class SectionedAngles:
    """Cosines and sines of tokens whose positions have sections."""

    def __init__(self, table: Array, axes: Sequence[int]) -> None:
        """`table`: float32 [positions, pairs, 2]. `axes`: which of a token's positions turns each pair."""
        self._table, self._axes, self._pairs = table, np.array(axes), np.arange(len(axes))
        self._rows = table.reshape(len(table), -1)

    def at(self, position: int) -> Array:
        """Of a token whose positions are the same: float32 [2 * pairs]."""
        row: Array = self._rows[position]
        return row

    def write(self, inputs: StepInputs, row: int, images: Iterable[ImageSpan], begin: int, end: int) -> None:
        """Writes those of a sequence's tokens in [begin, end) from `row` on, where the kernel finds them."""
        rows = slice(row, row + end - begin)
        inputs.angles[rows] = self.of(sectioned_positions(images, begin, end))
        inputs.tokens[rows, TOKEN_POSITION] = np.arange(rows.start, rows.stop)

    def of(self, positions: Array) -> Array:
        """int [tokens, sections] -> float32 [tokens, 2 * pairs]."""
        rows: Array = self._table[positions[:, self._axes], self._pairs].reshape(len(positions), -1)
        return rows


class ImageCache:
    """The images of recent requests by content: the same image is encoded once. For any thread."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self.encoded = 0  # images that were encoded so far
        self._images: OrderedDict[bytes, Image] = OrderedDict()  # least recently used first
        self._lock = Lock()

    def share(self, image: Image) -> Image:
        """Returns the cached image with the same content, or this one, which is cached from now on."""
        with self._lock:
            found = self._images.setdefault(image.digest, image)
            self._images.move_to_end(image.digest)
            self._evict()
            return found

    def evict(self) -> None:
        """Forgets images, so that the rest fits; requests that have one keep it."""
        with self._lock:
            self._evict()

    def _evict(self) -> None:
        sizes = {digest: _nbytes(image) for digest, image in self._images.items()}
        total = sum(sizes.values())
        for digest, nbytes in sizes.items():
            if total <= self.max_bytes and len(self._images) <= MAX_CACHED:
                return
            del self._images[digest]
            total -= nbytes


def _nbytes(image: Image) -> int:
    return image.pixels.nbytes if image.embeddings is None else image.embeddings.nbytes

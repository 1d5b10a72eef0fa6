"""The configuration of a vision encoder, read from the metadata of an `mmproj` file: one class for all encoders."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.gguf.file import GGUF
from tandem.kernels.abi import MAX_HEAD_DIM
from tandem.kernels.kernel import Array
from tandem.model.config import Metadata

CHANNELS = 3
MAX_PATCHES = 1 << 14  # of an image: the encoder's activations grow with them


@dataclass(frozen=True)
class VisionConfig:
    projector: str  # names the encoder
    patch_size: int  # pixels of a side
    merge: int  # patches of a side that become one embedding
    dim: int
    ffn_dim: int
    layers: int
    heads: int
    eps: float
    mean: tuple[float, ...]  # of each channel, subtracted from pixels between 0 and 1
    std: tuple[float, ...]
    out_dim: int  # width of an embedding: that of the language model
    max_patches: int  # of an image
    image_size: int = 0  # pixels of a side, if all images have the same size
    longest_edge: int = 0  # pixels of the longer side, before an image is cut into tiles
    min_pixels: int = 0  # of an image, if each has a size of its own
    max_pixels: int = 0
    # Rows of the square of learned positions, if the host interpolates them; or of the tables by column and by row.
    position_side: int = 0
    head_width: int = 0  # columns of a head with zeros after its own; 0: there are none
    clamps: bool = False  # what matrices read and write is clamped
    standardises: bool = False  # pooled patches: minus a bias, times a factor
    # Of the frequencies by which queries and keys rotate, by row and column of the patch; 0: they do not rotate.
    rope_base: float = 0.0
    deepstack_after: tuple[int, ...] = ()  # layers after which there are further embeddings
    window: int = 0  # rows of embeddings in a window, in which patches see each other; 0: they see all
    full_every: int = 0  # so many layers have one in which they see all

    @property
    def rotates(self) -> bool:
        return self.rope_base > 0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def heads_dim(self) -> int:
        """Columns of all heads."""
        return self.heads * (self.head_width or self.head_dim)

    @property
    def patch_dim(self) -> int:
        return CHANNELS * self.patch_size**2

    @property
    def max_tokens(self) -> int:
        """The most embeddings of an image."""
        return self.max_patches // self.merge**2

    def grid(self, pixels: Array) -> tuple[int, int]:
        """Rows and columns of the embeddings of an image [height, width, channels]."""
        height, width = pixels.shape[:2]
        side = self.patch_size * self.merge
        return height // side, width // side

    def tokens(self, pixels: Array) -> int:
        """The embeddings of an image."""
        rows, columns = self.grid(pixels)
        return rows * columns

    def places(self, pixels: Array) -> Array:
        """The place in the image, row by row, of each patch in the order of the encoder's tokens: the patches of one
        embedding are neighbours."""
        (rows, columns), merge = self.grid(pixels), self.merge
        places = np.arange(rows * columns * merge**2).reshape(rows, merge, columns, merge)
        ordered: Array = places.transpose(0, 2, 1, 3).reshape(rows * columns, -1)[self.order(pixels)].ravel()
        return ordered

    def group_of(self, layer: int) -> int:
        """The KV group of a layer: 0 where patches see all, 1 where they see their window."""
        return int(bool(self.window) and (layer + 1) % self.full_every != 0)

    def _windows(self, pixels: Array) -> Array:
        """The number of the window of each embedding, row by row."""
        rows, columns = (np.arange(side) // (self.window or side) for side in self.grid(pixels))
        numbers: Array = (rows[:, None] * (columns[-1] + 1) + columns).ravel()
        return numbers

    def order(self, pixels: Array) -> Array:
        """The embeddings in the order in which they are computed: those of a window are neighbours."""
        return np.argsort(self._windows(pixels), kind="stable")

    def window_sizes(self, pixels: Array) -> list[int]:
        """The patches of each window."""
        sizes: list[int] = (np.bincount(self._windows(pixels)) * self.merge**2).tolist()
        return sizes

    @property
    def max_windows(self) -> int:
        """Of an image that is one row of embeddings: no other has more."""
        return -(-self.max_tokens // self.window) if self.window else 1

    def patches(self, pixels: Array) -> Array:
        """uint8 [height, width, channels] -> normalised float32 [patches, channels * size * size], in the order of the
        encoder's tokens."""
        size, (rows, columns) = self.patch_size, (side * self.merge for side in self.grid(pixels))
        patches = pixels.reshape(rows, size, columns, size, CHANNELS).transpose(0, 2, 4, 1, 3)
        ordered = patches.reshape(rows * columns, CHANNELS, -1)[self.places(pixels)]
        mean, std = (np.array(values, np.float32)[:, None] for values in (self.mean, self.std))
        every_byte = np.arange(256, dtype=np.float32)
        scaled = (every_byte * np.float32(1 / 255) - mean) / std  # [channels, 256]
        found: Array = np.empty(ordered.shape, np.float32)
        for channel in range(CHANNELS):
            np.take(scaled[channel], ordered[:, channel], out=found[:, channel], mode="clip")
        return found.reshape(rows * columns, -1)


class VisionMetadata(Metadata):
    """Typed, checked access to the keys of a vision encoder ("clip.vision.patch_size" and the like)."""

    def __init__(self, gguf: GGUF, projector: str) -> None:
        super().__init__(gguf)
        self.projector = projector

    def key(self, name: str) -> str:
        return f"clip.vision.{name}"

    def vision_config(self, **own: Any) -> VisionConfig:
        """Reads the fields of every encoder, and takes the others."""
        own = {
            "patch_size": self.count("patch_size", maximum=1 << 10),
            "mean": self._channels("image_mean"),
            "std": self._channels("image_std"),
            "eps": self.number("attention.layer_norm_epsilon"),
        } | own
        return VisionConfig(projector=self.projector, **(own if "layers" in own else self._layers(own) | own))

    def _layers(self, own: dict[str, Any]) -> dict[str, Any]:
        heads, dim = self.count("attention.head_count", maximum=1 << 10), self.count("embedding_length")
        if dim % heads or dim // heads > MAX_HEAD_DIM:
            self.gguf.fail(
                self.key("attention.head_count"),
                f"{heads} heads do not divide {dim}: convert the model again",
            )
        if own.get("rope_base") and dim // heads % 4:
            self.gguf.fail(
                self.key("attention.head_count"),
                f"heads of {dim // heads} do not have as many pairs for rows as for columns: convert the model again",
            )
        return {
            "dim": dim,
            "heads": heads,
            "ffn_dim": self.count("feed_forward_length"),
            "layers": self.count("block_count", maximum=1024),
        }

    def square(self, merge: int) -> tuple[int, int]:
        """The side of an image that is always a square of whole groups of patches, and how many patches it has."""
        image, patch = self.count("image_size", maximum=1 << 14), self.count("patch_size", maximum=1 << 10)
        if image % (patch * merge) or (image // patch) ** 2 > MAX_PATCHES:
            self.gguf.fail(
                self.key("image_size"),
                f"{image} pixels are not whole groups of patches: convert the model again",
            )
        return image, (image // patch) ** 2

    def pixel_limits(self, patch: int, merge: int, minimum: int, maximum: int) -> tuple[int, int, int]:
        """The fewest and the most pixels of a resized image, and how many patches it has at most."""
        least = self.count("image_min_pixels", minimum, maximum=MAX_PATCHES * patch**2)
        most = min(self.count("image_max_pixels", maximum, maximum=1 << 30), MAX_PATCHES * patch**2)
        patches = most // (patch * merge) ** 2 * merge**2
        if least > most or not patches:
            self.gguf.fail(
                self.key("patch_size"),
                f"{patch} pixels do not fit into an image of {most}: convert the model again",
            )
        return least, most, patches

    def side_of(self, name: str) -> int:
        """Rows of a square whose places are the rows of a matrix."""
        rows, _ = self.matrix_shape(name)
        if (side := math.isqrt(rows)) ** 2 != rows or not rows:
            self.gguf.fail(name, f"{rows} rows are not those of a square: convert it again")
        return side

    def flagged_layers(self, name: str) -> tuple[int, ...]:
        """The layers whose flag is set, if the file has one for each."""
        flags, layers = self.gguf.get(self.key(name), None), self.count("block_count", maximum=1024)
        if flags is None:
            return ()
        if not isinstance(flags, np.ndarray) or len(flags) != layers:
            self.gguf.fail(
                self.key(name), f"there is not a flag for each of {layers} layers: convert it again"
            )
        return tuple(np.flatnonzero(flags).tolist())

    def matrix_shape(self, name: str) -> tuple[int, int]:
        shape = self.gguf.tensor(name).shape
        if len(shape) != 2:
            self.gguf.fail(name, f"shape is {shape}, not that of a matrix: convert it again")
        return shape[0], shape[1]

    def _channels(self, name: str) -> tuple[float, ...]:
        values = self.gguf.get(self.key(name))
        numbers = [] if values is None else np.asarray(values).ravel().tolist()
        if (
            len(numbers) != CHANNELS
            or not all(math.isfinite(x) for x in numbers)
            or (name == "image_std" and 0 in numbers)
        ):
            self.gguf.fail(
                self.key(name), "there is not a number for each of three channels: convert the model again"
            )
        return tuple(map(float, numbers))

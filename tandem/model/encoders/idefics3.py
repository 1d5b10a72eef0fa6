"""SmolVLM and Idefics 3: SigLIP, then the patches of each square one after the other, and a projection.

An image is cut into tiles of the same size, and comes once more as a whole.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tandem.kernels.kernel import Array
from tandem.model.encoders import blocks
from tandem.model.encoders.config import VisionConfig, VisionMetadata
from tandem.program.graph import Builder, Matrix

if TYPE_CHECKING:
    from PIL.Image import Image

    from tandem.model.vision import VisionModel

ARCHITECTURES = ("llama",)
MARK = ALONE = "<image>"
PROJECTION = "mm.model.fc.weight"
TILES = 4  # along the longer side of an image, unless the file says how long that is
MAX_TILES = 16  # the same at most
AROUND, GLOBAL = "<fake_token_around_image>", "<global-img>"


def config(m: VisionMetadata) -> VisionConfig:
    merge = m.count("projector.scale_factor", maximum=64)
    image_size, patches = m.square(merge)
    out_dim, _ = m.matrix_shape(PROJECTION)
    longest = m.count("preproc_image_size", TILES * image_size, maximum=MAX_TILES * image_size)
    return m.vision_config(
        merge=merge, max_patches=patches, out_dim=out_dim, image_size=image_size, longest_edge=longest
    )


def prepare(model: VisionModel) -> None:
    pass


def tensors(c: VisionConfig) -> blocks.Shapes:
    return blocks.siglip_tensors(c) | {PROJECTION: (c.out_dim, c.dim * c.merge**2)}


def build(b: Builder, c: VisionConfig) -> None:
    squares = b.pool(blocks.siglip(b, c), c.merge**2, "v.squares", concatenate=True)
    b.matmul(squares, Matrix(PROJECTION, c.out_dim, squares.width), blocks.EMBEDDINGS)


def parts(c: VisionConfig, image: Image) -> list[str | Array]:
    """The tiles row by row, then the whole image in one; an image that fits into a tile comes once."""
    from PIL import Image as pillow

    def resized(image: Image, width: int, height: int) -> Image:
        return image.resize((width, height), pillow.Resampling.LANCZOS)

    size = c.image_size
    image = resized(image, *_longest(*image.size, c.longest_edge))
    image = resized(image, *_whole_tiles(*image.size, size))
    columns, rows = (side // size for side in image.size)
    found: list[str | Array] = []
    if columns > 1 or rows > 1:
        pixels = np.asarray(image, np.uint8).reshape(rows, size, columns, size, -1)
        for row in range(rows):
            for column in range(columns):
                found += [f"{AROUND}<row_{row + 1}_col_{column + 1}>", pixels[row, :, column].copy()]
            found.append("\n")
        found.append("\n")
        image = resized(image, size, size)
    return [*found, f"{AROUND}{GLOBAL}", np.asarray(image, np.uint8), AROUND]


def _longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """The longer side becomes `longest`, the other one an even number."""
    ratio = width / height
    if width >= height:
        height = int(longest / ratio)
        return longest, max(1, height + height % 2)
    width = int(longest * ratio)
    return max(1, width + width % 2), longest


def _whole_tiles(width: int, height: int, size: int) -> tuple[int, int]:
    """Both sides become multiples of `size`; first the longer one, then the other in proportion."""

    def whole(side: int) -> int:
        return math.ceil(side / size) * size

    ratio = width / height
    if width >= height:
        width = whole(width)
        return width, whole(int(width / ratio))
    height = whole(height)
    return whole(int(height * ratio)), height

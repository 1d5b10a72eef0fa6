"""Qwen 3 VL and 3.5: layers with RoPE over rows and columns, and learned positions, interpolated to an image's size.

The patches of each square of four become one embedding. After some layers they become further embeddings, which the
first layers of the language model add (deepstack).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tandem.kernels.kernel import Array
from tandem.model.encoders import blocks
from tandem.model.encoders.config import VisionConfig, VisionMetadata
from tandem.program.graph import Builder, Value

if TYPE_CHECKING:
    from PIL.Image import Image

    from tandem.model.vision import VisionModel

ARCHITECTURES = ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")
MARK, ALONE = "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"
FIRST, SECOND = "mm.0", "mm.2"  # of the projection
MIN_PIXELS, MAX_PIXELS = 256 * 256, 2048 * 1024  # of a resized image, unless the file says otherwise


def config(m: VisionMetadata) -> VisionConfig:
    merge, patch = m.count("spatial_merge_size", 2, maximum=64), m.count("patch_size", maximum=1 << 10)
    min_pixels, max_pixels, patches = m.pixel_limits(patch, merge, MIN_PIXELS, MAX_PIXELS)
    width, _ = m.matrix_shape(f"{SECOND}.weight")
    after = m.flagged_layers("is_deepstack_layers")
    return m.vision_config(
        merge=merge,
        max_patches=patches,
        out_dim=width * (1 + len(after)),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        position_side=m.side_of(blocks.POSITIONS),
        rope_base=blocks.ROPE_BASE,
        deepstack_after=after,
    )


def prepare(model: VisionModel) -> None:
    blocks.join_frames(model)
    blocks.divide_qkv(model)


def tensors(c: VisionConfig) -> blocks.Shapes:
    merged, width = c.dim * c.merge**2, c.out_dim // (1 + len(c.deepstack_after))
    shapes = blocks.siglip_tensors(c)
    shapes |= blocks.linear_shapes(FIRST, merged, merged) | blocks.linear_shapes(SECOND, width, merged)
    for i in c.deepstack_after:
        name = f"v.deepstack.{i}"
        shapes |= blocks.norm_shapes(f"{name}.norm", merged)
        shapes |= blocks.linear_shapes(f"{name}.fc1", merged, merged)
        shapes |= blocks.linear_shapes(f"{name}.fc2", width, merged)
    return shapes


def build(b: Builder, c: VisionConfig) -> None:
    """The host gives the positions of patches beside them: the learned ones, interpolated."""
    width = c.out_dim // (1 + len(c.deepstack_after))

    def project(x: Value, first: str, second: str, result: str) -> None:
        h = b.activate(blocks.linear(b, x, first, x.width), "gelu_erf", f"{first}.gelu")
        blocks.linear(b, h, second, width, result)

    given = b.input(c.patch_dim + c.dim, blocks.PATCHES)
    patches = b.slice(given, 0, c.patch_dim, "v.pixels")
    x = blocks.linear(b, patches, blocks.PATCH, c.dim)
    x = b.add(x, b.slice(given, c.patch_dim, given.width, "v.positions"), "v.embedding")
    for i in range(c.layers):
        x = blocks.siglip_layer(b, c, x, i)
        if i in c.deepstack_after:
            name, result = f"v.deepstack.{i}", blocks.further(c.deepstack_after.index(i))
            squares = b.pool(x, c.merge**2, f"{name}.squares", concatenate=True)
            project(blocks.layer_norm(b, c, squares, f"{name}.norm"), f"{name}.fc1", f"{name}.fc2", result)
    squares = b.pool(blocks.layer_norm(b, c, x, "v.post_ln"), c.merge**2, "v.squares", concatenate=True)
    project(squares, FIRST, SECOND, blocks.EMBEDDINGS)


def positions(c: VisionConfig, table: Array, rows: int, columns: int) -> Array:
    """The learned positions, a table of those of a square, interpolated to rows and columns of patches: float32
    [patches, dim] row by row. Corners keep theirs."""
    square = table.reshape(c.position_side, c.position_side, c.dim)

    def along(table: Array, count: int) -> Array:
        """The first axis of a table interpolated to `count` points."""
        at = np.arange(count, dtype=np.float32) * np.float32(len(table) - 1) / np.float32(max(1, count - 1))
        low = np.floor(at).astype(np.int64)
        share = (at - low).reshape(-1, *[1] * (table.ndim - 1))
        between: Array = table[low] * (1 - share) + table[np.minimum(low + 1, len(table) - 1)] * share
        return between

    by_row = along(square, rows)
    return along(by_row.swapaxes(0, 1), columns).swapaxes(0, 1).reshape(rows * columns, c.dim)


def parts(c: VisionConfig, image: Image) -> list[str | Array]:
    return [blocks.resized(c, image)]

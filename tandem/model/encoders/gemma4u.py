"""Gemma 4 12B: a projection of each patch in place of an encoder. A patch has the size of a square of patches of the
other Gemma 4 models.

Layer norms are before and after the projection, and after learned positions of column and row are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tandem.kernels.kernel import Array
from tandem.model.encoders import blocks, gemma4
from tandem.model.encoders.config import VisionConfig, VisionMetadata
from tandem.model.encoders.gemma4 import ALONE, ARCHITECTURES, MARK, parts, positions
from tandem.program.graph import Builder, Value, Vector

if TYPE_CHECKING:
    from tandem.model.vision import VisionModel

__all__ = [
    "ALONE",
    "ARCHITECTURES",
    "MARK",
    "build",
    "config",
    "parts",
    "positions",
    "prepare",
    "tables",
    "tensors",
]
EPS = 1e-5  # of layer norms


def config(m: VisionMetadata) -> VisionConfig:
    patch = m.count("patch_size", maximum=1 << 10) * m.count(
        "projector.scale_factor", gemma4.MERGE, maximum=64
    )
    out_dim, dim = m.matrix_shape(gemma4.PROJECTION)
    c = m.vision_config(
        patch_size=patch, merge=1, dim=dim, ffn_dim=0, layers=0, heads=1, max_patches=0, out_dim=out_dim
    )
    return gemma4.sized(m, c)


def prepare(model: VisionModel) -> None:
    gemma4.take_positions(model)


def tables(model: VisionModel) -> dict[str, Array]:
    return {f"ones.{model.config.dim}": np.ones(model.config.dim, np.float32)}


def tensors(c: VisionConfig) -> blocks.Shapes:
    shapes = blocks.linear_shapes(blocks.PATCH, c.dim, c.patch_dim) | blocks.norm_shapes(
        "v.patch_norm.1", c.patch_dim
    )
    for i in (2, 3):
        shapes |= blocks.norm_shapes(f"v.patch_norm.{i}", c.dim)
    shapes[blocks.POSITIONS] = (2 * c.position_side, c.dim)
    shapes[gemma4.PROJECTION] = (c.out_dim, c.dim)
    return shapes


def build(b: Builder, c: VisionConfig) -> None:
    def norm(x: Value, name: str) -> Value:
        weight, bias = (Vector(f"{name}.{kind}", x.width) for kind in ("weight", "bias"))
        return b.layer_norm(x, weight, bias, EPS, name)

    given = b.input(c.patch_dim + c.dim, blocks.PATCHES)
    pixels = b.slice(given, 0, c.patch_dim, "v.pixels")
    x = norm(blocks.linear(b, norm(pixels, "v.patch_norm.1"), blocks.PATCH, c.dim), "v.patch_norm.2")
    x = b.add(x, b.slice(given, c.patch_dim, given.width, "v.positions"), "v.embedding")
    gemma4.project(b, c, b.pool(norm(x, "v.patch_norm.3"), 1, "v.rows"), c.eps)

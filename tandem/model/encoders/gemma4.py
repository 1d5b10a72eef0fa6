"""Gemma 4: RMS norms before and after attention and feed-forward, QK norm and RoPE over columns and rows, then the mean
of each square of patches and the projection.

An image keeps its form and is resized to as many whole squares as an image may have. Matrices of small models clamp
what they read and write.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tandem.kernels.kernel import Array
from tandem.model.encoders import blocks
from tandem.model.encoders.config import VisionConfig, VisionMetadata
from tandem.program.graph import Builder, Heads, Matrix, Value, Vector

if TYPE_CHECKING:
    from PIL.Image import Image

    from tandem.model.vision import VisionModel

ARCHITECTURES = ("gemma4",)
MARK = "<|image|>"
ALONE = "<|image|>"
BEGIN, END = "<|image>", "<image|>"  # around the embeddings of an image
MERGE, MAX_TOKENS = 3, 280  # of an image, unless the file says otherwise
ROPE_BASE = 100.0
PROJECTION, STD_BIAS, STD_SCALE = "mm.input_projection.weight", "v.std_bias", "v.std_scale"
POOLED_WEIGHT, POOLED_BIAS = "v.pooled.weight", "v.pooled.bias"  # tables
WIDENS_HEADS = False  # norms of heads count their columns
LINEAR = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")


def config(m: VisionMetadata) -> VisionConfig:
    merge = m.count("projector.scale_factor", MERGE, maximum=64)
    rows, _ = m.matrix_shape(PROJECTION)
    c = m.vision_config(
        merge=merge,
        max_patches=0,
        out_dim=rows,
        rope_base=ROPE_BASE,
        clamps=any(name.endswith(".input_max") for name in m.gguf.tensors),
        standardises=m.has(STD_BIAS),
    )
    # The model itself moves pixels to [-1, 1].
    mean = tuple(mean + std / 2 for mean, std in zip(c.mean, c.std, strict=True))
    return replace(sized(m, c), mean=mean, std=tuple(std / 2 for std in c.std))


def sized(m: VisionMetadata, c: VisionConfig) -> VisionConfig:
    """With the most patches of an image, and as many positions as there are in an image of one row."""
    square = (c.patch_size * c.merge) ** 2
    _, pixels, patches = m.pixel_limits(c.patch_size, c.merge, square, MAX_TOKENS * square)
    side = patches // c.merge
    shape = m.gguf.tensor(blocks.POSITIONS).shape
    if len(shape) != 3 or shape[0] != 2 or shape[1] < side or shape[2] != c.dim:
        m.gguf.fail(
            blocks.POSITIONS,
            f"shape is {shape}, the metadata asks for (2, {side}, {c.dim}): convert it again",
        )
    return replace(c, max_pixels=pixels, max_patches=patches, position_side=side)


def prepare(model: VisionModel) -> None:
    c = model.config
    take_positions(model)
    rows = (np.arange(c.heads)[:, None] * c.head_dim + _rotated_order(c)).ravel()
    for i in range(c.layers):
        for part in ("attn_q", "attn_k"):
            model.reorder(f"v.blk.{i}.{part}.weight", rows)


def tables(model: VisionModel) -> dict[str, Array]:
    c = model.config
    found: dict[str, Array] = {name: np.ones(size, np.float32) for name, size in _ones(c).items()}
    for i in range(c.layers):
        for part in ("attn_q", "attn_k"):
            name = f"v.blk.{i}.{part}"
            found[_norm(name)] = model.values(f"{name}_norm.weight")[_rotated_order(c)]
        for part in LINEAR if c.clamps else ():
            name = f"v.blk.{i}.{part}"
            found |= {_limits(name, side): _limits_of(model, name, side) for side in ("input", "output")}
    if c.standardises:
        scale, bias = model.values(STD_SCALE), model.values(STD_BIAS)
        found |= {POOLED_WEIGHT: np.float32(c.dim**0.5) * scale, POOLED_BIAS: -bias * scale}
    return found


def _ones(c: VisionConfig) -> dict[str, int]:
    return {f"ones.{size}": size for size in (c.dim, c.head_dim)}


def take_positions(model: VisionModel) -> None:
    """Keeps the learned positions that an image may have: those of columns, then those of rows."""
    c = model.config
    model.derive(blocks.POSITIONS, model.values(blocks.POSITIONS)[:, : c.position_side].reshape(-1, c.dim))


def _rotated_order(c: VisionConfig) -> Array:
    """The columns of a head so that the halves of all pairs are c.head_dim / 2 apart, pairs of rows first. In the file,
    the first half of a head has the pairs of columns, and the second those of rows."""
    columns, rows = np.arange(c.head_dim).reshape(2, 2, -1)
    return np.concatenate([rows[0], columns[0], rows[1], columns[1]])


def _norm(name: str) -> str:
    return f"{name}_norm.reordered"


def _limits(name: str, side: str) -> str:
    return f"{name}.{side}_limits"


def _limits_of(model: VisionModel, name: str, side: str) -> Array:
    ends = (f"{name}.{side}_min", f"{name}.{side}_max")
    given = [model.values(end).ravel()[0] if end in model.tensors else None for end in ends]
    largest = np.finfo(np.float32).max
    return np.array([-largest if given[0] is None else given[0], largest if given[1] is None else given[1]])


def tensors(c: VisionConfig) -> blocks.Shapes:
    shapes: blocks.Shapes = {
        f"{blocks.PATCH}.weight": (c.dim, c.patch_dim),
        blocks.POSITIONS: (2 * c.position_side, c.dim),
        PROJECTION: (c.out_dim, c.dim),
    }
    if c.standardises:
        shapes |= {STD_BIAS: (c.dim,), STD_SCALE: (c.dim,)}
    for i in range(c.layers):
        name = f"v.blk.{i}"
        shapes |= {f"{name}.{n}.weight": (c.dim,) for n in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm")}
        shapes |= {f"{name}.{n}.weight": (c.head_dim,) for n in ("attn_q_norm", "attn_k_norm")}
        shapes |= {f"{name}.attn_{part}.weight": (c.dim, c.dim) for part in ("q", "k", "v", "out")}
        shapes |= {f"{name}.ffn_{part}.weight": (c.ffn_dim, c.dim) for part in ("gate", "up")}
        shapes[f"{name}.ffn_down.weight"] = (c.dim, c.ffn_dim)
    return shapes


def build(b: Builder, c: VisionConfig) -> None:
    given = b.input(c.patch_dim + c.dim, blocks.PATCHES)
    pixels = b.slice(given, 0, c.patch_dim, "v.pixels")
    x = b.matmul(pixels, Matrix(f"{blocks.PATCH}.weight", c.dim, c.patch_dim), blocks.PATCH)
    x = b.add(x, b.slice(given, c.patch_dim, given.width, "v.positions"), "v.embedding")
    for i in range(c.layers):
        name = f"v.blk.{i}"
        attended = _attention(b, c, _rms(b, c, x, f"{name}.ln1"), i)
        x = b.add(x, _rms(b, c, attended, f"{name}.attn_post_norm"), f"{name}.attn_residual")
        h = _rms(b, c, x, f"{name}.ln2")
        gate, up = (_linear(b, c, h, f"{name}.ffn_{part}", c.ffn_dim) for part in ("gate", "up"))
        h = _linear(b, c, b.glu(gate, up, "gelu", f"{name}.ffn_act"), f"{name}.ffn_down", c.dim)
        x = b.add(x, _rms(b, c, h, f"{name}.ffn_post_norm"), f"{name}.out")
    # The mean is multiplied by the square root of the width: before a norm, the same as a smaller epsilon.
    affine = (Vector(POOLED_WEIGHT, c.dim), Vector(POOLED_BIAS, c.dim)) if c.standardises else None
    pooled = b.pool(x, c.merge**2, "v.pooled", affine=affine)
    project(b, c, pooled, c.eps if affine else c.eps / c.dim)


def project(b: Builder, c: VisionConfig, x: Value, eps: float) -> None:
    normed = b.norm(x, Vector(f"ones.{c.dim}", c.dim), eps, "mm.norm")
    b.matmul(normed, Matrix(PROJECTION, c.out_dim, c.dim), blocks.EMBEDDINGS)


def _rms(b: Builder, c: VisionConfig, x: Value, name: str) -> Value:
    return b.norm(x, Vector(f"{name}.weight", c.dim), c.eps, name)


def _linear(b: Builder, c: VisionConfig, x: Value, name: str, rows: int) -> Value:
    if c.clamps:
        x = b.clamp(x, Vector(_limits(name, "input"), 2), f"{name}.input")
    y = b.matmul(x, Matrix(f"{name}.weight", rows, x.width), name)
    return b.clamp(y, Vector(_limits(name, "output"), 2), f"{name}.output") if c.clamps else y


def _attention(b: Builder, c: VisionConfig, h: Value, layer: int) -> Value:
    name, size = f"v.blk.{layer}", c.head_dim
    heads = Heads(
        layer, 0, c.heads, c.heads, size, size, False, blocks.NO_TABLE, 0, scale=1.0, eps=c.eps
    )  # fmt: skip
    q, k, v = (_linear(b, c, h, f"{name}.attn_{part}", c.dim) for part in "qkv")
    v = b.norm_heads(v, Vector(f"ones.{size}", size), c.eps, f"{name}.attn_v_norm")
    norms = (Vector(_norm(f"{name}.attn_q"), size), Vector(_norm(f"{name}.attn_k"), size))
    q, k = b.rope(*b.head_norm(q, k, norms, heads), heads)
    return _linear(b, c, b.bidirectional_attention(q, k, v, heads, f"{name}.attn"), f"{name}.attn_out", c.dim)


def positions(c: VisionConfig, table: Array, rows: int, columns: int) -> Array:
    """The sum of the learned positions of column and row: float32 [patches, dim] row by row."""
    by_column, by_row = table.reshape(2, c.position_side, c.dim)
    summed: Array = by_column[None, :columns] + by_row[:rows, None]
    return summed.reshape(rows * columns, c.dim)


def parts(c: VisionConfig, image: Image) -> list[str | Array]:
    from PIL import Image as pillow

    (width, height), side = image.size, c.patch_size * c.merge
    factor = math.sqrt(c.max_patches * c.patch_size**2 / (width * height))
    columns, rows = (math.floor(length * factor / side) for length in (width, height))
    if not rows:
        columns, rows = min(width // height, c.max_tokens), 1
    elif not columns:
        columns, rows = 1, min(height // width, c.max_tokens)
    resized = image.resize((columns * side, rows * side), pillow.Resampling.BICUBIC)
    return [BEGIN, np.asarray(resized, np.uint8), END]

"""Qwen 2.5 VL: RMS norms, gated feed-forwards and RoPE over rows and columns. In most layers a patch sees those of its
window, a part of the image; the patches of each square of four become one embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.kernels.kernel import Array
from tandem.model.encoders import blocks
from tandem.model.encoders.config import VisionConfig, VisionMetadata
from tandem.program.graph import Builder, Matrix, Value, Vector

if TYPE_CHECKING:
    from PIL.Image import Image

    from tandem.model.vision import VisionModel

ARCHITECTURES = ("qwen2vl",)
MARK, ALONE = "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"
FIRST, SECOND = "mm.0", "mm.2"  # of the projection
WINDOW = 112  # pixels of a side
MIN_PIXELS, MAX_PIXELS = 56 * 56, 2048 * 28 * 28  # of a resized image, unless the file says otherwise


def config(m: VisionMetadata) -> VisionConfig:
    merge, patch = m.count("spatial_merge_size", 2, maximum=64), m.count("patch_size", maximum=1 << 10)
    min_pixels, max_pixels, patches = m.pixel_limits(patch, merge, MIN_PIXELS, MAX_PIXELS)
    width, _ = m.matrix_shape(f"{SECOND}.weight")
    return m.vision_config(
        merge=merge,
        max_patches=patches,
        out_dim=width,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        rope_base=blocks.ROPE_BASE,
        window=max(1, m.count("window_size", WINDOW, maximum=1 << 14) // (merge * patch)),
        full_every=m.count("n_wa_pattern", maximum=1024),
    )


def prepare(model: VisionModel) -> None:
    blocks.join_frames(model)
    blocks.divide_qkv(model)


def tensors(c: VisionConfig) -> blocks.Shapes:
    merged = c.dim * c.merge**2
    shapes: blocks.Shapes = {f"{blocks.PATCH}.weight": (c.dim, c.patch_dim), "v.post_ln.weight": (c.dim,)}
    shapes |= blocks.linear_shapes(FIRST, merged, merged) | blocks.linear_shapes(SECOND, c.out_dim, merged)
    for i in range(c.layers):
        name = f"v.blk.{i}"
        shapes |= {f"{name}.{norm}.weight": (c.dim,) for norm in ("ln1", "ln2")}
        for part in ("attn_q", "attn_k", "attn_v"):
            shapes |= blocks.linear_shapes(f"{name}.{part}", c.heads_dim, c.dim)
        shapes |= blocks.linear_shapes(f"{name}.attn_out", c.dim, c.heads_dim)
        for part in ("ffn_gate", "ffn_up"):
            shapes |= blocks.linear_shapes(f"{name}.{part}", c.ffn_dim, c.dim)
        shapes |= blocks.linear_shapes(f"{name}.ffn_down", c.dim, c.ffn_dim)
    return shapes


def build(b: Builder, c: VisionConfig) -> None:
    def norm(x: Value, name: str) -> Value:
        return b.norm(x, Vector(f"{name}.weight", c.dim), c.eps, name)

    given = b.input(c.patch_dim, blocks.PATCHES)
    x = b.matmul(given, Matrix(f"{blocks.PATCH}.weight", c.dim, c.patch_dim), blocks.PATCH)
    for i in range(c.layers):
        name = f"v.blk.{i}"
        attended = blocks.attention(b, c, norm(x, f"{name}.ln1"), i)
        x = b.add(x, blocks.linear(b, attended, f"{name}.attn_out", c.dim), f"{name}.attn_residual")
        h = norm(x, f"{name}.ln2")
        gate, up = (blocks.linear(b, h, f"{name}.ffn_{part}", c.ffn_dim) for part in ("gate", "up"))
        h = b.glu(gate, up, "silu", f"{name}.ffn_act")
        x = b.add(x, blocks.linear(b, h, f"{name}.ffn_down", c.dim), f"{name}.out")
    squares = b.pool(norm(x, "v.post_ln"), c.merge**2, "v.squares", concatenate=True)
    h = b.activate(blocks.linear(b, squares, FIRST, squares.width), "gelu_erf", f"{FIRST}.gelu")
    blocks.linear(b, h, SECOND, c.out_dim, blocks.EMBEDDINGS)


def parts(c: VisionConfig, image: Image) -> list[str | Array]:
    return [blocks.resized(c, image)]

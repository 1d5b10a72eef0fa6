"""The parts that vision encoders share: SigLIP's layers, their tensors, and the names of values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tandem.errors import RequestError
from tandem.kernels.kernel import Array
from tandem.model.encoders.config import VisionConfig
from tandem.program.graph import Builder, Heads, Matrix, Value, Vector

if TYPE_CHECKING:
    from PIL.Image import Image

    from tandem.model.vision import VisionModel

Shapes = dict[str, tuple[int, ...]]
PATCHES, EMBEDDINGS = "patches", "embeddings"  # the value that the host gives, and the one that it reads
PATCH, POSITIONS = "v.patch_embd", "v.position_embd.weight"
NO_TABLE = Vector("", 0)  # of angles by position: if the encoder rotates, the host gives those of each patch
ROPE_BASE = 10000.0  # of encoders that rotate, unless they have another
MAX_ASPECT = 200  # of an image that Qwen's encoders take


def siglip_tensors(c: VisionConfig) -> Shapes:
    """Learned positions, layers with layer norms and a feed-forward without a gate, and a norm at the end."""
    shapes = linear_shapes(PATCH, c.dim, c.patch_dim) | norm_shapes("v.post_ln", c.dim)
    shapes[POSITIONS] = (c.position_side**2 or c.max_patches, c.dim)
    for i in range(c.layers):
        for norm in ("ln1", "ln2"):
            shapes |= norm_shapes(f"v.blk.{i}.{norm}", c.dim)
        for part in ("attn_q", "attn_k", "attn_v"):
            shapes |= linear_shapes(f"v.blk.{i}.{part}", c.heads_dim, c.dim)
        shapes |= linear_shapes(f"v.blk.{i}.attn_out", c.dim, c.heads_dim)
        shapes |= linear_shapes(f"v.blk.{i}.ffn_up", c.ffn_dim, c.dim)
        shapes |= linear_shapes(f"v.blk.{i}.ffn_down", c.dim, c.ffn_dim)
    return shapes


def linear_shapes(name: str, rows: int, columns: int) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def norm_shapes(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def siglip(b: Builder, c: VisionConfig) -> Value:
    """The hidden states of the patches, after the last norm."""
    x = linear(b, b.input(c.patch_dim, PATCHES), PATCH, c.dim)
    x = b.add(x, b.embed(Matrix(POSITIONS, c.max_patches, c.dim), "v.positions", images=False), "v.embedding")
    for i in range(c.layers):
        x = siglip_layer(b, c, x, i)
    return layer_norm(b, c, x, "v.post_ln")


def siglip_layer(b: Builder, c: VisionConfig, x: Value, layer: int) -> Value:
    name = f"v.blk.{layer}"
    attended = attention(b, c, layer_norm(b, c, x, f"{name}.ln1"), layer)
    x = b.add(x, linear(b, attended, f"{name}.attn_out", c.dim), f"{name}.attn_residual")
    h = linear(b, layer_norm(b, c, x, f"{name}.ln2"), f"{name}.ffn_up", c.ffn_dim)
    h = b.activate(h, "gelu", f"{name}.ffn_gelu")
    return b.add(x, linear(b, h, f"{name}.ffn_down", c.dim), f"{name}.out")


def attention(b: Builder, c: VisionConfig, h: Value, layer: int) -> Value:
    """Attention of all patches to all, or to those of their window, with RoPE if the encoder rotates."""
    name, rotated = f"v.blk.{layer}", c.head_dim if c.rotates else 0
    q, k, v = (linear(b, h, f"{name}.attn_{part}", c.heads_dim) for part in "qkv")
    size = c.heads_dim // c.heads
    heads = Heads(
        layer, c.group_of(layer), c.heads, c.heads, size, rotated, False, NO_TABLE, 0, c.head_dim**-0.5
    )
    if rotated:
        q, k = b.rope(q, k, heads)
    return b.bidirectional_attention(q, k, v, heads, f"{name}.attn")


def linear(b: Builder, x: Value, name: str, rows: int, result: str = "") -> Value:
    matrix = Matrix(f"{name}.weight", rows, x.width)
    return b.matmul(x, matrix, result or name, bias=Vector(f"{name}.bias", rows))


def layer_norm(b: Builder, c: VisionConfig, x: Value, name: str) -> Value:
    return b.layer_norm(x, Vector(f"{name}.weight", x.width), Vector(f"{name}.bias", x.width), c.eps, name)


def further(index: int) -> str:
    """The value with embeddings that a layer of the language model adds."""
    return f"{EMBEDDINGS}.{index}"


# ---- what the encoders of Qwen share


def join_frames(model: VisionModel) -> None:
    """A patch of a film is two frames, with weights of their own. Those of an image are the same: the sum of both."""
    second = f"{PATCH}.weight.1"
    if second in model.tensors:
        name = f"{PATCH}.weight"
        if math.prod(model.tensor(second).shape) != math.prod(model.tensor(name).shape):
            model.fail(second, "shape is not that of the first frame's weights: convert it again")
        shape = model.tensor(name).shape
        model.derive(name, model.values(name) + model.values(second).reshape(shape))


def divide_qkv(model: VisionModel) -> None:
    """Gives names to the parts of matrices that the file stacks."""
    for i in range(model.config.layers):
        for kind in ("weight", "bias"):
            if (stacked := f"v.blk.{i}.attn_qkv.{kind}") in model.tensors:
                model.divide(stacked, {f"v.blk.{i}.attn_{part}.{kind}": model.config.dim for part in "qkv"})


def resized(c: VisionConfig, image: Image) -> Array:
    """The pixels of an image that is resized to whole squares of patches: nearly its own size, within the limits."""
    from PIL import Image as pillow

    (width, height), side = image.size, c.patch_size * c.merge
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise RequestError(f"an image is more than {MAX_ASPECT} times as long as the other way: cut it")
    new = [round(length / side) * side for length in (width, height)]
    if math.prod(new) > c.max_pixels:
        scale = math.sqrt(width * height / c.max_pixels)
        new = [max(side, math.floor(length / scale / side) * side) for length in (width, height)]
    elif math.prod(new) < c.min_pixels:
        scale = math.sqrt(c.min_pixels / (width * height))
        new = [math.ceil(length * scale / side) * side for length in (width, height)]
    return np.asarray(image.resize((new[0], new[1]), pillow.Resampling.BICUBIC), np.uint8)

"""The parts that vision encoders share: SigLIP's layers, their tensors, and the names of values."""

from __future__ import annotations

from tandem.model.encoders.config import VisionConfig
from tandem.program.graph import Builder, Heads, Matrix, Value, Vector

Shapes = dict[str, tuple[int, ...]]
PATCHES, EMBEDDINGS = "patches", "embeddings"  # the value that the host gives, and the one that it reads
PATCH, POSITIONS = "v.patch_embd", "v.position_embd.weight"
NO_TABLE = Vector("", 0)  # of an encoder without RoPE


def siglip_tensors(c: VisionConfig) -> Shapes:
    """Learned positions, layers with layer norms and a feed-forward without a gate, and a norm at the end."""
    shapes = linear_shapes(PATCH, c.dim, c.patch_dim) | norm_shapes("v.post_ln", c.dim)
    shapes[POSITIONS] = (c.max_patches, c.dim)
    for i in range(c.layers):
        for norm in ("ln1", "ln2"):
            shapes |= norm_shapes(f"v.blk.{i}.{norm}", c.dim)
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            shapes |= linear_shapes(f"v.blk.{i}.{part}", c.dim, c.dim)
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
    x = b.add(x, b.embed(Matrix(POSITIONS, c.max_patches, c.dim), "v.positions"), "v.embedding")
    for i in range(c.layers):
        name = f"v.blk.{i}"
        h = layer_norm(b, c, x, f"{name}.ln1")
        q, k, v = (linear(b, h, f"{name}.attn_{part}", c.dim) for part in "qkv")
        heads = Heads(i, 0, c.heads, c.heads, c.head_dim, 0, False, NO_TABLE, 0, c.head_dim**-0.5)
        attended = b.bidirectional_attention(q, k, v, heads, f"{name}.attn")
        x = b.add(x, linear(b, attended, f"{name}.attn_out", c.dim), f"{name}.attn_residual")
        h = linear(b, layer_norm(b, c, x, f"{name}.ln2"), f"{name}.ffn_up", c.ffn_dim)
        h = b.activate(h, "gelu", f"{name}.ffn_gelu")
        x = b.add(x, linear(b, h, f"{name}.ffn_down", c.dim), f"{name}.out")
    return layer_norm(b, c, x, "v.post_ln")


def linear(b: Builder, x: Value, name: str, rows: int) -> Value:
    return b.matmul(x, Matrix(f"{name}.weight", rows, x.width), name, bias=Vector(f"{name}.bias", rows))


def layer_norm(b: Builder, c: VisionConfig, x: Value, name: str) -> Value:
    return b.layer_norm(x, Vector(f"{name}.weight", c.dim), Vector(f"{name}.bias", c.dim), c.eps, name)

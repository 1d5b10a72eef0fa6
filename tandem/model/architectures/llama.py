"""Llama 1 to 3, Mistral, Mixtral, SmolLM, TinyLlama: pre-norm, grouped queries, SiLU-gated feed-forward or experts."""

from __future__ import annotations

from collections.abc import Callable

from tandem.model.architectures import blocks
from tandem.model.config import NO_ROPE, Metadata, ModelConfig
from tandem.program.graph import Builder, Value

Recurrent = Callable[[Builder, ModelConfig, int, Value], Value]


def config(m: Metadata, **special: object) -> ModelConfig:
    head_dim = m.head_dim()
    window = m.count("attention.sliding_window", 0)
    layers = m.count("block_count", maximum=1024)
    fields: dict[str, object] = {
        "layer_window": (window,) * layers,
        "interleaved": True,  # the file's Q and K rows are ordered for pairs (2i, 2i+1)
        **(m.experts() if m.gguf.get(m.key("expert_count"), 0) else {}),
    }
    return m.config(head_dim=head_dim, scale=head_dim**-0.5, ropes=(m.rope(head_dim),), **(fields | special))


def tensors(c: ModelConfig) -> blocks.Shapes:
    return blocks.common_tensors(c)


def build(
    b: Builder,
    c: ModelConfig,
    context: int,
    *,
    ffn_norm: str = "ffn_norm",
    activation: str = "silu",
    recurrent: Recurrent | None = None,
) -> None:
    """`recurrent`: what layers without attention have in its place."""
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding", scale=c.embedding_scale)
    for i in range(c.layers):
        x = layer(b, c, i, x, context, ffn_norm=ffn_norm, activation=activation, recurrent=recurrent)
    blocks.head(b, c, x)


def layer(
    b: Builder,
    c: ModelConfig,
    i: int,
    x: Value,
    context: int,
    *,
    ffn_norm: str = "ffn_norm",
    activation: str = "silu",
    recurrent: Recurrent | None = None,
) -> Value:
    h = blocks.norm(b, c, x, f"blk.{i}.attn_norm")
    own = recurrent if c.is_recurrent(i) else None
    mixed = own(b, c, i, h) if own else attention(b, c, i, h, context)
    x = b.add(x, mixed, f"blk.{i}.attn_residual")
    h = blocks.norm(b, c, x, f"blk.{i}.{ffn_norm}")
    return b.add(x, blocks.feed_forward(b, c, i, h, activation), f"blk.{i}.out")


def attention(b: Builder, c: ModelConfig, i: int, h: Value, context: int) -> Value:
    heads = c.heads(i, context)
    q, k, v = blocks.qkv(b, c, i, h)
    if c.head_norms:
        q, k = b.head_norm(q, k, blocks.head_norms(c, i), heads)
    if i >= c.layers or c.layer_rope[i] != NO_ROPE:
        q, k = b.rope(q, k, heads)
    attended = b.attention(q, k, v, heads, f"blk.{i}.attn")
    return blocks.attention_output(b, c, i, attended)

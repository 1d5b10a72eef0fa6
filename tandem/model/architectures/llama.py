"""Llama 1 to 3, Mistral, Mixtral, SmolLM, TinyLlama: pre-norm, grouped queries, SiLU-gated feed-forward or experts."""

from __future__ import annotations

from tandem.model.architectures import blocks
from tandem.model.config import NO_ROPE, Metadata, ModelConfig
from tandem.program.graph import Builder, Value


def config(m: Metadata) -> ModelConfig:
    head_dim = m.head_dim()
    window = m.count("attention.sliding_window", 0)
    layers = m.count("block_count", maximum=1024)
    return m.config(
        head_dim=head_dim,
        scale=head_dim**-0.5,
        ropes=(m.rope(head_dim),),
        layer_window=(window,) * layers,
        interleaved=True,  # the file's Q and K rows are ordered for pairs (2i, 2i+1)
        **(m.experts() if m.gguf.get(m.key("expert_count"), 0) else {}),
    )


def tensors(c: ModelConfig) -> blocks.Shapes:
    return blocks.common_tensors(c)


def build(
    b: Builder, c: ModelConfig, context: int, *, ffn_norm: str = "ffn_norm", activation: str = "silu"
) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding", scale=c.embedding_scale)
    for i in range(c.layers):
        x = layer(b, c, i, x, context, ffn_norm=ffn_norm, activation=activation)
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
) -> Value:
    heads = c.heads(i, context)
    h = blocks.norm(b, c, x, f"blk.{i}.attn_norm")
    q, k, v = blocks.qkv(b, c, i, h)
    if c.head_norms:
        q, k = b.head_norm(q, k, blocks.head_norms(c, i), heads)
    if i >= c.layers or c.layer_rope[i] != NO_ROPE:
        q, k = b.rope(q, k, heads)
    attended = b.attention(q, k, v, heads, f"blk.{i}.attn")
    x = b.add(x, blocks.attention_output(b, c, i, attended), f"blk.{i}.attn_residual")
    h = blocks.norm(b, c, x, f"blk.{i}.{ffn_norm}")
    return b.add(x, blocks.feed_forward(b, c, i, h, activation), f"blk.{i}.out")

"""OLMoE: Llama's block with experts, RoPE over halves, and Q and K normed over all heads at once."""

from __future__ import annotations

from tandem.model.architectures import blocks
from tandem.model.config import Metadata, ModelConfig
from tandem.program.graph import Builder


def config(m: Metadata) -> ModelConfig:
    head_dim = m.head_dim()
    rope = m.rope(head_dim)
    return m.config(
        head_dim=head_dim, scale=head_dim**-0.5, ropes=(rope,), experts_normalised=False, **m.experts()
    )


def tensors(c: ModelConfig) -> blocks.Shapes:
    norms = {"attn_q_norm": c.q_heads * c.head_dim, "attn_k_norm": c.kv_heads * c.head_dim}
    return blocks.common_tensors(c) | blocks.layer_vectors(c, norms)


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding")
    for i in range(c.layers):
        heads = c.heads(i, context)
        h = blocks.norm(b, c, x, f"blk.{i}.attn_norm")
        q, k, v = blocks.qkv(b, c, i, h)
        q, k = (blocks.norm(b, c, value, f"blk.{i}.attn_{n}_norm") for n, value in (("q", q), ("k", k)))
        q, k = b.rope(q, k, heads)
        attended = b.attention(q, k, v, heads, f"blk.{i}.attn")
        x = b.add(x, blocks.attention_output(b, c, i, attended), f"blk.{i}.attn_residual")
        h = blocks.norm(b, c, x, f"blk.{i}.ffn_norm")
        x = b.add(x, blocks.feed_forward(b, c, i, h, "silu"), f"blk.{i}.out")
    blocks.head(b, c, x)

"""Qwen 3: Llama's block with a norm on each head of Q and K, and a head size of its own."""

from __future__ import annotations

from tandem.model.architectures import blocks
from tandem.model.config import Metadata, ModelConfig
from tandem.program.graph import Builder


def config(m: Metadata) -> ModelConfig:
    head_dim = m.head_dim()
    return m.config(head_dim=head_dim, scale=head_dim**-0.5, ropes=(m.rope(head_dim),))


def tensors(c: ModelConfig) -> blocks.Shapes:
    return blocks.common_tensors(c) | blocks.layer_vectors(
        c, {"attn_q_norm": c.head_dim, "attn_k_norm": c.head_dim}
    )


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding")
    for i in range(c.layers):
        heads = c.heads(i, context)
        h = blocks.norm(b, c, x, f"blk.{i}.attn_norm")
        q, k, v = blocks.qkv(b, c, i, h)
        q, k = b.head_norm(q, k, blocks.head_norms(c, i), heads)
        q, k = b.rope(q, k, heads)
        attended = b.attention(q, k, v, heads, f"blk.{i}.attn")
        x = b.add(x, blocks.attention_output(b, c, i, attended), f"blk.{i}.attn_residual")
        h = blocks.norm(b, c, x, f"blk.{i}.ffn_norm")
        f = blocks.feed_forward(b, c, i, h, "silu")
        if i < c.deepstack:
            x = b.add_input(b.add(x, f, f"blk.{i}.ffn_residual"), (i + 1) * c.dim, f"blk.{i}.out")
        else:
            x = b.add(x, f, f"blk.{i}.out")
    blocks.head(b, c, x)

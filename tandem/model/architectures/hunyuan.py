"""Hunyuan (0.5B to 7B, and A13B as `hunyuan-moe`): QK norm after RoPE, not before."""

from __future__ import annotations

from tandem.model.architectures import blocks, qwen3
from tandem.model.config import Metadata, ModelConfig
from tandem.program.graph import Builder

tensors = qwen3.tensors


def config(m: Metadata) -> ModelConfig:
    head_dim = m.head_dim()
    experts: dict[str, object] = {}
    if m.gguf.get(m.key("expert_count"), 0):
        shared = m.count("expert_shared_feed_forward_length", m.count("feed_forward_length"))
        experts = m.experts() | {"shared_expert_dim": shared}
    return m.config(head_dim=head_dim, scale=head_dim**-0.5, ropes=(m.rope(head_dim),), **experts)


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding")
    for i in range(c.layers):
        heads = c.heads(i, context)
        h = blocks.norm(b, c, x, f"blk.{i}.attn_norm")
        q, k, v = blocks.qkv(b, c, i, h)
        q, k = b.rope(q, k, heads)
        q, k = b.head_norm(q, k, blocks.head_norms(c, i), heads)
        attended = b.attention(q, k, v, heads, f"blk.{i}.attn")
        x = b.add(x, blocks.attention_output(b, c, i, attended), f"blk.{i}.attn_residual")
        h = blocks.norm(b, c, x, f"blk.{i}.ffn_norm")
        x = b.add(x, blocks.feed_forward(b, c, i, h, "silu"), f"blk.{i}.out")
    blocks.head(b, c, x)

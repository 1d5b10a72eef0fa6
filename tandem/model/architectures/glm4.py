"""GLM 4 (0414, 9B and 32B): norms before and after attention and feed-forward, and interleaved RoPE on half of
each head.

The file stacks gate and up (`Metadata.config` divides them).
"""

from __future__ import annotations

from tandem.model.architectures import blocks
from tandem.model.config import Metadata, ModelConfig
from tandem.program.graph import Builder


def config(m: Metadata) -> ModelConfig:
    head_dim = m.head_dim()
    return m.config(head_dim=head_dim, scale=head_dim**-0.5, ropes=(m.rope(head_dim),), interleaved=True)


def tensors(c: ModelConfig) -> blocks.Shapes:
    return blocks.common_tensors(c) | blocks.layer_vectors(
        c, {"post_attention_norm": c.dim, "post_ffw_norm": c.dim}
    )


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding")
    for i in range(c.layers):
        heads = c.heads(i, context)
        h = blocks.norm(b, c, x, f"blk.{i}.attn_norm")
        q, k, v = blocks.qkv(b, c, i, h)
        q, k = b.rope(q, k, heads)
        attended = b.attention(q, k, v, heads, f"blk.{i}.attn")
        o = blocks.norm(b, c, blocks.attention_output(b, c, i, attended), f"blk.{i}.post_attention_norm")
        x = b.add(x, o, f"blk.{i}.attn_residual")
        h = blocks.norm(b, c, x, f"blk.{i}.ffn_norm")
        f = blocks.norm(b, c, blocks.feed_forward(b, c, i, h, "silu"), f"blk.{i}.post_ffw_norm")
        x = b.add(x, f, f"blk.{i}.out")
    blocks.head(b, c, x)

"""Command R7B and A: attention and feed-forward side by side on one layer norm; global layers do not rotate Q and K."""

from __future__ import annotations

from tandem.model.architectures import blocks
from tandem.model.config import NO_ROPE, Metadata, ModelConfig
from tandem.program.graph import Builder

PATTERN = 4  # every fourth layer is global, unless the file says otherwise


def config(m: Metadata) -> ModelConfig:
    head_dim, layers = m.head_dim(), m.layers()
    window, sliding = m.count("attention.sliding_window"), m.sliding_layers(layers, PATTERN)
    return m.config(
        head_dim=head_dim,
        scale=head_dim**-0.5,
        ropes=(m.rope(head_dim),),
        layer_rope=tuple(0 if s else NO_ROPE for s in sliding),
        layer_window=tuple(window if s else 0 for s in sliding),
        interleaved=True,
        layer_norm=True,
        logit_scale=m.number("logit_scale"),
    )


def tensors(c: ModelConfig) -> blocks.Shapes:
    shapes = blocks.common_tensors(c)
    return {name: shape for name, shape in shapes.items() if "ffn_norm" not in name}


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding")
    for i in range(c.layers):
        heads = c.heads(i, context)
        h = blocks.norm(b, c, x, f"blk.{i}.attn_norm")
        q, k, v = blocks.qkv(b, c, i, h)
        if c.layer_rope[i] != NO_ROPE:
            q, k = b.rope(q, k, heads)
        attended = b.attention(q, k, v, heads, f"blk.{i}.attn")
        x = b.add(x, blocks.attention_output(b, c, i, attended), f"blk.{i}.attn_residual")
        x = b.add(x, blocks.feed_forward(b, c, i, h, "silu"), f"blk.{i}.out")
    blocks.head(b, c, x)

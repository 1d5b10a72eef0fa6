"""EXAONE 4: norms after attention and feed-forward instead of before, and QK norm.

The 32B has sliding layers; its global layers do not rotate Q and K.
"""

from __future__ import annotations

from tandem.model.architectures import blocks
from tandem.model.config import NO_ROPE, Metadata, ModelConfig
from tandem.program.graph import Builder

LAYERS_OF_32B = 64
PATTERN = 4  # every fourth layer is global, unless the file says otherwise


def config(m: Metadata) -> ModelConfig:
    head_dim, layers = m.head_dim(), m.layers()
    window = m.count("attention.sliding_window", 4096 if layers == LAYERS_OF_32B else 0)
    sliding = m.sliding_layers(layers, PATTERN) if window else [False] * layers
    return m.config(
        head_dim=head_dim,
        scale=head_dim**-0.5,
        ropes=(m.rope(head_dim),),
        layer_rope=tuple(NO_ROPE if window and not s else 0 for s in sliding),
        layer_window=tuple(window if s else 0 for s in sliding),
    )


def tensors(c: ModelConfig) -> blocks.Shapes:
    norms = {
        "attn_q_norm": c.head_dim,
        "attn_k_norm": c.head_dim,
        "post_attention_norm": c.dim,
        "post_ffw_norm": c.dim,
    }
    return blocks.without_norms(blocks.common_tensors(c)) | blocks.layer_vectors(c, norms)


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding")
    for i in range(c.layers):
        heads = c.heads(i, context)
        q, k, v = blocks.qkv(b, c, i, x)
        q, k = b.head_norm(q, k, blocks.head_norms(c, i), heads)
        if c.layer_rope[i] != NO_ROPE:
            q, k = b.rope(q, k, heads)
        attended = b.attention(q, k, v, heads, f"blk.{i}.attn")
        o = blocks.norm(b, c, blocks.attention_output(b, c, i, attended), f"blk.{i}.post_attention_norm")
        x = b.add(x, o, f"blk.{i}.attn_residual")
        f = blocks.norm(b, c, blocks.feed_forward(b, c, i, x, "silu"), f"blk.{i}.post_ffw_norm")
        x = b.add(x, f, f"blk.{i}.out")
    blocks.head(b, c, x)

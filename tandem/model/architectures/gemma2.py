"""Gemma 2: alternating sliding and global layers, soft caps on scores and logits, and norms
before and after attention and feed-forward."""

from __future__ import annotations

import numpy as np

from tandem.model.architectures import blocks
from tandem.model.config import Metadata, ModelConfig
from tandem.program.graph import Builder

LAYERS_OF_27B = 46  # scales scores by the width a head would have
PATTERN = 2  # every second layer is global, unless the file says otherwise


def config(m: Metadata) -> ModelConfig:
    layers, dim, heads = (
        m.count("block_count", maximum=1024),
        m.count("embedding_length"),
        m.count("attention.head_count"),
    )
    head_dim = m.count("attention.key_length", 256)
    window = m.count("attention.sliding_window", 4096)
    return m.config(
        head_dim=head_dim,
        scale=(dim / heads if layers == LAYERS_OF_27B else head_dim) ** -0.5,
        ropes=(m.rope(head_dim),),
        layer_window=tuple(window if sliding else 0 for sliding in m.sliding_layers(layers, PATTERN)),
        attention_softcap=m.number("attn_logit_softcapping", 50.0, zero=True),
        logit_softcap=m.number("final_logit_softcapping", 30.0, zero=True),
    )


def tensors(c: ModelConfig) -> blocks.Shapes:
    return blocks.common_tensors(c) | blocks.layer_vectors(
        c, {"post_attention_norm": c.dim, "post_ffw_norm": c.dim}
    )


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding", scale=float(np.float32(c.dim**0.5)))
    for i in range(c.layers):
        heads = c.heads(i, context)
        h = blocks.norm(b, c, x, f"blk.{i}.attn_norm")
        q, k, v = blocks.qkv(b, c, i, h)
        q, k = b.rope(q, k, heads)
        attended = b.attention(q, k, v, heads, f"blk.{i}.attn")
        o = blocks.norm(b, c, blocks.attention_output(b, c, i, attended), f"blk.{i}.post_attention_norm")
        x = b.add(x, o, f"blk.{i}.attn_residual")
        h = blocks.norm(b, c, x, f"blk.{i}.ffn_norm")
        f = blocks.norm(b, c, blocks.feed_forward(b, c, i, h, "gelu"), f"blk.{i}.post_ffw_norm")
        x = b.add(x, f, f"blk.{i}.out")
    blocks.head(b, c, x)

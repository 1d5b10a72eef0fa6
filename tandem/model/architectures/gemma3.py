"""Gemma 3 (text, 270M to 27B): sliding and global layers, QK norm, norms before and after attention and feed-forward.

Norm weights in the file already contain Gemma's "+ 1".
"""

from __future__ import annotations

import numpy as np

from tandem.model.architectures import blocks
from tandem.model.config import Metadata, ModelConfig, Rope
from tandem.program.graph import Builder

LAYERS_OF_27B = 62  # the one size that scales scores by the width a head would have, not by its head size
LOCAL_BASE = 10000.0  # RoPE base of sliding layers
PATTERN = 6  # every sixth layer is global, unless the file says otherwise


def config(m: Metadata) -> ModelConfig:
    layers, dim, heads = (
        m.count("block_count", maximum=1024),
        m.count("embedding_length"),
        m.count("attention.head_count"),
    )
    head_dim = m.count("attention.key_length", 256)
    window = m.count("attention.sliding_window", 0)  # a file without it has no sliding layers
    sliding = m.sliding_layers(layers, PATTERN) if window else [False] * layers
    local = Rope(m.number("rope.freq_base_swa", m.number("rope.local.freq_base", LOCAL_BASE)), head_dim)
    return m.config(
        head_dim=head_dim,
        scale=(dim / heads if layers == LAYERS_OF_27B else head_dim) ** -0.5,
        ropes=(m.rope(head_dim, 1000000.0), local),
        layer_rope=tuple(int(s) for s in sliding),
        layer_window=tuple(window if s else 0 for s in sliding),
        logit_softcap=m.number("final_logit_softcapping", 0.0, zero=True),
        image_attention=(True,) * layers,
    )


def tensors(c: ModelConfig) -> blocks.Shapes:
    vectors = {
        "attn_q_norm": c.head_dim,
        "attn_k_norm": c.head_dim,
        "post_attention_norm": c.dim,
        "post_ffw_norm": c.dim,
    }
    return blocks.common_tensors(c) | blocks.layer_vectors(c, vectors)


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding", scale=float(np.float32(c.dim**0.5)))
    for i in range(c.layers):
        heads = c.heads(i, context)
        h = blocks.norm(b, c, x, f"blk.{i}.attn_norm")
        q, k, v = blocks.qkv(b, c, i, h)
        q, k = b.head_norm(q, k, blocks.head_norms(c, i), heads)
        q, k = b.rope(q, k, heads)
        attended = b.attention(q, k, v, heads, f"blk.{i}.attn")
        o = blocks.norm(b, c, blocks.attention_output(b, c, i, attended), f"blk.{i}.post_attention_norm")
        x = b.add(x, o, f"blk.{i}.attn_residual")
        h = blocks.norm(b, c, x, f"blk.{i}.ffn_norm")
        f = blocks.norm(b, c, blocks.feed_forward(b, c, i, h, "gelu"), f"blk.{i}.post_ffw_norm")
        x = b.add(x, f, f"blk.{i}.out")
    blocks.head(b, c, x)

"""OLMo 2 and 3: Llama's block with norms after attention and feed-forward instead of before. The norm of Q and K is
over all heads at once.

OLMo 3 has sliding layers, which RoPE's scaling leaves alone.
"""

from __future__ import annotations

from tandem.model.architectures import blocks
from tandem.model.config import Metadata, ModelConfig, Rope
from tandem.program.graph import Builder

PATTERN = 4  # every fourth layer is global, unless the file says otherwise


def config(m: Metadata) -> ModelConfig:
    head_dim, layers = m.head_dim(), m.layers()
    rope, window = m.rope(head_dim), m.count("attention.sliding_window", 0, zero=True)
    sliding = m.sliding_layers(layers, PATTERN) if window else [False] * layers
    return m.config(
        head_dim=head_dim,
        scale=head_dim**-0.5,
        ropes=(rope, Rope(m.number("rope.freq_base_swa", rope.base), rope.rot_dim)) if window else (rope,),
        layer_rope=tuple(map(int, sliding)),
        layer_window=tuple(window if s else 0 for s in sliding),
    )


def tensors(c: ModelConfig) -> blocks.Shapes:
    norms = {
        "attn_q_norm": c.q_heads * c.head_dim,
        "attn_k_norm": c.kv_heads * c.head_dim,
        "post_attention_norm": c.dim,
        "post_ffw_norm": c.dim,
    }
    return blocks.without_norms(blocks.common_tensors(c)) | blocks.layer_vectors(c, norms)


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding")
    for i in range(c.layers):
        heads = c.heads(i, context)
        q, k, v = blocks.qkv(b, c, i, x)
        q, k = (blocks.norm(b, c, value, f"blk.{i}.attn_{n}_norm") for n, value in (("q", q), ("k", k)))
        q, k = b.rope(q, k, heads)
        attended = b.attention(q, k, v, heads, f"blk.{i}.attn")
        o = blocks.norm(b, c, blocks.attention_output(b, c, i, attended), f"blk.{i}.post_attention_norm")
        x = b.add(x, o, f"blk.{i}.attn_residual")
        f = blocks.norm(b, c, blocks.feed_forward(b, c, i, x, "silu"), f"blk.{i}.post_ffw_norm")
        x = b.add(x, f, f"blk.{i}.out")
    blocks.head(b, c, x)

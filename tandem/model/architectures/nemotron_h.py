"""Nemotron H: each layer is one of Mamba-2, attention without RoPE, and a feed-forward of squared ReLU."""

from __future__ import annotations

from tandem.model.architectures import blocks, llama, mamba2
from tandem.model.config import NO_ROPE, Metadata, ModelConfig
from tandem.program.graph import Builder


def config(m: Metadata) -> ModelConfig:
    head_dim, fields = m.head_dim(), m.attention_layers()
    ffn_dims = m.layer_counts("feed_forward_length", zero=True)
    if len(sizes := set(ffn_dims) - {0}) > 1:
        m.gguf.fail(m.key("feed_forward_length"), "feed-forwards differ in size: convert the model again")
    return m.config(
        head_dim=head_dim,
        scale=head_dim**-0.5,
        ropes=(m.rope(head_dim),),
        ffn_dim=max(sizes, default=0),
        layer_ffn_dim=ffn_dims,
        layer_rope=(NO_ROPE,) * len(ffn_dims),
        ffn_gated=False,
        ffn_bias=m.any_layer_has("ffn_down.bias"),
        **fields,
        **mamba2.scan(m),
    )


def tensors(c: ModelConfig) -> blocks.Shapes:
    every, shapes = blocks.common_tensors(c), blocks.ends(c)
    for i in range(c.layers):
        shapes[f"blk.{i}.attn_norm.weight"] = (c.dim,)
        if c.ffn_dim_of(i):
            shapes |= _named(every, f"blk.{i}.ffn_up", f"blk.{i}.ffn_down")
        elif c.is_recurrent(i):
            shapes |= mamba2.layer_tensors(c, i)
        else:
            shapes |= _named(every, f"blk.{i}.attn_")
    return shapes


def _named(shapes: blocks.Shapes, *beginnings: str) -> blocks.Shapes:
    return {name: shape for name, shape in shapes.items() if name.startswith(beginnings)}


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding")
    for i in range(c.layers):
        h = blocks.norm(b, c, x, f"blk.{i}.attn_norm")
        if c.ffn_dim_of(i):
            mixed = blocks.feed_forward(b, c, i, h, "squared_relu")
        elif c.is_recurrent(i):
            mixed = mamba2.mixer(b, c, i, h)
        else:
            mixed = llama.attention(b, c, i, h, context)
        x = b.add(x, mixed, f"blk.{i}.out")
    blocks.head(b, c, x)

"""ModernBERT: an encoder with norms before each part, RoPE and a gated feed-forward. Two of three layers see near
tokens only.

The file stacks Q, K and V, and gate and up (`Metadata.config` divides them). The first layer has no norm before
attention: the embedding's is there.
"""

from __future__ import annotations

from tandem.model.architectures import blocks
from tandem.model.config import Metadata, ModelConfig, Rope
from tandem.program.graph import HIDDEN, Builder, Value

GLOBAL_BASE, LOCAL_BASE = 160_000.0, 10_000.0  # of RoPE
PATTERN = 3  # every third layer sees all tokens, from the first on, unless the file says otherwise


def config(m: Metadata) -> ModelConfig:
    head_dim, layers = m.head_dim(), m.layers()
    # Half of it on each side of a token; a window of attention has those before it, and the token.
    near = m.count("attention.sliding_window") // 2 + 1
    period = m.count("attention.sliding_window_pattern", PATTERN, maximum=1024)
    local = tuple(i % period != 0 for i in range(layers))
    return m.encoder_config(
        head_dim=head_dim,
        ropes=(m.rope(head_dim, GLOBAL_BASE), Rope(m.number("rope.freq_base_swa", LOCAL_BASE), head_dim)),
        layer_rope=tuple(map(int, local)),
        layer_window=tuple(near * is_local for is_local in local),
        norm_bias=False,
    )


def tensors(c: ModelConfig) -> blocks.Shapes:
    shapes: blocks.Shapes = blocks.common_tensors(c) | {"token_embd_norm.weight": (c.dim,)}
    return {name: shape for name, shape in shapes.items() if name != "blk.0.attn_norm.weight"}


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding")
    x = blocks.norm(b, c, x, "token_embd_norm")
    for i in range(c.layers):
        x = _layer(b, c, i, x, context)
    blocks.norm(b, c, x, "output_norm", HIDDEN)


def _layer(b: Builder, c: ModelConfig, i: int, x: Value, context: int) -> Value:
    heads = c.heads(i, context)
    q, k, v = blocks.qkv(b, c, i, blocks.norm(b, c, x, f"blk.{i}.attn_norm") if i else x)
    q, k = b.rope(q, k, heads)
    attended = b.bidirectional_attention(q, k, v, heads, f"blk.{i}.attn")
    x = b.add(x, blocks.attention_output(b, c, i, attended), f"blk.{i}.attn_residual")
    h = blocks.norm(b, c, x, f"blk.{i}.ffn_norm")
    return b.add(x, blocks.feed_forward(b, c, i, h, "gelu"), f"blk.{i}.residual")

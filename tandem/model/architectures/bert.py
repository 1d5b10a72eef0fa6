"""BERT and its descendants that embed texts: each token sees all of its text, and norms follow each addition.

`bert` (MiniLM, BGE, GTE, E5) learns a vector for each position; `nomic-bert` rotates queries and keys, and has a gated
feed-forward. The host adds up a token's vectors of position and type, which are constants (engine/text_encoder.py).
"""

from __future__ import annotations

from tandem.model.architectures import blocks
from tandem.model.config import NO_ROPE, POSITIONS, TYPES, Metadata, ModelConfig, Rope
from tandem.program.graph import HIDDEN, PLACES, Builder, Value

NORMS = ("attn_output_norm", "layer_output_norm")


def config(m: Metadata) -> ModelConfig:
    head_dim, layers = m.head_dim(), m.layers()
    learned = m.has(POSITIONS)
    return m.encoder_config(
        head_dim=head_dim,
        ropes=(Rope(1.0, 0) if learned else m.rope(head_dim),),
        layer_rope=((NO_ROPE if learned else 0),) * layers,
        ffn_gated=m.has("blk.0.ffn_gate.weight"),
    )


def tensors(c: ModelConfig) -> blocks.Shapes:
    shapes = blocks.without_norms(blocks.common_tensors(c))
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith("output")}
    norms = ["token_embd_norm", *(f"blk.{i}.{name}" for i in range(c.layers) for name in NORMS)]
    shapes |= {f"{norm}.{kind}": (c.dim,) for norm in norms for kind in ("weight", "bias")}
    if c.learned_positions:
        shapes[POSITIONS] = (c.trained_context, c.dim)
    if c.token_types:
        shapes[TYPES] = (c.token_types, c.dim)
    return shapes


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding")
    if c.learned_positions or c.token_types:
        x = b.add(x, b.input(c.dim, PLACES), "embedding_sum")
    x = blocks.norm(b, c, x, "token_embd_norm")
    for i in range(c.layers):
        x = _layer(b, c, i, x, context)


def _layer(b: Builder, c: ModelConfig, i: int, x: Value, context: int) -> Value:
    heads = c.heads(i, context)
    q, k, v = blocks.qkv(b, c, i, x)
    if c.layer_rope[i] != NO_ROPE:
        q, k = b.rope(q, k, heads)
    attended = b.bidirectional_attention(q, k, v, heads, f"blk.{i}.attn")
    x = b.add(x, blocks.attention_output(b, c, i, attended), f"blk.{i}.attn_residual")
    x = blocks.norm(b, c, x, f"blk.{i}.attn_output_norm")
    x = b.add(x, blocks.feed_forward(b, c, i, x, "silu" if c.ffn_gated else "gelu"), f"blk.{i}.residual")
    last = i == c.layers - 1
    return blocks.norm(b, c, x, f"blk.{i}.layer_output_norm", HIDDEN if last else f"blk.{i}.out")

"""Phi 3, 3.5 and 4: Llama's block with RoPE on a part of each head, scaled for long contexts.

The file stacks Q, K and V, and gate and up (`Metadata.config` divides them).
"""

from __future__ import annotations

from tandem.model.architectures import blocks, llama
from tandem.model.config import Metadata, ModelConfig

tensors, build = blocks.common_tensors, llama.build


def config(m: Metadata) -> ModelConfig:
    head_dim, layers = m.head_dim(), m.layers()
    window = m.count("attention.sliding_window", 0, zero=True)
    return m.config(
        head_dim=head_dim,
        scale=head_dim**-0.5,
        ropes=(m.rope(head_dim),),
        layer_window=(window if window < m.count("context_length") else 0,) * layers,
    )

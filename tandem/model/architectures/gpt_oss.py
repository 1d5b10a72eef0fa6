"""gpt-oss (20B, 120B): experts with a clamped gate, biases, attention sinks, alternating sliding and global layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tandem.model.architectures import blocks, llama
from tandem.model.config import Metadata, ModelConfig

PATTERN = 2  # every second layer is global, unless the file says otherwise
tensors = partial(blocks.common_tensors, ffn_norm="post_attention_norm")
build = partial(llama.build, ffn_norm="post_attention_norm", activation="clamped")


def config(m: Metadata) -> ModelConfig:
    head_dim, layers = m.head_dim(), m.layers()
    window = m.count("attention.sliding_window")
    return m.config(
        head_dim=head_dim,
        scale=head_dim**-0.5,
        ropes=(replace(m.rope(head_dim), whole_pairs=False),),
        layer_window=tuple(window if sliding else 0 for sliding in m.sliding_layers(layers, PATTERN)),
        sinks=True,
        expert_bias=True,
        **m.experts(),
    )

"""StarCoder 2: layer norms, biases, and a feed-forward without a gate."""

from __future__ import annotations

from functools import partial

from tandem.model.architectures import blocks, llama
from tandem.model.config import Metadata, ModelConfig

tensors = blocks.common_tensors
build = partial(llama.build, activation="gelu")


def config(m: Metadata) -> ModelConfig:
    head_dim = m.head_dim()
    return m.config(
        head_dim=head_dim,
        scale=head_dim**-0.5,
        ropes=(m.rope(head_dim),),
        layer_norm=True,
        ffn_gated=False,
    )

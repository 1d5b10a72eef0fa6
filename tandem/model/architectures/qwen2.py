"""Qwen 2 and 2.5: Llama's block with biases on Q, K and V, and RoPE over halves."""

from __future__ import annotations

from tandem.model.architectures import blocks, llama
from tandem.model.config import Metadata, ModelConfig

tensors = blocks.common_tensors
build = llama.build


def config(m: Metadata) -> ModelConfig:
    head_dim = m.head_dim()
    return m.config(head_dim=head_dim, scale=head_dim**-0.5, ropes=(m.rope(head_dim),))

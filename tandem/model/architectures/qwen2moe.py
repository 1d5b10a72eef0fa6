"""Qwen 2 mixtures (1.5-MoE-A2.7B, 57B-A14B): Qwen 2's block with experts, one of which every token uses."""

from __future__ import annotations

from tandem.model.architectures import qwen2
from tandem.model.config import Metadata, ModelConfig

tensors, build = qwen2.tensors, qwen2.build


def config(m: Metadata) -> ModelConfig:
    head_dim = m.head_dim()
    rope = m.rope(head_dim)
    return m.config(
        head_dim=head_dim, scale=head_dim**-0.5, ropes=(rope,), experts_normalised=False, **m.experts()
    )

"""Qwen 3 mixtures (30B-A3B, Coder 30B-A3B, 235B-A22B): Qwen 3's block with experts in place of the feed-forward."""

from __future__ import annotations

from tandem.model.architectures import qwen3
from tandem.model.config import Metadata, ModelConfig

tensors, build = qwen3.tensors, qwen3.build


def config(m: Metadata) -> ModelConfig:
    head_dim = m.head_dim()
    return m.config(head_dim=head_dim, scale=head_dim**-0.5, ropes=(m.rope(head_dim),), **m.experts())

"""The text model of Qwen 2 VL and 2.5 VL: Qwen 2; positions of images have three sections in RoPE, in a row."""

from __future__ import annotations

from tandem.model.architectures import qwen2
from tandem.model.config import Metadata, ModelConfig

tensors, build = qwen2.tensors, qwen2.build


def config(m: Metadata) -> ModelConfig:
    head_dim = m.head_dim()
    rope = m.rope(head_dim)
    axes = m.rope_axes(rope, interleaved=False)
    return m.config(head_dim=head_dim, scale=head_dim**-0.5, ropes=(rope,), rope_axes=axes)

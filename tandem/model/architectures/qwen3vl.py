"""The text model of Qwen 3 VL, dense or a mixture: Qwen 3's block. Positions of images have three sections in RoPE, and
the first layers get further embeddings of an image added."""

from __future__ import annotations

from tandem.model.architectures import qwen3
from tandem.model.config import Metadata, ModelConfig

tensors, build = qwen3.tensors, qwen3.build


def config(m: Metadata) -> ModelConfig:
    head_dim = m.head_dim()
    rope = m.rope(head_dim)
    deepstack = m.count("n_deepstack_layers", 0, maximum=m.layers(), zero=True)
    return m.config(
        head_dim=head_dim,
        scale=head_dim**-0.5,
        ropes=(rope,),
        rope_axes=m.rope_axes(rope, interleaved=True),
        deepstack=deepstack,
        **(m.experts() if m.architecture == "qwen3vlmoe" else {}),
    )

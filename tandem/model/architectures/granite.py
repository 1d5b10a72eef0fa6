"""Granite 3 and 4: Llama's block with constants for embedding, residuals, scores and logits.

A layer adds r f(norm(x)) to the residual stream x. The stream is kept divided by r here: then a layer adds f alone, and
norms, which do not depend on the scale of x but for eps, divide that by r^2.
"""

from __future__ import annotations

from dataclasses import replace

from tandem.model.architectures import llama
from tandem.model.config import NO_ROPE, Metadata, ModelConfig

tensors, build = llama.tensors, llama.build


def config(m: Metadata, **special: object) -> ModelConfig:
    c, residual = llama.config(m, **special), m.number("residual_scale", 1.0)
    rotates = m.gguf.get(m.key("rope.scaling.finetuned"), True)  # here it says so
    return replace(
        c,
        scale=m.number("attention.scale", c.scale),
        embedding_scale=m.number("embedding_scale", 1.0) / residual,
        logit_scale=1.0 / m.number("logit_scale", 1.0),
        eps=c.eps / residual**2,
        layer_rope=(0 if rotates else NO_ROPE,) * c.layers,
    )

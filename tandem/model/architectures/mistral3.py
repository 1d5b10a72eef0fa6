"""Mistral Small 3.1 and Ministral 3: Llama's block with YaRN.

Ministral 3 multiplies queries past the trained context by a factor that grows with their position. There is no op for
that, so a context may not be longer.
"""

from __future__ import annotations

from dataclasses import replace

from tandem.model.architectures import llama
from tandem.model.config import Metadata, ModelConfig

tensors, build = llama.tensors, llama.build


def config(m: Metadata) -> ModelConfig:
    c = llama.config(m)
    if m.number("attention.temperature_scale", 0.0, zero=True):
        return replace(c, trained_context=m.count("rope.scaling.original_context_length", c.trained_context))
    return c

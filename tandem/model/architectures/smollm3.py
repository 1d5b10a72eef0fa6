"""SmolLM 3: Llama's block; every fourth layer does not rotate Q and K."""

from __future__ import annotations

from dataclasses import replace

from tandem.model.architectures import llama
from tandem.model.config import NO_ROPE, Metadata, ModelConfig

tensors, build = llama.tensors, llama.build
PERIOD = 4


def config(m: Metadata) -> ModelConfig:
    c = llama.config(m)
    return replace(c, layer_rope=tuple(0 if (i + 1) % PERIOD else NO_ROPE for i in range(c.layers)))

"""ERNIE 4.5 (0.3B, and 21B-A3B and 300B-A47B as `ernie4_5-moe`): Llama's block; mixtures have dense layers first."""

from __future__ import annotations

from tandem.model.architectures import llama
from tandem.model.config import Metadata, ModelConfig

tensors, build = llama.tensors, llama.build


def config(m: Metadata) -> ModelConfig:
    if m.count("interleave_moe_layer_step", 1) > 1:
        m.gguf.fail(
            m.key("interleave_moe_layer_step"), "dense layers between those with experts: use another model"
        )
    return llama.config(m)

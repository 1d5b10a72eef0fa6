"""Mistral Small 3.1 and Ministral 3: Llama's block with YaRN; queries of Ministral 3 grow with their position."""

from __future__ import annotations

from dataclasses import replace

from tandem.model.architectures import llama
from tandem.model.config import Metadata, ModelConfig

tensors, build = llama.tensors, llama.build


def config(m: Metadata) -> ModelConfig:
    c, growth = llama.config(m), m.number("attention.temperature_scale", 0.0, zero=True)
    if not growth:
        return c
    trained = m.count("rope.scaling.original_context_length")
    return replace(c, ropes=(replace(c.ropes[0], growth=(growth, trained)),))

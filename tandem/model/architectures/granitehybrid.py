"""Granite 4 hybrids: most layers are Mamba-2, some are attention without RoPE; each has a feed-forward, or experts and
a shared one. Their constants are those of Granite (granite.py). Bamba is the same with RoPE and without the constants.
"""

from __future__ import annotations

from functools import partial

from tandem.model.architectures import blocks, granite, llama, mamba2
from tandem.model.config import Metadata, ModelConfig

build = partial(llama.build, recurrent=mamba2.mixer)


def config(m: Metadata) -> ModelConfig:
    return granite.config(m, **m.attention_layers(), **mamba2.scan(m))


def tensors(c: ModelConfig) -> blocks.Shapes:
    shapes = blocks.common_tensors(c)
    for i in range(c.layers):
        if c.is_recurrent(i):
            shapes = blocks.without_attention(shapes, i) | mamba2.layer_tensors(c, i)
    return shapes

"""Falcon H1: each layer has attention and Mamba-2 side by side. Files have its multipliers in their weights."""

from __future__ import annotations

from tandem.model.architectures import blocks, llama, mamba2
from tandem.model.config import Metadata, ModelConfig
from tandem.program.graph import Builder


def config(m: Metadata) -> ModelConfig:
    for i in range(m.layers()):
        if m.has(name := f"blk.{i}.ffn_norm"):  # as files of this family name it
            m.gguf.alias(f"{name}.weight", name)
    return llama.config(m, interleaved=False, **mamba2.scan(m))


def tensors(c: ModelConfig) -> blocks.Shapes:
    shapes = blocks.common_tensors(c)
    for i in range(c.layers):
        shapes |= mamba2.layer_tensors(c, i)
    return shapes


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding")
    for i in range(c.layers):
        h = blocks.norm(b, c, x, f"blk.{i}.attn_norm")
        mixed = llama.attention(b, c, i, h, context)
        mixed = b.add(mixed, mamba2.mixer(b, c, i, h, "ssm_out"), f"blk.{i}.mixed")
        x = b.add(x, mixed, f"blk.{i}.attn_residual")
        h = blocks.norm(b, c, x, f"blk.{i}.ffn_norm")
        x = b.add(x, blocks.feed_forward(b, c, i, h, "silu"), f"blk.{i}.out")
    blocks.head(b, c, x)

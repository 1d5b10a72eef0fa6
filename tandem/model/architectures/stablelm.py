"""StableLM (3B, 2 1.6B, Zephyr): Llama's block with layer norms, and RoPE on a quarter of each head."""

from __future__ import annotations

from tandem.errors import UnsupportedModelError
from tandem.model.architectures import blocks, llama
from tandem.model.config import Metadata, ModelConfig

tensors, build = blocks.common_tensors, llama.build


def config(m: Metadata) -> ModelConfig:
    if m.has("blk.0.attn_q_norm.weight") or not m.has("blk.0.ffn_norm.weight"):
        raise UnsupportedModelError(
            f"{m.gguf.path.name} is a StableLM with norms of its own for each head, which this version does not run: "
            "use StableLM 3B or 2 1.6B"
        )
    head_dim = m.head_dim()
    return m.config(head_dim=head_dim, scale=head_dim**-0.5, ropes=(m.rope(head_dim),), layer_norm=True)

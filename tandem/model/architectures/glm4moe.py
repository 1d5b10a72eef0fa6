"""GLM 4.5 to 4.7 and Air: experts chosen by sigmoids plus a bias, beside a shared one; the first layers are dense."""

from __future__ import annotations

from functools import partial

from tandem.model.architectures import blocks, llama
from tandem.model.config import Metadata, ModelConfig

SOFTMAX, SIGMOID = 1, 2  # of `expert_gating_func`
build = partial(llama.build, ffn_norm="post_attention_norm")
draft_layer = partial(llama.layer, ffn_norm="post_attention_norm")


def config(m: Metadata) -> ModelConfig:
    head_dim, experts = m.head_dim(), m.experts()
    return m.config(
        head_dim=head_dim,
        scale=head_dim**-0.5,
        ropes=(m.rope(head_dim),),
        head_norms=m.has("blk.0.attn_q_norm.weight"),
        experts_sigmoid=m.count("expert_gating_func", SIGMOID, zero=True) != SOFTMAX,
        experts_normalised=m.gguf.get(m.key("expert_weights_norm"), True),
        **m.draft_head(),
        **experts
        | {"shared_expert_dim": m.count("expert_shared_count") * m.count("expert_feed_forward_length")},
    )


def tensors(c: ModelConfig) -> blocks.Shapes:
    norms = {"attn_q_norm": c.head_dim, "attn_k_norm": c.head_dim} if c.head_norms else {}
    return blocks.common_tensors(c, ffn_norm="post_attention_norm") | blocks.layer_vectors(c, norms)

"""Seed-OSS: Qwen 2's block with a head size of its own; the norm before the feed-forward has another name."""

from __future__ import annotations

from functools import partial

from tandem.model.architectures import blocks, llama, qwen2

config = qwen2.config
tensors = partial(blocks.common_tensors, ffn_norm="post_attention_norm")
build = partial(llama.build, ffn_norm="post_attention_norm")

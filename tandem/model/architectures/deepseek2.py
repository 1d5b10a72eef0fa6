"""Latent attention (MLA): DeepSeek V2 and V3, GLM 4.7 Flash. Keys and values of all heads are made of one latent.

Only the latent is cached, with a key that RoPE turns. A query is multiplied by the matrix that would have made keys of
the latent, and the result, which is a latent for each head, by the one that would have made values of it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tandem.kernels.abi import MAX_HEAD_DIM
from tandem.model.architectures import blocks
from tandem.model.config import Metadata, ModelConfig, Rope
from tandem.program.graph import Builder, LatentHeads, Value

SOFTMAX, SIGMOID = 1, 2  # of `expert_gating_func`
# Each head has matrices of its own, and so launches: of DeepSeek V3, 128 in 61 layers.
MAX_HEADS, MAX_HEADS_OF_LAYERS = 256, 1 << 14
RANKS_OF_SIGMOIDS = 2  # experts whose scores rank a group, where scores are sigmoids; else 1


def config(m: Metadata) -> ModelConfig:
    q_heads = m.count("attention.head_count", maximum=MAX_HEADS)
    if q_heads * m.layers() > MAX_HEADS_OF_LAYERS:
        m.gguf.fail(
            m.key("block_count"),
            f"{m.layers()} layers of {q_heads} heads are more than any model has: convert it again",
        )
    latent, q_latent = m.count("attention.kv_lora_rank"), m.count("attention.q_lora_rank", 0, zero=True)
    key, value = m.count("attention.key_length_mla"), m.count("attention.value_length_mla")
    rope, mscale = _rope(m, key)
    own, rotated = key - rope.rot_dim, rope.rot_dim
    if own < 1:
        m.gguf.fail(
            m.key("rope.dimension_count"), f"{rotated} of {key} columns rotate: convert the model again"
        )
    if (latent + rotated) % 2 or latent + rotated > 2 * MAX_HEAD_DIM:
        most = 2 * MAX_HEAD_DIM
        m.gguf.fail(
            m.key("attention.kv_lora_rank"),
            f"latents of {latent} + {rotated} columns, not an even number up to {most}: use another model",
        )
    for i in range(m.layers()):
        name = f"blk.{i}.attn_q{'_b' if q_latent else ''}"
        m.gguf.divide_runs(f"{name}.weight", {_query(i, "own"): own, _query(i, "rotated"): rotated})
        for part in "kv":
            heads = {f"blk.{i}.attn_{part}_b.{head}.weight": 1 for head in range(q_heads)}
            m.gguf.divide(f"blk.{i}.attn_{part}_b.weight", heads)
    return m.config(
        head_dim=(latent + rotated) // 2,  # of which the cache has a key and a value
        kv_heads=1,
        scale=key**-0.5 * mscale**2,
        ropes=(rope,),
        interleaved=True,
        latent_dim=latent,
        query_latent_dim=q_latent,
        latent_key_dim=own,
        latent_value_dim=value,
        **(_experts(m) if m.gguf.get(m.key("expert_count"), 0) else {}),
    )


def _rope(m: Metadata, key: int) -> tuple[Rope, float]:
    """RoPE, and a factor of queries and keys that takes the place of YaRN's magnitude."""
    rope = m.rope(key)
    # A tenth of what files of other architectures have.
    multiplier = m.number("rope.scaling.yarn_log_multiplier", 0.0, zero=True)
    if not rope.yarn or not multiplier:
        return rope, 1.0
    factor, trained, fast, slow, _ = rope.yarn
    magnitude = m.number("rope.scaling.attn_factor", 1.0) / (0.1 * math.log(factor) + 1)
    return replace(rope, yarn=(factor, trained, fast, slow, magnitude)), multiplier * math.log(factor) + 1


def _experts(m: Metadata) -> dict[str, object]:
    experts = m.experts()
    groups, used = m.count("expert_group_count", 1), m.count("expert_group_used_count", 1)
    sigmoid = m.count("expert_gating_func", SOFTMAX, zero=True) == SIGMOID
    if m.count("expert_count") % groups or used > groups:
        m.gguf.fail(
            m.key("expert_group_count"),
            f"experts are not {groups} groups, of which {used} are used: convert it again",
        )
    shared = m.count("expert_shared_count", 0, maximum=64, zero=True) * m.count("expert_feed_forward_length")
    return experts | {
        "experts_sigmoid": sigmoid,
        "experts_normalised": m.gguf.get(m.key("expert_weights_norm"), False),
        "shared_expert_dim": shared,
        "expert_groups": groups,
        "expert_groups_used": used,
        "expert_group_top": RANKS_OF_SIGMOIDS if sigmoid else 1,
    }


def _query(layer: int, part: str) -> str:
    return f"blk.{layer}.attn_q.{part}.weight"


def tensors(c: ModelConfig) -> blocks.Shapes:
    shapes, rotated = blocks.ends(c), c.ropes[0].rot_dim
    for i in range(c.layers):
        name, source = f"blk.{i}.attn_", c.query_latent_dim or c.dim
        shapes |= {
            f"{name}norm.weight": (c.dim,),
            f"blk.{i}.ffn_norm.weight": (c.dim,),
            _query(i, "own"): (c.q_heads * c.latent_key_dim, source),
            _query(i, "rotated"): (c.q_heads * rotated, source),
            f"{name}kv_a_mqa.weight": (c.latent_dim + rotated, c.dim),
            f"{name}kv_a_norm.weight": (c.latent_dim,),
            f"{name}output.weight": (c.dim, c.q_heads * c.latent_value_dim),
        }
        if c.query_latent_dim:
            shapes |= {f"{name}q_a.weight": (source, c.dim), f"{name}q_a_norm.weight": (source,)}
        for head in range(c.q_heads):
            shapes[f"{name}k_b.{head}.weight"] = (1, c.latent_dim, c.latent_key_dim)
            shapes[f"{name}v_b.{head}.weight"] = (1, c.latent_value_dim, c.latent_dim)
        shapes |= blocks.expert_tensors(c, i) if c.has_experts(i) else blocks.dense_tensors(c, i)
    return shapes


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding")
    for i in range(c.layers):
        h = blocks.norm(b, c, x, f"blk.{i}.attn_norm")
        x = b.add(x, _attention(b, c, i, h, context), f"blk.{i}.attn_residual")
        h = blocks.norm(b, c, x, f"blk.{i}.ffn_norm")
        x = b.add(x, blocks.feed_forward(b, c, i, h, "silu"), f"blk.{i}.out")
    blocks.head(b, c, x)


def _attention(b: Builder, c: ModelConfig, i: int, h: Value, context: int) -> Value:
    name, rotated = f"blk.{i}.", c.ropes[0].rot_dim
    heads = c.heads(i, context)._replace(head_dim=rotated)
    stored = b.matmul(
        h, c.matrix(f"{name}attn_kv_a_mqa", c.latent_dim + rotated, c.dim), f"{name}latent_and_key"
    )
    latent = b.slice(stored, 0, c.latent_dim, f"{name}latent")
    latent = blocks.norm(b, c, latent, f"{name}attn_kv_a_norm")
    key = b.slice(stored, c.latent_dim, c.latent_dim + rotated, f"{name}k_rotated")
    if c.query_latent_dim:
        h = b.matmul(h, c.matrix(f"{name}attn_q_a", c.query_latent_dim, c.dim), f"{name}q_latent")
        h = blocks.norm(b, c, h, f"{name}attn_q_a_norm")
    q, rotated_q = (
        b.matmul(h, c.matrix(f"{name}attn_q.{part}", c.q_heads * columns, h.width), f"{name}q_{part}")
        for part, columns in (("own", c.latent_key_dim), ("rotated", rotated))
    )
    rotated_q, key = b.rope(rotated_q, key, heads)
    latent_heads = LatentHeads(heads.layer, heads.group, c.q_heads, c.latent_dim, rotated, c.scale)
    q = _by_head(b, c, q, f"{name}attn_k_b", c.latent_dim, f"{name}q_absorbed")
    attended = b.latent_attention(q, rotated_q, latent, key, latent_heads, f"{name}attn_latent")
    attended = _by_head(b, c, attended, f"{name}attn_v_b", c.latent_value_dim, f"{name}attn")
    return blocks.attention_output(b, c, i, attended)


def _by_head(b: Builder, c: ModelConfig, x: Value, matrix: str, rows: int, name: str) -> Value:
    """The columns of each head times a matrix of its own."""
    columns, parts = x.width // c.q_heads, []
    for head in range(c.q_heads):
        own = b.slice(x, head * columns, (head + 1) * columns, f"{x.name}.{head}")
        parts.append(b.matmul(own, c.matrix(f"{matrix}.{head}", rows, columns), f"{name}.{head}"))
    return b.concat(parts, name)

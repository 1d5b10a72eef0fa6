"""Gemma 4 (text): dense (12B, 31B), experts beside a dense feed-forward (26B-A4B), embeddings of each layer (E2B, E4B).

Sliding and global layers differ in their number of KV heads and in head size. The last layers of E2B and E4B read keys
and values of earlier ones. Values are normed too, without weights, and those of some global layers are their keys.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tandem.kernels.abi import MAX_HEAD_DIM
from tandem.kernels.kernel import Array
from tandem.model.architectures import blocks
from tandem.model.config import Metadata, ModelConfig, Rope
from tandem.program.graph import Builder, Value, Vector

PATTERN = 6  # every sixth layer is global, unless the file says otherwise
PER_LAYER_NORM = "per_layer_proj_norm.halved"  # weights of the norm divided by the square root of 2


def config(m: Metadata) -> ModelConfig:
    layers = m.layers()
    sliding = m.sliding_layers(layers, PATTERN)
    window = m.count("attention.sliding_window")
    head_dim, local_dim = m.count("attention.key_length", 512), m.count("attention.key_length_swa", 256)
    kv_heads, ffn_dims = m.layer_counts("attention.head_count_kv"), m.layer_counts("feed_forward_length")
    shared = m.count("attention.shared_kv_layers", 0, zero=True)
    _check_shared(m, sliding, kv_heads, shared)
    for i in range(layers):
        if i < layers - shared and not m.has(f"blk.{i}.attn_v.weight"):  # values are keys before their norm
            m.gguf.alias(f"blk.{i}.attn_v.weight", f"blk.{i}.attn_k.weight")
        if m.has(f"blk.{i}.ffn_gate_up_exps.weight"):
            halves = [f"blk.{i}.ffn_{part}_exps.weight" for part in ("gate", "up")]
            m.gguf.divide_experts(f"blk.{i}.ffn_gate_up_exps.weight", halves)
    per_layer = m.count("embedding_length_per_layer_input", 0, maximum=MAX_HEAD_DIM, zero=True)
    if per_layer % 2:
        m.gguf.fail(
            m.key("embedding_length_per_layer_input"), f"{per_layer} is not even: convert the model again"
        )
    local = Rope(m.number("rope.freq_base_swa", 10000.0), m.count("rope.dimension_count_swa", local_dim))
    if local.rot_dim % 2 or local.rot_dim > local_dim or local.base <= 1.0:
        m.gguf.fail(
            m.key("rope.dimension_count_swa"), "sliding layers cannot rotate so: convert the model again"
        )
    experts = m.experts() if m.has("blk.0.ffn_gate_inp.weight") else {}
    return m.config(
        head_dim=local_dim,
        scale=1.0,
        ropes=(m.rope(head_dim, 1000000.0), local),
        kv_heads=kv_heads[0],
        ffn_dim=ffn_dims[0],
        layer_rope=tuple(int(s) for s in sliding),
        layer_window=tuple(window if s else 0 for s in sliding),
        layer_head_dim=tuple(local_dim if s else head_dim for s in sliding),
        layer_kv_heads=kv_heads,
        layer_ffn_dim=ffn_dims,
        shared_kv_layers=shared,
        per_layer_dim=per_layer,
        layer_scales=m.has("blk.0.layer_output_scale.weight"),
        logit_softcap=m.number("final_logit_softcapping", 0.0, zero=True),
        # Files do not say it: models with embeddings of each layer (E2B, E4B) are causal throughout.
        image_attention=() if per_layer else tuple(sliding),
        **experts,
    )


def _check_shared(m: Metadata, sliding: list[bool], kv_heads: tuple[int, ...], shared: int) -> None:
    """Each layer that reads another's cache must find one of its kind and number of heads."""
    key, own = m.key("attention.shared_kv_layers"), len(sliding) - shared
    kinds = list(zip(sliding, kv_heads, strict=True))
    if own < 1 or any(
        kind not in kinds[:own] or kinds[:own][::-1].index(kind) != sliding[:own][::-1].index(kind[0])
        for kind in kinds[max(own, 0) :]
    ):
        m.gguf.fail(
            key, f"{shared} of {len(sliding)} layers find no keys and values: convert the model again"
        )


def tensors(c: ModelConfig) -> blocks.Shapes:
    shapes: blocks.Shapes = {"token_embd.weight": (c.vocab, c.dim), "output_norm.weight": (c.dim,)}
    if not c.tied_head:
        shapes["output.weight"] = (c.vocab, c.dim)
    if c.per_layer_dim:
        wide = c.layers * c.per_layer_dim
        shapes |= {
            "per_layer_token_embd.weight": (c.vocab, wide),
            "per_layer_model_proj.weight": (wide, c.dim),
        }
        shapes["per_layer_proj_norm.weight"] = (c.per_layer_dim,)
    for i in range(c.layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in _layer_tensors(c, i).items()}
        if c.experts:
            shapes |= blocks.expert_tensors(c, i)
    return shapes


def _layer_tensors(c: ModelConfig, layer: int) -> blocks.Shapes:
    size, ffn = c.head_dim_of(layer), c.ffn_dim_of(layer)
    q, kv = c.q_heads * size, c.kv_heads_of(layer) * size
    norms = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"]
    shapes: blocks.Shapes = {
        "attn_q.weight": (q, c.dim),
        "attn_output.weight": (c.dim, q),
        "attn_q_norm.weight": (size,),
        "ffn_gate.weight": (ffn, c.dim),
        "ffn_up.weight": (ffn, c.dim),
        "ffn_down.weight": (c.dim, ffn),
    }
    if c.kv_layer(layer) == layer:
        shapes |= {"attn_k.weight": (kv, c.dim), "attn_v.weight": (kv, c.dim), "attn_k_norm.weight": (size,)}
    if c.experts:
        norms += ["post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"]
        shapes |= {"ffn_gate_inp.scale": (c.dim,), "ffn_down_exps.scale": (c.experts,)}
    if c.per_layer_dim:
        norms.append("post_norm")
        shapes |= {"inp_gate.weight": (c.per_layer_dim, c.dim), "proj.weight": (c.dim, c.per_layer_dim)}
    if c.layer_scales:
        shapes["layer_output_scale.weight"] = (1,)
    return shapes | {f"{name}.weight": (c.dim,) for name in norms}


def tables(c: ModelConfig, vector: Callable[[str], Array]) -> dict[str, Array]:
    """The constants that ops use but the file does not have."""
    found: dict[str, Array] = {f"ones.{n}": np.ones(n, np.float32) for n in {*c.layer_head_dim}}
    if c.per_layer_dim:
        found[PER_LAYER_NORM] = np.float32(0.5**0.5) * vector("per_layer_proj_norm.weight")
    for i in range(c.layers if c.experts else 0):
        found[_router_norm(i)] = np.float32(c.dim**-0.5) * vector(f"blk.{i}.ffn_gate_inp.scale")
    return found


def _router_norm(layer: int) -> str:
    return f"blk.{layer}.ffn_gate_inp.norm"


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding", scale=float(np.float32(c.dim**0.5)))
    inputs = _per_layer_inputs(b, c, x) if c.per_layer_dim else None
    for i in range(c.layers):
        h = blocks.norm(b, c, x, f"blk.{i}.attn_norm")
        o = blocks.norm(b, c, _attention(b, c, i, h, context), f"blk.{i}.post_attention_norm")
        x = b.add(x, o, f"blk.{i}.attn_residual")
        f = blocks.norm(b, c, _feed_forward(b, c, i, x), f"blk.{i}.post_ffw_norm")
        rest = "out" if not (inputs or c.layer_scales) else "ffn_residual"
        x = b.add(x, f, f"blk.{i}.{rest}")
        if inputs:
            rest = "out" if not c.layer_scales else "per_layer_residual"
            x = b.add(x, _per_layer(b, c, i, x, inputs), f"blk.{i}.{rest}")
        if c.layer_scales:
            x = b.scale(x, Vector(f"blk.{i}.layer_output_scale.weight", 1), f"blk.{i}.out")
    blocks.head(b, c, x)


def _attention(b: Builder, c: ModelConfig, layer: int, h: Value, context: int) -> Value:
    heads, name = c.heads(layer, context), f"blk.{layer}."
    q_norm = Vector(f"{name}attn_q_norm.weight", heads.head_dim)
    q = b.matmul(h, c.matrix(f"{name}attn_q", heads.q_heads * heads.head_dim, c.dim), f"{name}q")
    if c.kv_layer(layer) != layer:
        q = b.rope_query(b.norm_heads(q, q_norm, c.eps, f"{name}q_norm"), heads)
        attended = b.attend(q, heads, f"{name}attn")
    else:
        k, v = (
            b.matmul(h, c.matrix(f"{name}attn_{p}", heads.kv_heads * heads.head_dim, c.dim), f"{name}{p}")
            for p in "kv"
        )
        v = b.norm_heads(v, Vector(f"ones.{heads.head_dim}", heads.head_dim), c.eps, f"{name}v_norm")
        q, k = b.head_norm(q, k, (q_norm, Vector(f"{name}attn_k_norm.weight", heads.head_dim)), heads)
        q, k = b.rope(q, k, heads)
        attended = b.attention(q, k, v, heads, f"{name}attn")
    return blocks.attention_output(b, c, layer, attended)


def _feed_forward(b: Builder, c: ModelConfig, layer: int, x: Value) -> Value:
    """A dense feed-forward, and beside it a mixture of experts if the model has them."""
    name = f"blk.{layer}."
    h = blocks.norm(b, c, x, f"{name}ffn_norm")
    dense = blocks.gated(b, c, layer, h, "gelu", "", c.ffn_dim_of(layer))
    if not c.experts:
        return dense
    dense = blocks.norm(b, c, dense, f"{name}post_ffw_norm_1")
    h = b.norm(x, Vector(_router_norm(layer), c.dim), c.eps, f"{name}router_norm")
    logits = b.matmul(h, c.matrix(f"{name}ffn_gate_inp", c.experts, c.dim), f"{name}ffn_router")
    h = blocks.norm(b, c, x, f"{name}pre_ffw_norm_2")
    scales = Vector(f"{name}ffn_down_exps.scale", c.experts)
    mixed = blocks.routed(b, c, layer, h, logits, "gelu", expert_scales=scales, result=f"{name}ffn_out_moe")
    return b.add(dense, blocks.norm(b, c, mixed, f"{name}post_ffw_norm_2"), f"{name}ffn_sum")


def _per_layer_inputs(b: Builder, c: ModelConfig, x: Value) -> Value:
    """The embeddings of all layers side by side: of the token, plus a projection of its embedding, by sqrt(2).

    An image's tokens have those of padding, whose id stands for them."""
    wide = c.layers * c.per_layer_dim
    scale = float(np.float32((c.per_layer_dim / 2) ** 0.5))
    table = b.embed(
        c.matrix("per_layer_token_embd", c.vocab, wide), "per_layer_embedding", scale=scale, images=False
    )
    projected = b.matmul(x, c.matrix("per_layer_model_proj", wide, c.dim), "per_layer_projection")
    # The projection is divided by sqrt(dim) before its norm: the same as a larger epsilon.
    weight = Vector(PER_LAYER_NORM, c.per_layer_dim)
    return b.add(table, b.norm_heads(projected, weight, c.eps * c.dim, "per_layer_norm"), "per_layer_inputs")


def _per_layer(b: Builder, c: ModelConfig, layer: int, x: Value, inputs: Value) -> Value:
    name, begin = f"blk.{layer}.", layer * c.per_layer_dim
    own = b.slice(inputs, begin, begin + c.per_layer_dim, f"{name}per_layer_input")
    gate = b.matmul(x, c.matrix(f"{name}inp_gate", c.per_layer_dim, c.dim), f"{name}per_layer_gate")
    h = b.glu(gate, own, "gelu", f"{name}per_layer_act")
    h = b.matmul(h, c.matrix(f"{name}proj", c.dim, c.per_layer_dim), f"{name}per_layer_out")
    return blocks.norm(b, c, h, f"{name}post_norm")

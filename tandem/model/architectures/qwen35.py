"""Qwen 3.5 and 3.6, and Qwen 3 Next: most layers are Gated DeltaNet, linear attention with a recurrent state; every
fourth is attention whose output has a gate. The feed-forward is dense, or a mixture with a shared expert.

Positions of images have three sections in RoPE, which take turns.
"""

from __future__ import annotations

from tandem.kernels.abi import MAX_CONVOLUTION, MAX_STATE_ROWS
from tandem.model.architectures import blocks
from tandem.model.config import NO_ATTENTION, Metadata, ModelConfig
from tandem.program.graph import Builder, DeltaHeads, Value, Vector

INTERVAL = 4  # one layer in this number has attention
FFN_NORM = "post_attention_norm"


def config(m: Metadata) -> ModelConfig:
    head_dim, next_ = m.head_dim(), m.architecture == "qwen3next"
    rope = m.rope(head_dim)
    windows, delta_heads = _windows(m), _delta_heads(m, tiled=not next_)
    for i, window in enumerate((*windows, 0)):  # the last may draft tokens
        if window != NO_ATTENTION and m.has(f"blk.{i}.attn_q.weight"):
            # For each head, rows of the query and then of the gate.
            parts = dict.fromkeys((f"blk.{i}.attn_q.weight", f"blk.{i}.attn_gate.weight"), head_dim)
            m.gguf.divide_runs(f"blk.{i}.attn_q.weight", parts)
        if window == NO_ATTENTION and m.has(f"blk.{i}.ssm_ba.weight"):
            shared = delta_heads.v_heads // delta_heads.k_heads
            parts = dict.fromkeys((f"blk.{i}.ssm_beta.weight", f"blk.{i}.ssm_alpha.weight"), shared)
            m.gguf.divide_runs(f"blk.{i}.ssm_ba.weight", parts)
    return m.config(
        head_dim=head_dim,
        scale=head_dim**-0.5,
        ropes=(rope,),
        rope_axes=m.rope_axes(rope, interleaved=True),
        layer_window=windows,
        attention_gate=True,
        conv_taps=m.count("ssm.conv_kernel", maximum=MAX_CONVOLUTION),
        delta_heads=delta_heads,
        **m.draft_head(),
        **(m.experts() if m.architecture != "qwen35" else {}),
    )


def _windows(m: Metadata) -> tuple[int, ...]:
    """Which layers have attention: all global."""
    layers, every = m.layers(), m.count("full_attention_interval", INTERVAL, maximum=1024)
    if every > layers or every == 1:
        m.gguf.fail(
            m.key("full_attention_interval"),
            f"{every} is not from 2 to the number of layers, {layers}: convert the model again",
        )
    return tuple(0 if (i + 1) % every == 0 else NO_ATTENTION for i in range(layers))


def _delta_heads(m: Metadata, *, tiled: bool) -> DeltaHeads:
    k_dim = m.count("ssm.state_size", maximum=MAX_STATE_ROWS)
    k_heads, v_heads = m.count("ssm.group_count", maximum=4096), m.count("ssm.time_step_rank", maximum=4096)
    inner = m.count("ssm.inner_size")
    if v_heads % k_heads:
        m.gguf.fail(
            m.key("ssm.time_step_rank"),
            f"{v_heads} value heads are not a multiple of {k_heads} key heads: convert the model again",
        )
    if inner % v_heads:
        m.gguf.fail(
            m.key("ssm.inner_size"), f"{inner} is not a multiple of {v_heads} heads: convert the model again"
        )
    return DeltaHeads(k_heads, v_heads, k_dim, inner // v_heads, tiled)


def tensors(c: ModelConfig) -> blocks.Shapes:
    heads = c.delta_heads
    assert heads is not None
    shapes = blocks.common_tensors(c, ffn_norm=FFN_NORM)
    values = heads.v_heads * heads.v_dim
    for i in range(c.stored_layers):
        if c.is_recurrent(i):
            shapes = blocks.without_attention(shapes, i) | {
                f"blk.{i}.attn_qkv.weight": (heads.width, c.dim),
                f"blk.{i}.attn_gate.weight": (values, c.dim),
                f"blk.{i}.ssm_beta.weight": (heads.v_heads, c.dim),
                f"blk.{i}.ssm_alpha.weight": (heads.v_heads, c.dim),
                f"blk.{i}.ssm_conv1d.weight": (heads.width, c.conv_taps),
                f"blk.{i}.ssm_dt.bias": (heads.v_heads,),
                f"blk.{i}.ssm_a": (heads.v_heads,),
                f"blk.{i}.ssm_norm.weight": (heads.v_dim,),
                f"blk.{i}.ssm_out.weight": (c.dim, values),
            }
        else:
            shapes |= {
                f"blk.{i}.attn_gate.weight": (c.q_heads * c.head_dim, c.dim),
                f"blk.{i}.attn_q_norm.weight": (c.head_dim,),
                f"blk.{i}.attn_k_norm.weight": (c.head_dim,),
            }
    return shapes


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding")
    for i in range(c.layers):
        x = draft_layer(b, c, i, x, context)
    blocks.head(b, c, x)


def draft_layer(b: Builder, c: ModelConfig, layer: int, x: Value, context: int) -> Value:
    """Any layer: the one that drafts tokens is one with attention."""
    h = blocks.norm(b, c, x, f"blk.{layer}.attn_norm")
    mixed = (
        _linear_attention(b, c, layer, h) if c.is_recurrent(layer) else _attention(b, c, layer, h, context)
    )
    x = b.add(x, mixed, f"blk.{layer}.attn_residual")
    h = blocks.norm(b, c, x, f"blk.{layer}.{FFN_NORM}")
    return b.add(x, blocks.feed_forward(b, c, layer, h, "silu"), f"blk.{layer}.out")


def _attention(b: Builder, c: ModelConfig, layer: int, h: Value, context: int) -> Value:
    heads = c.heads(layer, context)
    q, k, v = blocks.qkv(b, c, layer, h)
    gate = blocks.project(
        b, c, h, f"blk.{layer}.attn_gate", c.q_heads * c.head_dim, False, f"blk.{layer}.attn_gate"
    )
    q, k = b.head_norm(q, k, blocks.head_norms(c, layer), heads)
    q, k = b.rope(q, k, heads)
    attended = b.attention(q, k, v, heads, f"blk.{layer}.attn_pregate")
    gated = b.glu(gate, attended, "sigmoid", f"blk.{layer}.attn")
    return blocks.attention_output(b, c, layer, gated)


def _linear_attention(b: Builder, c: ModelConfig, layer: int, h: Value) -> Value:
    heads, name = c.delta_heads, f"blk.{layer}.%s"
    assert heads is not None

    def part(tensor: str, rows: int) -> Value:
        return blocks.project(b, c, h, name % tensor, rows, False, name % tensor)

    qkv, gate = part("attn_qkv", heads.width), part("attn_gate", heads.v_heads * heads.v_dim)
    beta, alpha = part("ssm_beta", heads.v_heads), part("ssm_alpha", heads.v_heads)
    taps = Vector(name % "ssm_conv1d.weight", heads.width * c.conv_taps)
    qkv = b.short_conv(qkv, taps, c.conv_taps, name % "conv")
    vectors = Vector(name % "ssm_dt.bias", heads.v_heads), Vector(name % "ssm_a", heads.v_heads)
    y = b.delta_rule(qkv, beta, alpha, vectors, heads, name % "delta")
    y = b.gated_norm(y, gate, Vector(name % "ssm_norm.weight", heads.v_dim), c.eps, name % "ssm_norm")
    return blocks.project(b, c, y, name % "ssm_out", c.dim, False, name % "attn_out")

"""Mamba-2: layers of a state-space model alone, without attention or feed-forward. Hybrids have such layers too."""

from __future__ import annotations

from tandem.kernels.abi import MAX_CONVOLUTION, MAX_STATE_ROWS
from tandem.model.architectures import blocks
from tandem.model.config import NO_ATTENTION, Metadata, ModelConfig
from tandem.program.graph import Builder, ScanHeads, Value, Vector


def config(m: Metadata) -> ModelConfig:
    return m.config(
        head_dim=0,
        scale=1.0,
        ropes=(),
        q_heads=0,
        kv_heads=0,
        ffn_dim=0,
        layer_window=(NO_ATTENTION,) * m.layers(),
        **scan(m),
    )


def scan(m: Metadata) -> dict[str, object]:
    """The fields of Mamba-2."""
    inner, rows = m.count("ssm.inner_size"), m.count("ssm.state_size", maximum=MAX_STATE_ROWS)
    heads, groups = m.count("ssm.time_step_rank", maximum=4096), m.count("ssm.group_count", maximum=4096)
    taps = m.count("ssm.conv_kernel", maximum=MAX_CONVOLUTION)
    for key, whole, part in (
        ("ssm.inner_size", inner, heads),
        ("ssm.inner_size", inner, groups),
        ("ssm.time_step_rank", heads, groups),
    ):
        if whole % part:
            m.gguf.fail(m.key(key), f"{whole} is not a multiple of {part}: convert the model again")
    if taps < 2:
        m.gguf.fail(m.key("ssm.conv_kernel"), "a convolution has 2 taps at least: convert the model again")
    return {
        "conv_taps": taps,
        "conv_bias": m.any_layer_has("ssm_conv1d.bias"),
        "scan_heads": ScanHeads(heads, groups, inner // heads, rows),
        "scan_eps": m.number("attention.layer_norm_rms_epsilon")
        if m.any_layer_has("ssm_norm.weight")
        else 0.0,
    }


def tensors(c: ModelConfig) -> blocks.Shapes:
    shapes = blocks.ends(c)
    for i in range(c.layers):
        shapes |= {f"blk.{i}.attn_norm.weight": (c.dim,)} | layer_tensors(c, i)
    return shapes


def layer_tensors(c: ModelConfig, layer: int) -> blocks.Shapes:
    heads = _heads(c)
    shapes: blocks.Shapes = {
        "ssm_in.weight": (heads.inner + heads.width + heads.heads, c.dim),
        "ssm_conv1d.weight": (heads.width, c.conv_taps),
        "ssm_dt.bias": (heads.heads,),
        "ssm_a": (heads.heads, 1),
        "ssm_d": (heads.heads, 1),
        "ssm_out.weight": (c.dim, heads.inner),
    }
    if c.conv_bias:
        shapes["ssm_conv1d.bias"] = (heads.width,)
    if c.scan_eps:
        shapes["ssm_norm.weight"] = (heads.groups, heads.inner // heads.groups)
    return {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}


def _heads(c: ModelConfig) -> ScanHeads:
    assert c.scan_heads is not None
    return c.scan_heads


def build(b: Builder, c: ModelConfig, context: int) -> None:
    x = b.embed(c.matrix("token_embd", c.vocab, c.dim), "embedding")
    for i in range(c.layers):
        h = blocks.norm(b, c, x, f"blk.{i}.attn_norm")
        x = b.add(x, mixer(b, c, i, h), f"blk.{i}.out")
    blocks.head(b, c, x)


def mixer(b: Builder, c: ModelConfig, layer: int, h: Value, result: str = "attn_out") -> Value:
    heads, name = _heads(c), f"blk.{layer}.%s"
    both = blocks.project(
        b, c, h, name % "ssm_in", heads.inner + heads.width + heads.heads, False, name % "ssm_in"
    )
    begin, widths = 0, {"ssm_gate": heads.inner, "ssm_xbc": heads.width, "ssm_dt": heads.heads}
    parts = []
    for part, width in widths.items():
        parts.append(b.slice(both, begin, begin + width, name % part))
        begin += width
    gate, xbc, dt = parts
    taps = Vector(name % "ssm_conv1d.weight", heads.width * c.conv_taps)
    bias = Vector(name % "ssm_conv1d.bias", heads.width) if c.conv_bias else None
    xbc = b.short_conv(xbc, taps, c.conv_taps, name % "conv", bias=bias)
    dt_bias, a, d = (Vector(name % vector, heads.heads) for vector in ("ssm_dt.bias", "ssm_a", "ssm_d"))
    y = b.ssm_scan(xbc, dt, (dt_bias, a, d), heads, name % "scan")
    y = b.glu(gate, y, "silu", name % "scan_gated")
    if c.scan_eps:
        weight = Vector(name % "ssm_norm.weight", heads.inner)
        y = b.group_norm(y, weight, heads.groups, c.scan_eps, name % "ssm_norm")
    return blocks.project(b, c, y, name % "ssm_out", c.dim, False, name % result)

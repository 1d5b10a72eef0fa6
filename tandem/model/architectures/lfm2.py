"""LFM2 and LFM2.5: most layers are a gated short convolution, whose state is its last inputs; some are attention. The
feed-forward is dense, or from some layer on a mixture of experts.
"""

from __future__ import annotations

from functools import partial

from tandem.kernels.abi import MAX_CONVOLUTION
from tandem.model.architectures import blocks, llama
from tandem.model.config import Metadata, ModelConfig
from tandem.program.graph import Builder, Value, Vector


def config(m: Metadata) -> ModelConfig:
    head_dim = m.head_dim()
    m.gguf.alias("output_norm.weight", "token_embd_norm.weight")  # at the end, whatever its name says
    taps = m.count("shortconv.l_cache", maximum=MAX_CONVOLUTION)
    if taps < 2:
        m.gguf.fail(m.key("shortconv.l_cache"), "a convolution has 2 taps at least: convert the model again")
    return m.config(
        head_dim=head_dim,
        scale=head_dim**-0.5,
        ropes=(m.rope(head_dim),),
        head_norms=True,
        conv_taps=taps,
        **m.attention_layers(m.count("attention.sliding_window", 0, zero=True)),
        **(m.experts() | {"experts_sigmoid": True} if m.architecture == "lfm2moe" else {}),
    )


def tensors(c: ModelConfig) -> blocks.Shapes:
    shapes = blocks.common_tensors(c)
    for i in range(c.layers):
        if c.is_recurrent(i):
            shapes = blocks.without_attention(shapes, i) | {
                f"blk.{i}.shortconv.in_proj.weight": (3 * c.dim, c.dim),
                f"blk.{i}.shortconv.conv.weight": (c.dim, c.conv_taps),
                f"blk.{i}.shortconv.out_proj.weight": (c.dim, c.dim),
            }
        else:
            shapes |= {f"blk.{i}.attn_{part}_norm.weight": (c.head_dim,) for part in "qk"}
    return shapes


def _convolution(b: Builder, c: ModelConfig, layer: int, h: Value) -> Value:
    """A convolution between two gates."""
    name = f"blk.{layer}.%s"
    both = blocks.project(b, c, h, name % "shortconv.in_proj", 3 * c.dim, False, name % "conv_in")
    first, last, y = (
        b.slice(both, i * c.dim, (i + 1) * c.dim, name % part)
        for i, part in enumerate(("conv_gate", "conv_out_gate", "conv_values"))
    )
    y = b.glu(first, y, "identity", name % "conv_gated")
    taps = Vector(name % "shortconv.conv.weight", c.dim * c.conv_taps)
    y = b.short_conv(y, taps, c.conv_taps, name % "conv", silu=False)
    y = b.glu(last, y, "identity", name % "conv_out")
    return blocks.project(b, c, y, name % "shortconv.out_proj", c.dim, False, name % "attn_out")


build = partial(llama.build, recurrent=_convolution)

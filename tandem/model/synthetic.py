"""Models of published shapes with random weights, generated in device memory without a file: for benchmarks.

`gemma-3-27b:q4_0` has every matrix in q4_0 except the embedding, which is also the LM head and is q6_k as in published
files. `gemma-3-27b:q4_k_m` mixes q4_k and q6_k as published files of that name do. Speed does not depend on the
weights, but for mixtures of experts; the text of such a model is random.

The tokens of a mixture choose their experts uniformly, independently of each other: what layers add to the residual
stream is small beside the embedding, which differs for each token. With a `skew`, some experts are chosen more often.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import numpy as np

from tandem.devices.device import Device
from tandem.errors import ModelNotFoundError
from tandem.gguf.file import GGUF
from tandem.kernels.abi import PANEL_ROWS
from tandem.kernels.kernel import Array
from tandem.kernels.layout import ChooseLayout
from tandem.kernels.matmul import random_panels
from tandem.kernels.panels import LAYOUTS
from tandem.model.architectures import ARCHITECTURES, gemma3, gemma4, gpt_oss, qwen35
from tandem.model.config import NO_ATTENTION, NO_ROPE, ModelConfig, Rope
from tandem.model.encoders import ENCODERS
from tandem.model.encoders.config import VisionConfig
from tandem.model.model import Model, as_matrix, is_matrix
from tandem.model.vision import BLOCK, VisionModel
from tandem.program.graph import DeltaHeads, ScanHeads, Vector
from tandem.program.program import Tensor
from tandem.program.weight_plan import WeightPlan

PATTERN_BYTES = 16 << 20  # random bytes for each layout, repeated over its matrices
# The matrices of a mixture whose results are added to the residual stream: their weights are divided by LITTLE.
RESIDUAL = (
    "attn_output.weight",
    "ffn_down.weight",
    "ffn_down_exps.weight",
    "ffn_down_shexp.weight",
    "ssm_out.weight",
)
LITTLE, ROUTER = 16, "ffn_gate_inp.weight"
HEAD_LAYOUT = "q6_k"  # layout of the head in published files, except in files of the WIDER formats
WIDER = ("q8_0", "f16", "bf16", "f32")
# Mixtures of published files: most matrices in the first layout; in some layers, MIXED matrices in the second.
MIXTURES = {"q4_k_m": ("q4_k", "q6_k"), "q5_k_m": ("q5_k", "q6_k")}
MIXED = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")


def _gemma3(
    layers: int,
    dim: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    vocab: int = 262208,
) -> ModelConfig:
    sliding = [(i + 1) % gemma3.PATTERN != 0 for i in range(layers)]
    scale = (dim / heads if layers == gemma3.LAYERS_OF_27B else head_dim) ** -0.5
    return ModelConfig(
        "gemma3", layers, dim, ffn, heads, kv_heads, head_dim, vocab, 131072, 1e-6, scale,
        (Rope(1e6, head_dim, 8.0), Rope(gemma3.LOCAL_BASE, head_dim)), tuple(map(int, sliding)),
        tuple(window if s else 0 for s in sliding), tied_head=True,
    )  # fmt: skip


def _plain(
    architecture: str, layers: int, dim: int, ffn: int, heads: int, kv_heads: int, vocab: int, *,
    head_dim: int | None = None, tied: bool = False,
) -> ModelConfig:  # fmt: skip
    """Returns the config of Llama or a similar model: every layer sees every position."""
    size = head_dim or dim // heads
    return ModelConfig(
        architecture, layers, dim, ffn, heads, kv_heads, size, vocab, 131072, 1e-5, size**-0.5,
        (Rope(1e6, size),), (0,) * layers, (0,) * layers, interleaved=architecture == "llama", tied_head=tied,
        qkv_bias=architecture == "qwen2",
    )  # fmt: skip


def _gemma4(
    layers: int,
    dim: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    global_kv_heads: int,
    experts: tuple[int, int, int] = (0, 0, 0),
) -> ModelConfig:
    sliding = [(i + 1) % gemma4.PATTERN != 0 for i in range(layers)]
    still = (1e30,) * 192  # columns of a global head that do not rotate
    ropes = (Rope(1e6, 512, factors=(1.0,) * 64 + still), Rope(1e4, 256))
    base = _plain("gemma4", layers, dim, ffn, heads, kv_heads, 262144, head_dim=256, tied=True)
    return replace(
        base, eps=1e-6, scale=1.0, ropes=ropes, layer_rope=tuple(map(int, sliding)), layer_scales=True,
        layer_window=tuple(1024 if s else 0 for s in sliding), logit_softcap=30.0, layer_ffn_dim=(ffn,) * layers,
        layer_head_dim=tuple(256 if s else 512 for s in sliding),
        layer_kv_heads=tuple(kv_heads if s else global_kv_heads for s in sliding), experts=experts[0],
        experts_used=experts[1], expert_dim=experts[2],
    )  # fmt: skip


def _qwen3moe(
    layers: int, dim: int, heads: int, kv_heads: int, experts: int, used: int, ffn: int
) -> ModelConfig:
    base = _plain("qwen3moe", layers, dim, ffn, heads, kv_heads, 151936, head_dim=128)
    return replace(base, experts=experts, experts_used=used, expert_dim=ffn)


def _gpt_oss(layers: int, experts: int) -> ModelConfig:
    base = _plain("gpt-oss", layers, 2880, 2880, 64, 8, 201088, head_dim=64)
    windows = tuple(0 if (i + 1) % gpt_oss.PATTERN == 0 else 128 for i in range(layers))
    yarn = replace(Rope(150000.0, 64), yarn=(32.0, 4096.0, 32.0, 1.0, 1.0), whole_pairs=False)
    return replace(
        base, ropes=(yarn,), layer_window=windows, sinks=True, qkv_bias=True, output_bias=True, experts=experts,
        experts_used=4, expert_dim=2880, expert_bias=True,
    )  # fmt: skip


def _glm_air() -> ModelConfig:
    base = _plain("glm4moe", 46, 4096, 10944, 96, 8, 151552, head_dim=128)
    return replace(
        base, ropes=(Rope(1e6, 64),), qkv_bias=True, experts=128, experts_used=8, expert_dim=1408, dense_layers=1,
        shared_expert_dim=1408, experts_sigmoid=True, expert_choice_bias=True,
    )  # fmt: skip


def _latent(
    layers: int, ffn: int, heads: int, vocab: int, q_latent: int, key: int, value: int, used: int, expert: int,
    shared: int,
) -> ModelConfig:  # fmt: skip
    """With 64 experts, but for the first layer, and a latent of 512 columns beside a key of 64."""
    base = _plain("deepseek2", layers, 2048, ffn, heads, 1, vocab, head_dim=(512 + 64) // 2)
    return replace(
        base, scale=(key + 64) ** -0.5, ropes=(Rope(1e6, 64),), interleaved=True, latent_dim=512,
        query_latent_dim=q_latent, latent_key_dim=key, latent_value_dim=value, experts=64, experts_used=used,
        expert_dim=expert, dense_layers=1, shared_expert_dim=shared,
    )  # fmt: skip


def _qwen35(
    layers: int, dim: int, ffn: int, heads: int, kv_heads: int, v_heads: int, *, experts: int = 0
) -> ModelConfig:
    """With a draft head. `experts`: each is `ffn` wide, and a token uses 8 of them and a shared one."""
    base = _plain(
        "qwen35moe" if experts else "qwen35", layers, dim, ffn, heads, kv_heads, 248320, head_dim=256,
        tied=dim < 2560 and not experts,
    )  # fmt: skip
    attention = [(i + 1) % qwen35.INTERVAL == 0 for i in range(layers)]
    if experts:
        base = replace(base, experts=experts, experts_used=8, expert_dim=ffn, shared_expert_dim=ffn,
                       shared_expert_gate=True)  # fmt: skip
    return replace(
        base, eps=1e-6, ropes=(Rope(1e7, 64),), layer_window=tuple(0 if a else NO_ATTENTION for a in attention),
        attention_gate=True, conv_taps=4, delta_heads=DeltaHeads(16, v_heads, 128, 128, tiled=True),
        draft_layers=1, draft_tensors=("shared_head_norm",),
    )  # fmt: skip


def _windows(layers: int, attention: Container[int]) -> tuple[int, ...]:
    return tuple(0 if i in attention else NO_ATTENTION for i in range(layers))


def _lfm2() -> ModelConfig:
    base = _plain("lfm2", 16, 2048, 8192, 32, 8, 65536, tied=True)
    windows = _windows(16, {2, 5, 8, 10, 12, 14})
    return replace(base, layer_window=windows, head_norms=True, conv_taps=3)


def _granite_4_tiny() -> ModelConfig:
    base = _plain("granitehybrid", 40, 1536, 512, 12, 4, 100352, tied=True)
    return replace(
        base, layer_window=_windows(40, {5, 15, 25, 35}), layer_rope=(NO_ROPE,) * 40, conv_taps=4, conv_bias=True,
        scan_heads=ScanHeads(48, 1, 64, 128), scan_eps=1e-5, experts=64, experts_used=6, expert_dim=512,
        shared_expert_dim=1024,
    )  # fmt: skip


def _nemotron_3_nano() -> ModelConfig:
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    layers = len(pattern)
    base = _plain("nemotron_h_moe", layers, 2688, 1856, 32, 2, 131072, head_dim=128)
    windows = _windows(layers, {i for i, kind in enumerate(pattern) if kind == "*"})
    return replace(
        base, layer_window=windows, layer_rope=(NO_ROPE,) * layers, conv_taps=4, conv_bias=True, ffn_gated=False,
        layer_ffn_dim=tuple(1856 if kind == "E" else 0 for kind in pattern), scan_heads=ScanHeads(64, 8, 64, 128),
        scan_eps=1e-5, experts=128, experts_used=6, expert_dim=1856, shared_expert_dim=3712, experts_sigmoid=True,
        expert_scale=2.5,
    )  # fmt: skip


SHAPES = {
    "gemma-3-1b": _gemma3(26, 1152, 6912, 4, 1, 256, 512, 262144),
    "gemma-3-4b": _gemma3(34, 2560, 10240, 8, 4, 256, 1024),
    "gemma-3-12b": _gemma3(48, 3840, 15360, 16, 8, 256, 1024),
    "gemma-3-27b": _gemma3(62, 5376, 21504, 32, 16, 128, 1024),
    "gemma-3-270m": _gemma3(18, 640, 2048, 4, 1, 256, 512, 262144),
    "gemma-4-26b-a4b": _gemma4(30, 2816, 2112, 16, 8, 2, (128, 8, 704)),
    "gemma-4-31b": _gemma4(60, 5376, 21504, 32, 16, 4),
    "deepseek-v2-lite": replace(
        _latent(27, 10944, 16, 102400, 0, 128, 128, 6, 1408, 2816), experts_normalised=False
    ),
    "glm-4.5-air": _glm_air(),
    "glm-4.7-flash": replace(
        _latent(47, 10240, 20, 154880, 768, 192, 256, 4, 1536, 1536),
        experts_sigmoid=True,
        expert_choice_bias=True,
        expert_scale=1.8,
    ),
    "granite-4-h-tiny": _granite_4_tiny(),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "lfm2-1.2b": _lfm2(),
    "llama-2-7b": _plain("llama", 32, 4096, 11008, 32, 32, 32000),
    "tinyllama-1.1b": _plain("llama", 22, 2048, 5632, 32, 4, 32000),
    "llama-3.2-1b": _plain("llama", 16, 2048, 8192, 32, 8, 128256, tied=True),
    "llama-3.2-3b": _plain("llama", 28, 3072, 8192, 24, 8, 128256, tied=True),
    "llama-3-8b": _plain("llama", 32, 4096, 14336, 32, 8, 128256),
    "llama-3-70b": _plain("llama", 80, 8192, 28672, 64, 8, 128256),
    "mixtral-8x7b": replace(
        _plain("llama", 32, 4096, 14336, 32, 8, 32000), experts=8, experts_used=2, expert_dim=14336
    ),
    "nemotron-3-nano": _nemotron_3_nano(),
    "smollm2-135m": _plain("llama", 30, 576, 1536, 9, 3, 49152, tied=True),
    "qwen2.5-1.5b": _plain("qwen2", 28, 1536, 8960, 12, 2, 151936, tied=True),
    "qwen2.5-7b": _plain("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-14b": _plain("qwen2", 48, 5120, 13824, 40, 8, 152064),
    "qwen2.5-32b": _plain("qwen2", 64, 5120, 27648, 40, 8, 152064),
    "qwen3.5-0.8b": _qwen35(24, 1024, 3584, 8, 2, 16),
    "qwen3.5-2b": _qwen35(24, 2048, 6144, 8, 2, 16),
    "qwen3.6-27b": _qwen35(64, 5120, 17408, 24, 4, 48),
    "qwen3.6-35b-a3b": _qwen35(40, 2048, 512, 16, 2, 32, experts=256),
    "qwen3-30b-a3b": _qwen3moe(48, 2048, 32, 4, 128, 8, 768),
    "qwen3-8b": _plain("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128),
    "qwen3-32b": _plain("qwen3", 64, 5120, 25600, 64, 8, 151936, head_dim=128),
}


class SyntheticModel(Model):
    """`name`: SHAPE or SHAPE:LAYOUT. `layers`: the number of layers to keep, for tests.

    `gguf`: the file that names it, if any (synthetic_file.py). `skew`: see _skewed; 0: tokens choose experts uniformly.
    """

    def __init__(
        self, name: str, layers: int | None = None, gguf: GGUF | None = None, skew: float = 0.0
    ) -> None:
        shape, _, layout = name.lower().partition(":")  # formats are written both ways
        layout = layout or "q4_0"
        if shape not in SHAPES or layout not in (*LAYOUTS, *MIXTURES):
            formats = ", ".join((*LAYOUTS, *MIXTURES))
            raise ModelNotFoundError(
                f"no synthetic model {name!r}: use one of {', '.join(SHAPES)}, then : and one of {formats}"
            )
        full = SHAPES[shape]
        count = layers or full.layers
        by_layer = {
            key: value[:count]
            for key, value in vars(full).items()
            if isinstance(value, tuple) and len(value) == full.layers
        }
        self.config = ModelConfig(**{**vars(full), "layers": count, **by_layer})
        self.architecture = ARCHITECTURES[self.config.architecture]
        self.shape, self.layout, self.skew = shape, layout, skew
        if gguf:
            self.gguf = gguf

    def matrices(self) -> dict[str, tuple[str, int, int]]:
        head = HEAD_LAYOUT if self.config.dim % LAYOUTS[HEAD_LAYOUT].span == 0 else "q8_0"
        head = self.layout if self.layout in WIDER else head
        heads = ("token_embd.weight", "output.weight")
        shapes = self.architecture.tensors(self.config)
        return {
            name: (head if name in heads else self._layout(name, shape[-1]), *as_matrix(shape))
            for name, shape in shapes.items()
            if is_matrix(name, shape)
        }

    def _layout(self, name: str, columns: int) -> str:
        """Returns the layout as in published files: float32 for routers, and q8_0 replaces a format whose blocks do not
        divide the row."""
        if "ffn_gate_inp" in name:
            return "f32"
        if self.layout == "mxfp4" and self.config.experts and "_exps" not in name:
            return "q8_0"  # as gpt-oss is published
        layout, better = MIXTURES.get(self.layout, (self.layout, self.layout))
        if name.endswith(MIXED) and _has_better(int(name.split(".")[1]), self.config.layers):
            layout = better
        return layout if columns % LAYOUTS[layout].span == 0 else "q8_0"

    def _vector(self, name: str) -> Array:
        return np.ones(self.config.dim, np.float32)

    def nbytes(self, choose: ChooseLayout) -> int:
        return sum(choose(*matrix).matrix_bytes(*matrix[1:]) for matrix in self.matrices().values())

    def load(self, plan: WeightPlan, device: Device, context: int) -> None:
        _load(plan, device, self.tables(context), bool(self.config.experts), self.skew)


class SyntheticVision(VisionModel):
    """The vision encoder of Gemma 3 (4B to 27B) with random weights in float16, for images of 896 x 896 pixels."""

    def __init__(self, model: ModelConfig) -> None:
        size, patch = 896, 14
        self.config = VisionConfig(
            "gemma3", patch, 4, 1152, 4304, 27, 16, 1e-6, (0.5,) * 3, (0.5,) * 3, model.dim, (size // patch) ** 2, size
        )  # fmt: skip
        self.encoder = ENCODERS["gemma3"]

    def widen(self, head_dim: int) -> None:
        ffn_dim = -(-self.config.ffn_dim // BLOCK) * BLOCK
        self.config = replace(self.config, head_width=head_dim, ffn_dim=ffn_dim)

    def matrices(self) -> dict[str, tuple[str, int, int]]:
        shapes = self.encoder.tensors(self.config).items()
        return {name: ("f16", *shape) for name, shape in shapes if len(shape) == 2}

    def load(self, plan: WeightPlan, device: Device) -> None:
        _load(plan, device, {})


def _load(
    plan: WeightPlan, device: Device, tables: dict[str, Array], experts: bool = False, skew: float = 0.0
) -> None:
    """Fills the device's "weights" arena. `tables`: what architectures compute. `experts`: it is a mixture."""
    rng, patterns = np.random.default_rng(0), dict[tuple[str, int, float], Array]()
    for packed in plan.matrices.values():
        layout, columns, name = packed.tensor.dtype, packed.parts[0].columns, packed.parts[0].name
        size = columns**-0.5
        if experts and name.endswith(RESIDUAL):
            size /= LITTLE
        if experts and name == "token_embd.weight":
            size = 1.0
        if (layout, columns, size) not in patterns:
            nbytes = min(PATTERN_BYTES, packed.tensor.nbytes)
            panels = max(1, nbytes // LAYOUTS[layout].matrix_bytes(PANEL_ROWS, columns))
            made = random_panels(layout, panels * PANEL_ROWS, columns, rng, size)
            patterns[layout, columns, size] = made.reshape(-1).view(np.uint8)
        pattern = patterns[layout, columns, size]
        if skew and name.endswith(ROUTER):
            pattern = _skewed(pattern, packed.parts[0].rows, columns, skew)
        _fill(device, packed.tensor, pattern)
    for vector in plan.vectors.values():
        padded = np.zeros(vector.tensor.nbytes // 4, np.float32)
        values = np.concatenate([_vector(part, tables) for part in vector.parts])
        padded[: len(values)] = values
        device.write(vector.tensor, padded.view(np.uint8))


def _skewed(pattern: Array, rows: int, columns: int, skew: float) -> Array:
    """A router in float32 whose row i is divided by (i + 1)^skew: the first experts have the highest and the lowest
    logits, so that they are chosen more often."""
    made = pattern[: 4 * rows * columns].view(np.float32).reshape(-1, columns, PANEL_ROWS)
    factors = (1.0 + np.arange(rows)) ** -skew
    skewed = made * factors.astype(np.float32).reshape(-1, 1, PANEL_ROWS)
    return skewed.reshape(-1).view(np.uint8)


def _has_better(layer: int, layers: int) -> bool:
    """Whether a K_M mixture stores MIXED matrices of this layer better: the first and last eighths, and every third."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _fill(device: Device, tensor: Tensor, pattern: Array) -> None:
    """Repeats the pattern over a tensor, so that the host holds only one copy of it."""
    for begin in range(0, tensor.nbytes, len(pattern)):
        size = min(len(pattern), tensor.nbytes - begin)
        part = Tensor(tensor.name, tensor.arena, tensor.dtype, size, offset=begin, base=tensor)
        device.write(part, pattern[:size])


def _vector(part: Vector | int, tables: dict[str, Array]) -> Array:
    """Returns norm weights of 1, so that activations stay of order 1 in any number of layers, and biases of 0."""
    if isinstance(part, int):
        return np.zeros(part, np.float32)
    if part.name in tables:
        return tables[part.name].ravel()
    if part.name.endswith(".bias") and "ssm" not in part.name:
        return np.zeros(part.size, np.float32)
    return np.full(part.size, -1.0 if part.name.endswith(".ssm_a") else 1.0, np.float32)  # states decay

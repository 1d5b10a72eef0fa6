"""Programs to check: of every golden file, of published models by their dimensions alone, and made by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from tandem.kernels.abi import KV_BLOCK
from tandem.kernels.kernel import Buffer, Cost, Grid, Kernel
from tandem.kernels.layout import ChooseLayout, Layout
from tandem.kernels.panels import panel_layout
from tandem.model.architectures import ARCHITECTURES
from tandem.model.config import ModelConfig, Rope
from tandem.model.model import open_model
from tandem.program.fuse import PASSES, fuse
from tandem.program.graph import Builder
from tandem.program.lower import lower
from tandem.program.lowering_base import KVCacheShape
from tandem.program.program import Launch, Program, Tensor
from tandem.program.step_inputs import StepLayout, StepLimits
from tandem.program.weight_plan import WeightPlan

GOLDENS = {path.stem: path for path in (Path(__file__).parents[1] / "models/goldens").glob("*.gguf")}
PASS_SETS: dict[str, tuple[str, ...]] = {
    "all passes": PASSES,
    **{f"without {name}": tuple(p for p in PASSES if p != name) for name in PASSES},
    "no pass": (),
}

Formats = dict[str, str]  # GGUF format of each matrix, in lower case


def build(
    config: ModelConfig, formats: Formats, passes: Iterable[str] = PASSES, *, tokens: int = 512, rows: int = 64,
    context: int = 2048, kv: str = "f16", choose: ChooseLayout = panel_layout,
) -> Program:  # fmt: skip
    shapes = ARCHITECTURES[config.architecture].tensors(config)
    layouts = {name: choose(format, *shapes[name]) for name, format in formats.items()}
    return build_with(config, layouts, passes, tokens=tokens, rows=rows, context=context, kv=kv)


def build_with(
    config: ModelConfig, layouts: dict[str, Layout], passes: Iterable[str], *, tokens: int, rows: int, context: int,
    kv: str,
) -> Program:  # fmt: skip
    builder = Builder()
    ARCHITECTURES[config.architecture].build(builder, config, context)
    ops = fuse(builder.ops, layouts, passes)
    blocks = -(-context // KV_BLOCK)
    limits = StepLimits(tokens, rows, rows, blocks, len(config.windows))
    plan = KVCacheShape(tuple(blocks + group for group in range(len(config.windows))), kv)
    return lower(ops, WeightPlan(layouts), StepLayout(limits), plan, passes)


def golden(name: str, passes: Iterable[str] = PASSES, tokens: int = 512, rows: int = 64) -> Program:
    model = open_model(GOLDENS[name])
    layouts = model.layouts(panel_layout)
    try:
        return build_with(model.config, layouts, passes, tokens=tokens, rows=rows, context=128, kv="f32")
    finally:
        model.gguf.close()


# ---- published models: nothing but their dimensions


def real_config(name: str) -> ModelConfig:
    return REAL[name]()


def _gemma3_27b() -> ModelConfig:
    sliding = tuple((i + 1) % 6 != 0 for i in range(62))
    return ModelConfig(
        "gemma3", layers=62, dim=5376, ffn_dim=21504, q_heads=32, kv_heads=16, head_dim=128, vocab=262144,
        trained_context=131072, eps=1e-6, scale=(5376 / 32) ** -0.5, ropes=(Rope(1e6, 128, 8.0), Rope(1e4, 128)),
        layer_rope=tuple(int(s) for s in sliding), layer_window=tuple(1024 if s else 0 for s in sliding),
        tied_head=True,
    )  # fmt: skip


def _gemma2_9b() -> ModelConfig:
    return ModelConfig(
        "gemma2", layers=42, dim=3584, ffn_dim=14336, q_heads=16, kv_heads=8, head_dim=256, vocab=256000,
        trained_context=8192, eps=1e-6, scale=256**-0.5, ropes=(Rope(1e4, 256),), layer_rope=(0,) * 42,
        layer_window=(4096, 0) * 21, attention_softcap=50.0, logit_softcap=30.0, tied_head=True,
    )  # fmt: skip


def _llama3_8b() -> ModelConfig:
    return ModelConfig(
        "llama", layers=32, dim=4096, ffn_dim=14336, q_heads=32, kv_heads=8, head_dim=128, vocab=128256,
        trained_context=8192, eps=1e-5, scale=128**-0.5, ropes=(Rope(5e5, 128),), layer_rope=(0,) * 32,
        layer_window=(0,) * 32, interleaved=True,
    )  # fmt: skip


def _qwen3_8b() -> ModelConfig:
    return ModelConfig(
        "qwen3", layers=36, dim=4096, ffn_dim=12288, q_heads=32, kv_heads=8, head_dim=128, vocab=151936,
        trained_context=40960, eps=1e-6, scale=128**-0.5, ropes=(Rope(1e6, 128),), layer_rope=(0,) * 36,
        layer_window=(0,) * 36,
    )  # fmt: skip


REAL: dict[str, Callable[[], ModelConfig]] = {
    "Gemma 3 27B": _gemma3_27b,
    "Gemma 2 9B": _gemma2_9b,
    "Llama 3 8B": _llama3_8b,
    "Qwen3 8B": _qwen3_8b,
}


def formats_of(config: ModelConfig, mixed: bool) -> Formats:
    """Every matrix in q4_0, or mixed as in Q4_K_M files: V, down and the head in more bits than the rest."""
    shapes = ARCHITECTURES[config.architecture].tensors(config)
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    wide = ("attn_v", "ffn_down", "token_embd", "output.weight")
    return {
        name: ("q6_k" if any(part in name for part in wide) else "q4_k") if mixed else "q4_0"
        for name in matrices
    }


# ---- by hand

COPY = Kernel(
    name="copy",
    buffers=(Buffer("x", "r"), Buffer("y", "r"), Buffer("out", "w")),
    scalars=(("n", "i"),),
    grid=lambda scalars: Grid(1, "tokens"),
    cost=lambda scalars, counts: Cost(8 * scalars["n"], 0),
    extents=lambda scalars, counts: dict.fromkeys(("x", "y", "out"), 4 * int(scalars["n"])),
    reference=lambda arrays, scalars, counts: {},
    cases=lambda rng: iter(()),
)


def copy(
    x: Tensor | None, out: Tensor, *, y: Tensor | None = None, n: int = 16, barrier: bool = True
) -> Launch:
    return Launch(COPY, {"x": x, "y": y, "out": out}, {"n": n}, out.name, barrier)


def activation(name: str, offset: int, n: int = 16) -> Tensor:
    return Tensor(name, "activations", "f32", 4 * n, n, offset)


def program(*launches: Launch) -> Program:
    sizes = {"weights": 4096, "kv": 4096, "step": 4096, "activations": 4096, "output": 4096}
    return Program(list(launches), {"tokens": 1, "rows": 1, "work": 1}, sizes)

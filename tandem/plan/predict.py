"""Predicts the time of a step on a machine from the Program that would run there.

The limit of a step is its roofline: the weights, keys and values that it must read over the best measured bandwidth, or
its operations over the peak rate, whichever is longer. No engine can be faster. The prediction is the time of our
kernels: on an RDNA3 GPU from what they execute there (rdna3.py), elsewhere from the shares of those rates that they
reach where they have run (`calibration` in hardware.toml).
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace

from tandem.bench.hardware import Hardware
from tandem.bench.step_cost import COUNTED_KERNELS, Step, min_cost, step_costs, weights_read
from tandem.engine.engine import STEP_TOKENS
from tandem.engine.image_encoder import encoder_program
from tandem.engine.kv_size import HEADROOM, MIN_STATES, STATES_OF_SEQUENCE, plan_kv
from tandem.errors import RequestError
from tandem.kernels.abi import KV_BLOCK, KV_TYPES
from tandem.kernels.kernel import Cost
from tandem.kernels.kv_layout import kv_bytes
from tandem.kernels.panels import panel_layout
from tandem.model.model import Model
from tandem.model.vision import VisionModel
from tandem.plan.rdna3 import FITTED, LaunchTime, gpu_of, launch_time
from tandem.plan.rdna3_step import launches
from tandem.program.fuse import fuse
from tandem.program.graph import state_bytes
from tandem.program.lower import lower
from tandem.program.lowering_base import KVCacheShape
from tandem.program.program import Launch, Program
from tandem.program.step_inputs import StepLayout, StepLimits
from tandem.program.validate import validate
from tandem.program.weight_plan import WeightPlan

UNLIMITED = (1e18, 1e18)  # bytes free
MAX_ROWS = 64  # rows of logits of a step
KERNELS = ("matmul", "norm", "rope", "attention")


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step by cause."""

    memory: float
    arithmetic: float
    launches: float = 0.0
    total: float = 0.0  # less than the sum where they overlap

    @property
    def bottleneck(self) -> str:
        parts = {"memory": self.memory, "arithmetic": self.arithmetic, "launches": self.launches}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Memory:
    """Bytes of each part, and of each heap. Heaps are filled in order."""

    parts: dict[str, float]
    heaps: dict[str, float]

    @property
    def needed(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.needed <= sum(self.heaps.values())

    @property
    def used(self) -> dict[str, float]:
        left, found = self.needed, {}
        for name, size in self.heaps.items():
            found[name] = min(left, size)
            left -= found[name]
        return found


class Planned:
    """A model with the Program that the engine would make for `context`; and that of its draft head, if it is used."""

    head: Planned | None = None

    def __init__(
        self,
        model: Model,
        context: int,
        kv: str = "f16",
        *,
        mtp: bool = False,
        vision: VisionModel | None = None,
    ) -> None:
        """`vision`: the encoder of its images, which needs memory."""
        if not 1 <= context <= model.config.trained_context:
            raise RequestError(
                f"a context of {context} is not possible with this model: use 1 to {model.config.trained_context}"
            )
        if model.config.encodes:
            raise RequestError(
                f"a {model.config.architecture} model embeds and ranks texts, and a plan is of generating ones: name "
                "one of those"
            )
        if mtp and not model.config.draft_layers:
            raise RequestError(
                "this model has no draft head: leave out --mtp, or name a draft model with --draft"
            )
        if not mtp:
            model.config = replace(model.config, draft_layers=0)
        self.model, self.context, self.kv = model, context, kv
        self.encoder_bytes = 0.0
        if vision:
            encoder, _, _ = encoder_program(vision, panel_layout, kv)
            self.encoder_bytes = float(sum(encoder.arena_bytes.values()))
        self.config = model.config
        self.step_tokens = min(STEP_TOKENS, -(-context // KV_BLOCK) * KV_BLOCK)
        weights = WeightPlan(model.layouts(panel_layout))
        ops = fuse(model.ops(context), weights.layouts)
        layout, self.state_bytes = StepLayout(self._limits(context)), state_bytes(ops)
        shape = KVCacheShape(self._kv_blocks(context, 1), kv, self._states(1))
        self.program: Program = lower(ops, weights, layout, shape)
        validate(self.program)
        if mtp:
            self.head = copy(self)
            head_ops = fuse(model.draft_ops(context), weights.layouts)
            self.head.program = lower(head_ops, weights, layout, shape, beside=self.program)
            self.program.arena_bytes = self.head.program.arena_bytes

    def _limits(self, context: int) -> StepLimits:
        blocks, groups = -(-context // KV_BLOCK), len(self.config.windows)
        return StepLimits(self.step_tokens, MAX_ROWS, MAX_ROWS + 1, blocks, groups, self.config.vocab)

    def _kv_blocks(self, context: int, sequences: int) -> tuple[int, ...]:
        limits = replace(self._limits(context), sequences=sequences + 1)
        weights = self.model.nbytes(panel_layout)
        return plan_kv(self.config, limits, self.kv, weights=weights, free=UNLIMITED)

    def _states(self, sequences: int) -> int:
        """State slots: of sequences, an out-of-band forward, draft tokens and a few checkpoints."""
        return STATES_OF_SEQUENCE * (sequences + 1) + MIN_STATES if self.state_bytes else 0

    def kv_bytes(self, context: int, sequences: int) -> int:
        """Bytes of a KV cache for `sequences` sequences of `context` tokens."""
        c, kv = self.config, KV_TYPES.index(self.kv)
        return sum(
            kv_bytes(blocks, *size, kv)
            for blocks, window in zip(self._kv_blocks(context, sequences), c.windows, strict=True)
            for size in c.kv_sizes(window)
        )

    @property
    def sequence_bytes(self) -> int:
        """Bytes that another sequence of the whole context takes."""
        return self.kv_bytes(self.context, 1) + STATES_OF_SEQUENCE * self.state_bytes

    def memory(self, hardware: Hardware, context: int | None = None, sequences: int = 1) -> Memory:
        arenas, states = self.program.arena_bytes, self._states(sequences)
        parts = {
            "weights": float(arenas["weights"]),
            "keys and values": float(self.kv_bytes(context or self.context, sequences)),
            **({"recurrent states": float(states * self.state_bytes)} if states else {}),
            "activations": float(arenas["activations"] + arenas["output"]),
            "inputs and results": float(
                sum(size for name, size in arenas.items() if name.startswith(("step", "results")))
            ),
            **({"vision encoder": self.encoder_bytes} if self.encoder_bytes else {}),
            "headroom": HEADROOM,
        }
        return Memory(parts, hardware.heaps)

    @property
    def weights_read(self) -> float:
        """Bytes of weights that a step of any size must read; of a mixture, a step of one token."""
        return sum(weights_read(launch) for launch in self.program.launches)

    def limit(self, hardware: Hardware, step: Step, rows: int | None = None) -> Seconds:
        """The minimum time of a step."""
        cost = min_cost(self.program, step, rows)
        memory = cost.bytes / (hardware.read_gb_s * 1e9)
        arithmetic = cost.ops / (hardware.peak_top_s * 1e12)
        return Seconds(memory, arithmetic, 0.0, max(memory, arithmetic))

    def predict(self, hardware: Hardware, step: Step, rows: int | None = None) -> Seconds:
        """The predicted time of a step with our kernels."""
        host = hardware.calibration.step_us * 1e-6
        each = [seconds for _, seconds in self.predict_each(hardware, step, rows)]
        found = added([*each, Seconds(0.0, 0.0, host, host)])
        return replace(found, total=max(found.total, self.limit(hardware, step, rows).total))

    def predict_each(
        self, hardware: Hardware, step: Step, rows: int | None = None
    ) -> list[tuple[Launch, Seconds]]:
        """The predicted time of each launch; on an RDNA3 GPU, of those that it would run."""
        if gpu := gpu_of(hardware):
            each = launches(self.program, step, rows)
            return [(launch, _seconds(launch_time(work, gpu))) for launch, _, work in each]
        tokens = sum(count for _, count in step)
        return [
            (
                launch,
                _predict(
                    hardware, launch, cost, weights_read(launch, tokens), tokens >= hardware.matrix_from
                ),
            )
            for launch, cost in zip(self.program.launches, step_costs(self.program, step, rows), strict=True)
        ]

    def prompt_steps(self, tokens: int) -> list[Step]:
        size = self.step_tokens
        return [[(begin, min(size, tokens - begin))] for begin in range(0, tokens, size)]


def added(seconds: Iterable[Seconds]) -> Seconds:
    each = list(seconds)
    return Seconds(*(sum(getattr(s, f) for s in each) for f in ("memory", "arithmetic", "launches", "total")))


def kernel_gb_s(hardware: Hardware) -> float:
    """The bandwidth that a matmul of few tokens reaches."""
    if gpu := gpu_of(hardware):
        return min(gpu.gb_s * FITTED.memory, hardware.usual_gb_s)
    return hardware.usual_gb_s * hardware.calibration.dot_memory


def _seconds(time: LaunchTime) -> Seconds:
    """By what the launch waits for: memory, or any unit of the GPU."""
    busy = max(seconds for part, seconds in time.parts.items() if part != "memory")
    return Seconds(time.parts["memory"], busy, time.launch, time.total)


def _kind(launch: Launch) -> str:
    return launch.kernel.name.partition("_")[0]


def _predict(hardware: Hardware, launch: Launch, cost: Cost, weights: float, matrix: bool) -> Seconds:
    found, name = hardware.calibration, _kind(launch)
    if name == "matmul":  # activations come from caches
        nbytes = weights
        memory, ops = (found.matrix_memory, found.matrix_ops) if matrix else (found.dot_memory, found.dot_ops)
    else:
        nbytes = cost.bytes
        memory, ops = found.attention_memory, found.attention_ops
        if name != "attention":
            memory = found.matrix_memory
    peak = hardware.matrix_tflop_s if matrix else hardware.dot_top_s
    moved = nbytes / (hardware.usual_gb_s * 1e9 * memory)
    computed = cost.ops / (peak * 1e12 * ops) if name in COUNTED_KERNELS else 0.0
    launched = found.launch_us[name if name in KERNELS else "other"] * 1e-6
    both = moved + computed if matrix else max(moved, computed)
    return Seconds(moved, computed, launched, launched + both)

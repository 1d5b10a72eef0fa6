"""A Program: a flat list of launches over planned memory. Devices record it once and replay it each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from tandem.kernels.kernel import Cost, Counts, Grid, Kernel

# Two steps may be in flight, each in a step slot with its own StepInputs and results. A step reads the tokens that the
# other slot sampled. A Program names the arenas of slot 0. A split model has a slot for each device, and no step reads
# another slot's results.
STEP_SLOTS, MAX_STEP_SLOTS = 2, 8
OTHER_STEP_SLOT = {"step": "step.1", "step.1": "step", "results": "results.1", "results.1": "results"}


def arena_in(step_slot: int, arena: str) -> str:
    """Returns the arena that a step slot uses in place of the one that a Program names."""
    if step_slot < STEP_SLOTS:
        return OTHER_STEP_SLOT.get(arena, arena) if step_slot else arena
    return f"{arena}.{step_slot}" if arena in ("step", "results") else arena


@dataclass(eq=False)
class Tensor:
    """A named range of bytes in an arena.

    Arenas: "weights", "kv", "activations", "output" (logits), "step" (StepInputs), "results" (sampled tokens), and the
    last two of the other step slot. A view has a `base` and lies `offset` bytes into it; otherwise plan_memory or the
    owner of the arena sets `offset`.
    """

    name: str
    arena: str
    dtype: str  # f32, i32, q8 (activation tiles), f16, or the layout of packed weights
    nbytes: int
    stride: int = 0  # elements from one row to the next; 0: not addressed by rows
    offset: int = -1
    base: Tensor | None = None

    def __post_init__(self) -> None:
        self.root: Tensor = self if self.base is None else self.base.root

    @property
    def start(self) -> int:
        return self.offset if self.base is None else self.base.start + self.offset

    @property
    def region(self) -> tuple[str, int, int]:
        """(arena, first byte, byte after the last)."""
        return self.arena, self.start, self.start + self.nbytes

    @property
    def columns(self) -> tuple[int, int]:
        """(first column, column after the last) of this tensor in its root, whose rows are `stride` apart."""
        first = (self.start - self.root.start) // 4 % self.stride
        return first, first + (self.nbytes // 4 - 1) % self.stride + 1


@dataclass(eq=False)
class Launch:
    kernel: Kernel
    buffers: Mapping[str, Tensor | None]  # by the kernel's names; None: absent
    scalars: Mapping[str, float]
    name: str  # name of the value that it computes
    barrier: bool = False  # all launches before this one must have finished

    @property
    def grid(self) -> Grid:
        return self.kernel.grid(self.scalars)

    def cost(self, counts: Counts) -> Cost:
        return self.kernel.cost(self.scalars, counts)

    def touched(self, access: Literal["r", "w"]) -> list[Tensor]:
        """Returns the tensors read ("r") or written ("w")."""
        return self._read if access == "r" else self._written

    # Cached: read a dozen times while a Program is made and checked.
    @cached_property
    def _read(self) -> list[Tensor]:
        return self._bound("r")

    @cached_property
    def _written(self) -> list[Tensor]:
        return self._bound("w")

    def _bound(self, access: str) -> list[Tensor]:
        bound = ((b, self.buffers[b.name]) for b in self.kernel.buffers)
        return [tensor for buffer, tensor in bound if tensor is not None and access in buffer.access]


@dataclass(eq=False)
class Program:
    launches: list[Launch]
    max_counts: Counts  # the bucket: largest "tokens", "rows" and "work" of a step
    arena_bytes: dict[str, int]
    # name -> (launch that completes it, tensor)
    values: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    beside: Program | None = None  # another one in the same arenas, with a part of the KV cache

    def text(self, counts: Counts | None = None, seconds: list[float] | None = None) -> str:
        """Returns a line for each launch: kernel, value, work items, cost and, given measured `seconds`, speed."""
        counts = counts or self.max_counts
        width = max(14, *(len(launch.kernel.name) + 1 for launch in self.launches))
        lines = [
            f"{'':5}{'kernel':{width}}{'value':26}{'items':>7}{'MB':>10}{'Mop':>10}"
            + ("      us    GB/s" if seconds else "")
        ]
        for i, launch in enumerate(self.launches):
            cost = launch.cost(counts)
            line = f"{i:4}{'|' if launch.barrier else ' '}{launch.kernel.name:{width}}{launch.name:26}"
            line += f"{launch.grid.total(counts):7}{cost.bytes / 1e6:10.3f}{cost.ops / 1e6:10.2f}"
            if seconds:
                line += f"{seconds[i] * 1e6:8.1f}{cost.bytes / max(seconds[i], 1e-9) / 1e9:8.1f}"
            lines.append(line)
        total = [launch.cost(counts) for launch in self.launches]
        lines.append(
            f"{len(self.launches)} launches, {sum(launch.barrier for launch in self.launches)} barriers, "
            f"{sum(c.bytes for c in total) / 1e6:.1f} MB, {sum(c.ops for c in total) / 1e6:.1f} Mop; "
            + ", ".join(f"{arena} {size / 1e6:.1f} MB" for arena, size in self.arena_bytes.items())
        )
        return "\n".join(lines)

"""What a kernel declares once, for every device: its buffers, scalars, grid, cost and NumPy reference.

A kernel `name` lives in `kernels/name.py` (this declaration), `kernels/name.c` (CPU) and later `name.slang`
(Vulkan). Buffers and scalars are passed in the declared order: at most 8 addresses and 16 scalars, 128 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Scalars = Mapping[str, float]
Counts = Mapping[str, int]  # "tokens", "rows", "work": what StepInputs says at run time

COUNTS = ("tokens", "rows", "work")  # the order of the STEP_* constants in core.h


class Buffer(NamedTuple):
    name: str
    access: Literal["r", "w", "rw"]


@dataclass(frozen=True)
class Grid:
    """`items` work items for each group of `step` units of `count` (None: `items` alone)."""

    items: int
    count: str | None = None
    step: int = 1

    def total(self, counts: Counts) -> int:
        return self.items * (1 if self.count is None else -(-counts[self.count] // self.step))


class Cost(NamedTuple):
    bytes: float  # moved to or from memory, each buffer once
    ops: float  # multiplications and additions


@dataclass(frozen=True)
class Case:
    """One test of a kernel: `arrays` by buffer name (outputs are overwritten), what the reference must agree with."""

    label: str
    arrays: Mapping[str, Array]
    scalars: Scalars
    counts: Counts
    atol: float = 0.0
    rtol: float = 0.0


@dataclass(frozen=True)
class Kernel:
    name: str
    buffers: tuple[Buffer, ...]
    scalars: tuple[tuple[str, Literal["i", "f"]], ...]
    grid: Callable[[Scalars], Grid]
    cost: Callable[[Scalars, Counts], Cost]
    # (arrays by name, scalars, counts) -> the outputs by name, each of the array's full shape
    reference: Callable[[Mapping[str, Array], Scalars, Counts], dict[str, Array]]
    cases: Callable[[np.random.Generator], Iterator[Case]]
    # (scalars, counts) -> bytes each bound buffer must have from its address on; what the null device checks
    extents: Callable[[Scalars, Counts], dict[str, int]]

    def __post_init__(self) -> None:
        assert len(self.buffers) <= 8 and len(self.scalars) <= 16, f"{self.name}: a launch has 128 bytes"

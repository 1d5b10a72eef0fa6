"""The declaration of a kernel, once for every device: buffers, scalars, grid, cost, NumPy reference and test cases.

A kernel `name` has three files: `kernels/name.py` (the declaration), `kernels/name.c` (CPU) and `kernels/name.slang`
(Vulkan). A fused kernel that only GPUs run has no C file, and may be an entry point of another kernel's Slang file: its
docstring names the file. What launches it: an op in program/graph.py and its lowering in program/lower.py or, for a
fused GPU kernel, a pass in devices/vulkan/fuse_launches.py; workgroups and constants on a GPU: kernels/*_dispatch.py.

A launch passes buffers and scalars in the declared order; abi.py limits their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from tandem.kernels.abi import MAX_BUFFERS, MAX_SCALARS

Array = np.ndarray[Any, np.dtype[Any]]
Scalars = Mapping[str, float]
Counts = Mapping[str, int]  # the sizes of a step, by the names of abi.COUNTS: "tokens", "rows", "work"

# The addresses that every launch on a GPU has at the same index.
# Sums of workgroups that share a tile, and scratch memory, if the launch uses them; and StepInputs.
PART_SUMS_ADDRESS, SCRATCH_ADDRESS, STEP_ADDRESS = 5, 6, 7
# Not one of the first eight addresses: passed in the two words behind the scalars.
AFTER_SCALARS = 8


class Buffer(NamedTuple):
    name: str
    access: Literal["r", "w", "rw"]
    # Its index among the addresses of a launch on a GPU; None: its index in the declaration.
    address: int | None = None


@dataclass(frozen=True)
class Grid:
    """`items` work items for each group of `step` units of `count` (None: `items` alone); `most` in all (0: any)."""

    items: int
    count: str | None = None
    step: int = 1
    most: int = 0

    def total(self, counts: Counts) -> int:
        total = self.items * (1 if self.count is None else -(-counts[self.count] // self.step))
        return min(total, self.most or total)


class Cost(NamedTuple):
    bytes: float  # bytes moved to or from memory, each buffer once
    ops: float  # number of multiplications and additions


@dataclass(frozen=True)
class Case:
    """One test of a kernel: `arrays` by buffer name (outputs are overwritten), and tolerances."""

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
    # (scalars, counts) -> bytes each bound buffer must have from its address on; the validator checks it
    extents: Callable[[Scalars, Counts], dict[str, int]]
    # Names of further values of a launch that only its dispatch rule reads: they are not passed to the kernel.
    constants: tuple[str, ...] = ()
    # The CPU does not run it: only a pass over the Program for GPUs creates it (devices/vulkan/fuse_launches.py).
    gpu_only: bool = False

    def __post_init__(self) -> None:
        indices = [i for i, _ in self.addresses]
        words = len(self.scalars) + 2 * (AFTER_SCALARS in indices)
        assert len(set(indices)) == len(indices), f"{self.name}: two buffers have the same address"
        assert max(indices) <= AFTER_SCALARS, f"{self.name}: more than {MAX_BUFFERS} buffers"
        assert words <= MAX_SCALARS, f"{self.name}: more than {MAX_SCALARS} scalars"

    @property
    def addresses(self) -> list[tuple[int, str]]:
        """(index among the addresses of a GPU's launch, buffer)."""
        return [(i if b.address is None else b.address, b.name) for i, b in enumerate(self.buffers)]

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """The names of a launch's scalars and constants."""
        return (*(name for name, _ in self.scalars), *self.constants)

"""Finds the launches of a step that accelerators can compute or share, and maps their tensors to other devices.

A matmul is partitioned by output columns, which are rows of its weights: whole panels of 16 rows (with GLU 64 rows,
which make 32 outputs). Consecutive launches, such as a layer's attention, can also run on an accelerator as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from tandem.devices.device import Bytes
from tandem.devices.split.cut import OWN, alive
from tandem.devices.tensor_parallel.cost import is_divisible
from tandem.kernels.abi import GLU_ROWS, PANEL_ROWS, Q8_BLOCK_BYTES, Q8_COLUMNS
from tandem.kernels.matmul import panels
from tandem.kernels.panels import LAYOUTS
from tandem.kernels.q8_tiles import q8_bytes
from tandem.program.plan_memory import lifetimes
from tandem.program.program import Launch, Program, Tensor


@dataclass(frozen=True, eq=False)
class Work:
    """Launches [begin, end) of a Program that an accelerator can run, or partly run."""

    begin: int
    launches: Sequence[Launch]
    entering: Sequence[Tensor]  # activations that the launches read
    leaving: Sequence[Tensor]  # activations that later launches read

    @property
    def end(self) -> int:
        return self.begin + len(self.launches)


class Gemm(Work):
    """A matmul, divisible into `units`: each is a range of output columns."""

    @property
    def launch(self) -> Launch:
        return self.launches[0]

    @cached_property
    def glu(self) -> bool:
        return bool(self.launch.scalars["epilogue"])

    @cached_property
    def rows(self) -> int:
        return int(self.launch.scalars["rows"])

    @cached_property
    def unit_panels(self) -> int:
        return 2 * GLU_ROWS // PANEL_ROWS if self.glu else 1

    @cached_property
    def units(self) -> int:
        return -(-panels(self.rows) // self.unit_panels)

    @cached_property
    def shape(self) -> tuple[str, int, int, bool, bool]:
        """The key of matmuls with the same speed."""
        s = self.launch.scalars
        return self.launch.kernel.name, self.rows, int(s["columns"]), self.glu, bool(s["out_q8"])

    @cached_property
    def out(self) -> Tensor:
        return bound(self.launch, "out")

    @cached_property
    def weights(self) -> Tensor:
        return bound(self.launch, "weights")

    def columns(self, first: int, count: int) -> tuple[int, int]:
        """Returns (first, number) of the output columns of `count` units from `first` on."""
        per_unit = GLU_ROWS if self.glu else PANEL_ROWS
        width = self.rows // 2 if self.glu else self.rows
        return first * per_unit, min(count * per_unit, width - first * per_unit)

    def partition(self, first: int, count: int, at: dict[str, Tensor | None], out: Tensor) -> Launch:
        """Returns the launch for `count` units from `first` on; `at`: the whole operands on the device that runs it."""
        panel, rows = first * self.unit_panels, PANEL_ROWS * count * self.unit_panels
        weights, bias = at["weights"], at["bias"]
        assert weights is not None
        begin = LAYOUTS[weights.dtype].matrix_bytes(PANEL_ROWS * panel, int(self.launch.scalars["columns"]))
        buffers = {
            "x": at["x"],
            "weights": from_byte(weights, begin),
            "bias": bias and from_byte(bias, 4 * PANEL_ROWS * panel),
            "out": out,
        }
        rows = min(rows, self.rows - PANEL_ROWS * panel)
        scalars = {**self.launch.scalars, "rows": rows, "out_stride": out.stride}
        return replace(self.launch, buffers=buffers, scalars=scalars, barrier=False)

    def out_bytes(self, tokens: int, width: int) -> int:
        return q8_bytes(tokens, width) if self.out.dtype == "q8" else 4 * tokens * padded(width)


def padded(width: int) -> int:
    """Returns the row stride in floats: rows start at a multiple of a SIMD vector."""
    return -(-width // PANEL_ROWS) * PANEL_ROWS


def bound(launch: Launch, name: str) -> Tensor:
    tensor = launch.buffers[name]
    assert tensor is not None, f"{launch.name} has no {name}"
    return tensor


def from_byte(tensor: Tensor, begin: int) -> Tensor:
    """Returns a view of a tensor from byte `begin` on."""
    return Tensor(
        tensor.name, tensor.arena, tensor.dtype, tensor.nbytes - begin, tensor.stride, begin, tensor
    )


def gemms(program: Program) -> list[Work]:
    """Returns the matmuls that can be partitioned, in order."""
    return [
        Gemm(i, [launch], [bound(launch, "x").root], [bound(launch, "out").root])
        for i, launch in enumerate(program.launches)
        if is_divisible(launch)
    ]


def attentions(program: Program) -> list[Work]:
    """Returns one Work per layer: the launches that touch the KV cache."""
    lives = lifetimes(program.launches)
    works: list[Work] = []
    numbered = list(enumerate(program.launches))
    for is_attention, group in groupby(numbered, key=lambda pair: bool(pair[1].buffers.get("cache"))):
        if is_attention:
            run = list(group)
            begin, launches = run[0][0], [launch for _, launch in run]
            touched = {t.root for launch in launches for t in [*launch.touched("r"), *launch.touched("w")]}
            entering = [tensor for tensor in alive(lives, begin) if tensor in touched]
            leaving = [tensor for tensor in alive(lives, begin + len(launches)) if tensor in touched]
            works.append(Work(begin, launches, entering, leaving))
    return works


class TensorMap:
    """Maps tensors of a Program to another device's arenas; `place` assigns an offset to each root at first use."""

    def __init__(self, place: Callable[[Tensor], int], own: dict[Tensor, Tensor] | None = None) -> None:
        """`own`: mapped weights and KV caches, if several Works have them in common."""
        self._place, self._own = place, {} if own is None else own
        self._roots: dict[Tensor, Tensor] = {}

    def mapped(self, tensor: Tensor) -> Tensor:
        roots = self._own if tensor.arena in OWN else self._roots
        if tensor.root not in roots:
            roots[tensor.root] = replace(tensor.root, offset=self._place(tensor.root))
        root = roots[tensor.root]
        if tensor is tensor.root:
            return root
        return replace(tensor, offset=tensor.start - tensor.root.start, base=root)

    def launch(self, launch: Launch) -> Launch:
        return replace(launch, buffers={name: t and self.mapped(t) for name, t in launch.buffers.items()})


def moved_activations(by: int) -> TensorMap:
    """Returns a map that moves activations by `by` bytes."""
    return TensorMap(lambda root: root.offset + (by if root.arena == "activations" else 0))


def put_columns(out: Bytes, gemm: Gemm, tokens: int, first: int, width: int, data: Bytes) -> None:
    """Copies columns [first, first + width) of a matmul into its whole output."""
    if gemm.out.dtype == "q8":
        row, part = gemm.out.stride // Q8_COLUMNS * Q8_BLOCK_BYTES, width // Q8_COLUMNS * Q8_BLOCK_BYTES
        at, tiles = first // Q8_COLUMNS * Q8_BLOCK_BYTES, len(data) // part
        out[: tiles * row].reshape(tiles, row)[:, at : at + part] = data.reshape(tiles, part)
    else:
        stride = padded(width)
        rows = np.ndarray((tokens, width), np.float32, out, 4 * first, (4 * gemm.out.stride, 4))
        rows[:] = np.ndarray((tokens, width), np.float32, data, 0, (4 * stride, 4))

"""Runs a C kernel on one of its cases and compares it with its NumPy reference.

`python -m tests.ops.harness KERNEL` prints time and GB/s of each case on the best instruction set.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from tandem import native
from tandem.bench.kernel_checks import (
    GUARD,
    INPUT_GUARD,
    OUTPUT_GUARD,
    assert_array_matches,
    assert_matches,
    assert_q8_matches,
)
from tandem.devices.cpu.device import CPUDevice
from tandem.kernels import all_kernels
from tandem.kernels.abi import COUNTS
from tandem.kernels.kernel import Array, Case, Kernel

__all__ = ["assert_array_matches", "assert_matches", "assert_q8_matches", "run_kernel", "run_once"]

ALIGNMENT = 64
STEP_INTS = 16


class Placed:
    """An aligned copy of an array between two guard zones."""

    def __init__(self, array: Array, guard: int) -> None:
        self.guard = guard
        self.memory = np.full(array.nbytes + 2 * GUARD + ALIGNMENT, guard, np.uint8)
        self.begin = GUARD + -(self.memory.ctypes.data + GUARD) % ALIGNMENT
        self.end = self.begin + array.nbytes
        self.array = self.memory[self.begin : self.end].view(array.dtype).reshape(array.shape)
        self.array[...] = array

    def guards_are_intact(self) -> bool:
        before, after = self.memory[: self.begin], self.memory[self.end :]
        return bool((before == self.guard).all() and (after == self.guard).all())


def place(kernel: Kernel, case: Case) -> dict[str, Placed]:
    guards = {b.name: INPUT_GUARD if b.access == "r" else OUTPUT_GUARD for b in kernel.buffers}
    assert set(case.arrays) <= set(guards), f"{case.label}: an array that is no buffer of {kernel.name}"
    return {name: Placed(array, guards[name]) for name, array in case.arrays.items()}


def make_args(kernel: Kernel, case: Case, placed: dict[str, Placed]) -> Any:
    names = {name for name, _ in kernel.scalars}
    assert set(case.scalars) == names, f"{case.label}: scalars differ from the kernel's"
    args = native.ffi.new("launch_args *")
    for i, buffer in enumerate(kernel.buffers):
        if buffer.name in placed:
            args.buffer[i] = native.ffi.cast("void *", placed[buffer.name].array.ctypes.data)
    for i, (name, kind) in enumerate(kernel.scalars):
        value = case.scalars[name]
        setattr(args.scalar[i], kind, int(value) if kind == "i" else float(value))
    return args


def make_step(case: Case) -> Any:
    return native.ffi.new(f"int32_t[{STEP_INTS}]", [case.counts[name] for name in COUNTS])


def run_once(kernel: Kernel, isa: str, case: Case, backwards: bool) -> dict[str, Array]:
    placed = place(kernel, case)
    args, step = make_args(kernel, case, placed), make_step(case)
    function = native.kernel(kernel.name, isa)
    items = range(kernel.grid(case.scalars).total(case.counts))
    for item in items[::-1] if backwards else items:
        function(args, item, step)
    outputs = {}
    for buffer in kernel.buffers:
        if buffer.name not in placed:
            continue
        got = placed[buffer.name]
        assert got.guards_are_intact(), f"{kernel.name} writes outside of {buffer.name}"
        if "w" in buffer.access:
            outputs[buffer.name] = got.array
        else:
            same = got.array.tobytes() == case.arrays[buffer.name].tobytes()
            assert same, f"{kernel.name} changes {buffer.name}"
    return outputs


def run_kernel(kernel: Kernel, isa: str, case: Case) -> dict[str, Array]:
    """The outputs by name. Also: items in any order give the same bits, and writes stay in the extents."""
    outputs, reversed_outputs = (run_once(kernel, isa, case, backwards) for backwards in (False, True))
    extents = kernel.extents(case.scalars, case.counts) if kernel.extents else {}
    for name, array in outputs.items():
        after, before = array.tobytes(), case.arrays[name].tobytes()
        assert after == reversed_outputs[name].tobytes(), (
            f"{kernel.name}: {name} depends on the order of items"
        )
        size = extents.get(name, len(after))
        assert size <= len(after), f"{kernel.name} declares more bytes of {name} than the case has"
        assert after[size:] == before[size:], f"{kernel.name} writes past its extent of {name}"
    return outputs


def time_case(device: CPUDevice, kernel: Kernel, case: Case, repeats: int = 200) -> float:
    """The best time of a launch in seconds."""
    placed, grid = place(kernel, case), kernel.grid(case.scalars)
    launches, args = native.ffi.new("launch[]", repeats), make_args(kernel, case, placed)
    for launch in launches:
        launch.kernel, launch.args = native.kernel(kernel.name, device.isa), args[0]
        launch.items, launch.count_step = grid.items, grid.step
        launch.count = -1 if grid.count is None else COUNTS.index(grid.count)
    device.memory("step").view(np.int32)[: len(COUNTS)] = [case.counts[name] for name in COUNTS]
    step = native.ffi.cast("int32_t *", device.memory("step").ctypes.data)
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        device.run(launches, repeats, step, native.ffi.NULL)
        seconds.append((time.perf_counter() - begin) / repeats)
    return min(seconds)


def main() -> None:
    kernels = all_kernels()
    if len(sys.argv) != 2 or sys.argv[1] not in kernels:
        sys.exit(f"usage: python -m tests.ops.harness KERNEL, one of {', '.join(kernels)}")
    kernel, device = kernels[sys.argv[1]], CPUDevice(threads=1)
    device.allocate_arena("step", 4 * STEP_INTS)
    print(f"{kernel.name} on {device.isa}, one thread")
    for case in kernel.cases(np.random.default_rng(0)):
        cost, best = kernel.cost(case.scalars, case.counts), time_case(device, kernel, case)
        rates = f"{cost.bytes / best / 1e9:8.2f} GB/s {cost.ops / best / 1e9:8.2f} GOP/s"
        print(f"{best * 1e6:10.2f} us {rates}  {case.label}")


if __name__ == "__main__":
    main()

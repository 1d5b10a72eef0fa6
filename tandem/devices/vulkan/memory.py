"""Arenas over large allocations: what goes into which heap is decided before anything is allocated.

An arena is cut between tensors into runs; a run is one buffer in one allocation, so that a tensor has one address.
Runs take device memory in the order of their traffic until the budget is used up; the rest goes to memory of the
host that the device can read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.devices.vulkan.binding import Vulkan, ffi, new
from tandem.devices.vulkan.capabilities import Capabilities, MemoryType
from tandem.errors import DeviceError, DoesNotFitError
from tandem.program.program import Program

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
DEVICE_LOCAL, HOST_VISIBLE, HOST_COHERENT, HOST_CACHED = 1, 2, 4, 8
USAGE = 0x20000 | 0x20 | 0x3  # device address, storage, transfer in both directions
RUN_BYTES = 256 << 20  # of an allocation, where tensors allow it
RANKS = ("step", "output", "activations", "kv", "weights")  # who gets device memory first


@dataclass(frozen=True)
class Run:
    """A part of an arena that is contiguous in memory."""

    arena: str
    begin: int
    end: int
    cold: bool = False  # little of it is read in a step

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Placed:
    run: Run
    type: MemoryType


def cut(arena: str, nbytes: int, tensors: Iterable[tuple[int, int, bool]], largest: int) -> list[Run]:
    """Runs of at most `largest` bytes that cover an arena; none ends inside a tensor (begin, end, cold)."""
    whole: list[tuple[int, int, bool]] = []  # tensors that share bytes, together
    for begin, end, cold in sorted(tensors):
        if whole and begin < whole[-1][1]:
            first, last, all_cold = whole.pop()
            begin, end, cold = first, max(last, end), all_cold and cold
        whole.append((begin, end, cold))
    runs = [Run(arena, 0, 0, whole[0][2] if whole else False)]
    for begin, end, cold in whole:
        last_run = runs[-1]
        if last_run.nbytes and (end - last_run.begin > largest or cold != last_run.cold):
            runs.append(Run(arena, begin, end, cold))
        else:
            runs[-1] = Run(arena, last_run.begin, end, cold)
    # What lies between and after tensors belongs to the run before it.
    ends = [run.begin for run in runs[1:]] + [max(nbytes, 1)]
    return [Run(arena, run.begin, end, run.cold) for run, end in zip(runs, ends, strict=True)]


def program_runs(program: Program, largest: int) -> list[Run]:
    """The runs of all arenas of a Program, those with the most traffic a byte first."""
    found: dict[str, dict[tuple[int, int], bool]] = {arena: {} for arena in program.arena_bytes}
    for launch in program.launches:
        for tensor in launch.buffers.values():
            if tensor is not None:
                ends = tensor.root.start, tensor.root.start + tensor.root.nbytes
                gathered = launch.kernel.name.startswith("embed") and tensor.arena == "weights"
                found[tensor.arena][ends] = found[tensor.arena].get(ends, True) and gathered
    runs = []
    for arena, nbytes in program.arena_bytes.items():
        runs += cut(arena, nbytes, [(*ends, cold) for ends, cold in found[arena].items()], largest)
    return sorted(runs, key=lambda run: (run.cold, RANKS.index(run.arena)))


def candidates(
    types: Sequence[MemoryType], heaps: Sequence[int], arena: str, spilled: bool
) -> list[MemoryType]:
    """Memory types for an arena, best first."""

    def has(kind: MemoryType, flags: int) -> bool:
        return kind.flags & flags == flags

    mappable = [t for t in types if has(t, HOST_VISIBLE | HOST_COHERENT)]
    if arena == "output":  # the host reads it
        return sorted(mappable, key=lambda t: (not has(t, HOST_CACHED), has(t, DEVICE_LOCAL)))
    if arena == "step":  # the host writes a little, every launch reads it
        return sorted(mappable, key=lambda t: (not has(t, DEVICE_LOCAL), has(t, HOST_CACHED)))
    if spilled:
        return sorted(mappable, key=lambda t: (has(t, DEVICE_LOCAL), has(t, HOST_CACHED)))
    local = [t for t in types if has(t, DEVICE_LOCAL)]
    most = max((heaps[t.heap] for t in local), default=0)
    # Mapped where all of the memory can be: not the small window that some GPUs show to the host.
    return sorted(
        (t for t in local if heaps[t.heap] == most),
        key=lambda t: (not has(t, HOST_VISIBLE | HOST_COHERENT), has(t, HOST_CACHED), t.index),
    )


def plan(
    runs: Sequence[Run], device: Capabilities, free: Sequence[float], limit: float | None
) -> list[Placed]:
    """A memory type for each run, in their order. `free`: bytes of each heap; `limit`: of device memory in all."""
    left, local_left = list(free), float("inf") if limit is None else limit
    sizes = [heap.nbytes for heap in device.heaps]
    placed = []
    for run in runs:
        if run.nbytes > device.largest_allocation:
            raise DoesNotFitError(
                f"a tensor of {run.nbytes / 1e9:.2f} GB is more than {device.name} allocates at once "
                f"({device.largest_allocation / 1e9:.2f} GB): use a smaller model, context or batch"
            )
        spills = [False, True] if run.nbytes <= local_left else [True]
        fitting = [
            (kind, spilled)
            for spilled in spills
            for kind in candidates(device.memory_types, sizes, run.arena, spilled)
            if run.nbytes <= left[kind.heap]
        ]
        if not fitting:
            raise does_not_fit(runs, device, free, limit)
        kind, spilled = fitting[0]
        left[kind.heap] -= run.nbytes
        if not spilled and run.arena not in ("step", "output"):
            local_left -= run.nbytes
        placed.append(Placed(run, kind))
    return placed


def does_not_fit(
    runs: Sequence[Run], device: Capabilities, free: Sequence[float], limit: float | None
) -> DoesNotFitError:
    needed = {arena: sum(run.nbytes for run in runs if run.arena == arena) for arena in RANKS[::-1]}
    parts = ", ".join(f"{arena} {nbytes / 1e9:.2f} GB" for arena, nbytes in needed.items() if nbytes > 1e6)
    local = sum(size for size, heap in zip(free, device.heaps, strict=True) if heap.device_local)
    rest = f"{local / 1e9:.2f} GB of its own memory free"
    if len(device.heaps) > 1:
        rest += f" and can use {(sum(free) - local) / 1e9:.2f} GB of the host's"
    if limit is not None:
        rest += f" (limited to {limit / 1e9:.2f} GB of its own)"
    return DoesNotFitError(
        f"{sum(needed.values()) / 1e9:.2f} GB ({parts}) do not fit: {device.name} has {rest}; use a smaller context, "
        "batch or quantisation"
    )


class Block:
    """One allocation with the buffer that covers it."""

    def __init__(self, vk: Vulkan, device: Any, kind: MemoryType, nbytes: int, closing: ExitStack) -> None:
        self.nbytes, self.flags = nbytes, kind.flags
        self.buffer = vk.create("Buffer", device, size=-(-nbytes // 4) * 4, usage=USAGE)
        closing.callback(vk.DestroyBuffer, device, self.buffer, ffi.NULL)
        needs = new("VkMemoryRequirements")
        vk.GetBufferMemoryRequirements(device, self.buffer, needs)
        if not needs.memoryTypeBits >> kind.index & 1:
            raise DeviceError("the driver keeps buffers out of memory it offers: update the Vulkan driver")
        memory = ffi.new("uint64_t *")
        addressed = new("VkMemoryAllocateFlagsInfo", flags=2)
        vk.AllocateMemory(
            device,
            new(
                "VkMemoryAllocateInfo", pNext=addressed, allocationSize=needs.size, memoryTypeIndex=kind.index
            ),
            ffi.NULL,
            memory,
        )
        closing.callback(vk.FreeMemory, device, memory[0], ffi.NULL)
        vk.BindBufferMemory(device, self.buffer, memory[0], 0)
        self.address = int(
            vk.GetBufferDeviceAddress(device, new("VkBufferDeviceAddressInfo", buffer=self.buffer))
        )
        self.mapped: Bytes | None = None
        if kind.flags & HOST_VISIBLE:
            pointer = ffi.new("void **")
            vk.MapMemory(device, memory[0], 0, 2**64 - 1, 0, pointer)
            self.mapped = np.frombuffer(ffi.buffer(pointer[0], nbytes), np.uint8)


class Arena:
    """A named range of bytes over one or more blocks."""

    def __init__(self, name: str, parts: list[tuple[Run, Block]]) -> None:
        self.name = name
        self.parts = sorted(parts, key=lambda part: part[0].begin)
        self._begins = [run.begin for run, _ in self.parts]

    def locate(self, start: int) -> tuple[Block, int]:
        """(block, offset in it) of a byte of the arena."""
        run, block = self.parts[bisect_right(self._begins, start) - 1]
        return block, start - run.begin

    def address(self, start: int) -> int:
        block, offset = self.locate(start)
        return block.address + offset

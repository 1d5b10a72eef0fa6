"""Arenas over large allocations: what goes into which heap is decided before anything is allocated.

An arena is cut between tensors into runs; a run is one buffer in one allocation, so that a tensor has one address.
Runs take device memory in the order of their traffic until the budget is used up; the rest goes to memory of the
host that the device can read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.devices.device import Bytes
from tandem.devices.vulkan.binding import Vulkan, ffi, new
from tandem.devices.vulkan.capabilities import Capabilities, MemoryType
from tandem.errors import DeviceError, DoesNotFitError
from tandem.program.program import Launch, Program, Tensor

DEVICE_LOCAL, HOST_VISIBLE, HOST_COHERENT, HOST_CACHED = 1, 2, 4, 8
UNFIT = 0xF0  # memory for images only, protected, or uncached (AMD)
USAGE = 0x20000 | 0x20 | 0x3  # device address, storage, transfer in both directions
RUN_BYTES = 256 << 20  # of an allocation, where tensors allow it
# What a run is used for, in the order in which they get memory.
HOST_WRITES, HOST_READS, HOT, COLD = "host writes", "host reads", "hot", "cold"
USES = (HOST_WRITES, HOST_READS, HOT, COLD)
HOT_FIRST = ("output", "activations", "kv", "weights")
HOST_ARENAS = {"step": HOST_WRITES, "step.1": HOST_WRITES, "results": HOST_READS, "results.1": HOST_READS}


@dataclass(frozen=True)
class Run:
    """A part of an arena that is contiguous in memory."""

    arena: str
    begin: int
    end: int
    use: str = HOT

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Placed:
    run: Run
    type: MemoryType
    spilled: bool  # to memory of the host's


Spans = dict[tuple[int, int], str]  # (begin, end) of tensors -> their use


def cut(arena: str, nbytes: int, tensors: Spans, largest: int) -> list[Run]:
    """Runs of one use and at most `largest` bytes that cover an arena; none ends inside a tensor."""
    whole: list[tuple[int, int, str]] = []  # tensors that share bytes, together
    for (begin, end), use in sorted(tensors.items()):
        if whole and begin < whole[-1][1]:
            first, last, first_use = whole.pop()
            begin, end, use = first, max(last, end), min(first_use, use, key=USES.index)
        whole.append((begin, end, use))
    unbound = HOST_ARENAS.get(arena, HOT)
    runs = [Run(arena, 0, 0, whole[0][2] if whole else unbound)]
    for begin, end, use in whole:
        last_run = runs[-1]
        if last_run.nbytes and (end - last_run.begin > largest or use != last_run.use):
            runs.append(Run(arena, begin, end, use))
        else:
            runs[-1] = Run(arena, last_run.begin, end, use)
    # What lies between and after tensors belongs to the run before it.
    ends = [run.begin for run in runs[1:]] + [max(nbytes, 1)]
    return [Run(arena, run.begin, end, run.use) for run, end in zip(runs, ends, strict=True)]


def program_runs(program: Program, largest: int) -> list[Run]:
    """The runs of all arenas of a Program, those with the most traffic a byte first."""
    found: dict[str, Spans] = {arena: {} for arena in program.arena_bytes}
    read = {tensor.root for launch in program.launches for tensor in launch.touched("r")}
    for launch in program.launches:
        for tensor in launch.buffers.values():
            if tensor is not None:
                span, spans = (tensor.root.start, tensor.root.start + tensor.root.nbytes), found[tensor.arena]
                spans[span] = min(spans.get(span, COLD), use_of(launch, tensor, read), key=USES.index)
    runs = [
        run
        for arena, nbytes in program.arena_bytes.items()
        for run in cut(arena, nbytes, found[arena], largest)
    ]
    return sorted(runs, key=lambda run: (USES.index(run.use), (*HOT_FIRST, *HOST_ARENAS).index(run.arena)))


def use_of(launch: Launch, tensor: Tensor, read: set[Tensor]) -> str:
    if tensor.arena in HOST_ARENAS:
        return HOST_ARENAS[tensor.arena]
    if tensor.arena == "output" and tensor.root not in read:
        return HOST_READS  # what a later launch reads (logits) stays where that is fast
    # Of an embedding table a step reads a row a token; a tied head reads all of it.
    return COLD if launch.kernel.name.startswith("embed") and tensor.arena == "weights" else HOT


def candidates(
    types: Sequence[MemoryType], heaps: Sequence[int], use: str, spilled: bool
) -> list[MemoryType]:
    """Memory types for a use, best first."""

    def has(kind: MemoryType, flags: int) -> bool:
        return kind.flags & flags == flags

    types = [t for t in types if not t.flags & UNFIT]
    mappable = [t for t in types if has(t, HOST_VISIBLE | HOST_COHERENT)]
    if use == HOST_READS:
        return sorted(mappable, key=lambda t: (not has(t, HOST_CACHED), has(t, DEVICE_LOCAL)))
    if use == HOST_WRITES:  # a little, that every launch reads
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


def usable(
    device: Capabilities, free: Sequence[float], host: float, limit: float | None
) -> tuple[float, float]:
    """Bytes that can be used: (at the device's own speed, in all). `host`: those that the host has left."""
    local = sum(nbytes for nbytes, heap in zip(free, device.heaps, strict=True) if heap.device_local)
    every = sum(free)
    if device.kind in ("integrated", "software"):  # one memory, whatever heaps it is shown as: all is as fast
        local = every = min(every, host + device.carved_out)
    return min(local, every if limit is None else limit), every


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
        options = [False, True] if run.nbytes <= local_left else [True]
        fitting = [
            (kind, spilled)
            for spilled in (options if run.use in (HOT, COLD) else [False])
            for kind in candidates(device.memory_types, sizes, run.use, spilled)
            if run.nbytes <= left[kind.heap]
        ]
        if not fitting:
            raise does_not_fit(runs, device, free, limit)
        kind, spilled = fitting[0]
        left[kind.heap] -= run.nbytes
        if not spilled and run.use in (HOT, COLD):
            local_left -= run.nbytes
        placed.append(Placed(run, kind, spilled))
    return placed


def does_not_fit(
    runs: Sequence[Run], device: Capabilities, free: Sequence[float], limit: float | None
) -> DoesNotFitError:
    needed = {run.arena: 0 for run in runs}
    for run in runs:
        needed[run.arena] += run.nbytes
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
        self.nbytes = self.parts[-1][0].end
        self._begins = [run.begin for run, _ in self.parts]

    def locate(self, start: int) -> tuple[Block, int]:
        """(block, offset in it) of a byte of the arena."""
        run, block = self.parts[bisect_right(self._begins, start) - 1]
        return block, start - run.begin

    def address(self, start: int) -> int:
        block, offset = self.locate(start)
        return block.address + offset

    def bytes_at(self, start: int, nbytes: int) -> Bytes:
        """Bytes that the host sees."""
        block, offset = self.locate(start)
        if block.mapped is None or offset + nbytes > block.nbytes:
            raise DeviceError(
                f"bytes {start} to {start + nbytes} of the {self.name} arena are not mapped: report this"
            )
        return block.mapped[offset : offset + nbytes]

"""Arenas over large allocations: which part goes into which heap is planned before anything is allocated.

An arena is split between tensors into parts; a part is one buffer in one allocation, so that a tensor has one address.
The parts with the most traffic get device memory until the budget is used up; the rest goes to memory of the host that
the device can read.
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
MAX_PART_BYTES = 256 << 20  # size of an allocation, unless one tensor is larger
# The uses of parts, in the order in which they get memory.
HOST_WRITES, HOST_READS, HOT, EXPERTS, COLD = "host writes", "host reads", "hot", "experts", "cold"
USES = (HOST_WRITES, HOST_READS, HOT, EXPERTS, COLD)
SPILLABLE = (HOT, EXPERTS, COLD)
ARENA_PRIORITY = ("output", "activations", "kv", "weights")
HOST_ARENAS = {"step": HOST_WRITES, "step.1": HOST_WRITES, "results": HOST_READS, "results.1": HOST_READS}


@dataclass(frozen=True)
class ArenaPart:
    """A part of an arena that is contiguous in memory."""

    arena: str
    begin: int
    end: int
    use: str = HOT

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class PlacedPart:
    part: ArenaPart
    type: MemoryType
    spilled: bool  # in memory of the host


Spans = dict[tuple[int, int], str]  # (begin, end) of tensors -> their use


def split_arena(arena: str, nbytes: int, tensors: Spans, max_bytes: int) -> list[ArenaPart]:
    """Parts of one use and at most `max_bytes` bytes that cover an arena; none ends inside a tensor."""
    whole: list[tuple[int, int, str]] = []  # spans of tensors, merged where they overlap
    for (begin, end), use in sorted(tensors.items()):
        if whole and begin < whole[-1][1]:
            first, last, first_use = whole.pop()
            begin, end, use = first, max(last, end), min(first_use, use, key=USES.index)
        whole.append((begin, end, use))
    unbound = HOST_ARENAS.get(arena, HOT)
    parts = [ArenaPart(arena, 0, 0, whole[0][2] if whole else unbound)]
    for begin, end, use in whole:
        last_part = parts[-1]
        if last_part.nbytes and (end - last_part.begin > max_bytes or use != last_part.use):
            parts.append(ArenaPart(arena, begin, end, use))
        else:
            parts[-1] = ArenaPart(arena, last_part.begin, end, use)
    # Bytes between and after tensors belong to the part before them.
    ends = [part.begin for part in parts[1:]] + [max(nbytes, 1)]
    return [ArenaPart(arena, part.begin, end, part.use) for part, end in zip(parts, ends, strict=True)]


def arena_parts(program: Program, max_bytes: int) -> list[ArenaPart]:
    """The parts of all arenas of a Program, in descending order of traffic per byte."""
    arena_spans: dict[str, Spans] = {arena: {} for arena in program.arena_bytes}
    launches = program.launches + (program.beside.launches if program.beside else [])
    read = {tensor.root for launch in launches for tensor in launch.touched("r")}
    for launch in launches:
        for tensor in launch.buffers.values():
            if tensor is not None:
                span = (tensor.root.start, tensor.root.start + tensor.root.nbytes)
                spans = arena_spans[tensor.arena]
                spans[span] = min(spans.get(span, COLD), use_of(launch, tensor, read), key=USES.index)
    parts = [
        part
        for arena, nbytes in program.arena_bytes.items()
        for part in split_arena(arena, nbytes, arena_spans[arena], max_bytes)
    ]
    arenas = (*ARENA_PRIORITY, *HOST_ARENAS)
    return sorted(parts, key=lambda part: (USES.index(part.use), arenas.index(part.arena)))


def use_of(launch: Launch, tensor: Tensor, read: set[Tensor]) -> str:
    if tensor.arena in HOST_ARENAS:
        return HOST_ARENAS[tensor.arena]
    if tensor.arena == "output" and tensor.root not in read:
        return HOST_READS  # outputs that a later launch reads (logits) stay in fast memory
    if tensor.arena != "weights":
        return HOT
    # A step reads only one row per token of an embedding table; a tied head reads all of it.
    if launch.kernel.name.startswith("embed"):
        return COLD
    # Of experts it reads those that its tokens use. So in a mixture that does not fit, all else is in fast memory.
    return EXPERTS if launch.kernel.name.startswith("expert_matmul") else HOT


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
    if use == HOST_WRITES:  # few bytes, which every launch reads
        return sorted(mappable, key=lambda t: (not has(t, DEVICE_LOCAL), has(t, HOST_CACHED)))
    if spilled:
        return sorted(mappable, key=lambda t: (has(t, DEVICE_LOCAL), has(t, HOST_CACHED)))
    local = [t for t in types if has(t, DEVICE_LOCAL)]
    largest = max((heaps[t.heap] for t in local), default=0)
    # Prefers mapped memory, but not the small window that some GPUs show to the host.
    return sorted(
        (t for t in local if heaps[t.heap] == largest),
        key=lambda t: (not has(t, HOST_VISIBLE | HOST_COHERENT), has(t, HOST_CACHED), t.index),
    )


def usable(
    device: Capabilities, free: Sequence[float], host: float, limit: float | None
) -> tuple[float, float]:
    """Usable bytes: (at the speed of the device's own memory, in total). `host`: free bytes of the host."""
    local = sum(nbytes for nbytes, heap in zip(free, device.heaps, strict=True) if heap.device_local)
    every = sum(free)
    if device.kind in ("integrated", "software"):  # one memory, equally fast in all heaps
        local = every = min(every, host + device.reserved_vram)
    return min(local, every if limit is None else limit), every


def plan(
    parts: Sequence[ArenaPart], device: Capabilities, free: Sequence[float], limit: float | None
) -> list[PlacedPart]:
    """Chooses a memory type for each part, in order. `free`: bytes of each heap; `limit`: bytes of device memory."""
    left, local_left = list(free), float("inf") if limit is None else limit
    sizes = [heap.nbytes for heap in device.heaps]
    placed = []
    for part in parts:
        if part.nbytes > device.largest_allocation:
            raise DoesNotFitError(
                f"a tensor of {part.nbytes / 1e9:.2f} GB is more than {device.name} allocates at once "
                f"({device.largest_allocation / 1e9:.2f} GB): use a smaller model, context or batch"
            )
        options = [False, True] if part.nbytes <= local_left else [True]
        fitting = [
            (kind, spilled)
            for spilled in (options if part.use in SPILLABLE else [False])
            for kind in candidates(device.memory_types, sizes, part.use, spilled)
            if part.nbytes <= left[kind.heap]
        ]
        if not fitting:
            raise does_not_fit(parts, device, free, limit)
        kind, spilled = fitting[0]
        left[kind.heap] -= part.nbytes
        if not spilled and part.use in SPILLABLE:
            local_left -= part.nbytes
        placed.append(PlacedPart(part, kind, spilled))
    return placed


def does_not_fit(
    parts: Sequence[ArenaPart], device: Capabilities, free: Sequence[float], limit: float | None
) -> DoesNotFitError:
    needed = {part.arena: 0 for part in parts}
    for part in parts:
        needed[part.arena] += part.nbytes
    sizes = ", ".join(f"{arena} {nbytes / 1e9:.2f} GB" for arena, nbytes in needed.items() if nbytes > 1e6)
    local = sum(size for size, heap in zip(free, device.heaps, strict=True) if heap.device_local)
    rest = f"{local / 1e9:.2f} GB of its own memory free"
    if len(device.heaps) > 1:
        rest += f" and can use {(sum(free) - local) / 1e9:.2f} GB of the host's"
    if limit is not None:
        rest += f" (limited to {limit / 1e9:.2f} GB of its own)"
    return DoesNotFitError(
        f"{sum(needed.values()) / 1e9:.2f} GB ({sizes}) do not fit: {device.name} has {rest}; use a smaller context, "
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

    def __init__(self, name: str, parts: list[tuple[ArenaPart, Block]]) -> None:
        self.name = name
        self.parts = sorted(parts, key=lambda pair: pair[0].begin)
        self.nbytes = self.parts[-1][0].end
        self._begins = [part.begin for part, _ in self.parts]

    def locate(self, start: int) -> tuple[Block, int]:
        """(block, offset in it) of a byte of the arena."""
        part, block = self.parts[bisect_right(self._begins, start) - 1]
        return block, start - part.begin

    def address(self, start: int) -> int:
        block, offset = self.locate(start)
        return block.address + offset

    def bytes_at(self, start: int, nbytes: int) -> Bytes:
        """A view of bytes that the host has mapped."""
        block, offset = self.locate(start)
        if block.mapped is None or offset + nbytes > block.nbytes:
            raise DeviceError(
                f"bytes {start} to {start + nbytes} of the {self.name} arena are not mapped: report this"
            )
        return block.mapped[offset : offset + nbytes]

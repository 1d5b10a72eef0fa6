"""Capabilities of machines that are not here, for what is decided before a device is touched."""

from __future__ import annotations

from dataclasses import replace

from tandem.devices.vulkan.capabilities import REQUIRED, Capabilities, Heap, MatrixShape, MemoryType
from tandem.devices.vulkan.memory import DEVICE_LOCAL, HOST_CACHED, HOST_COHERENT, HOST_VISIBLE

GB = 1_000_000_000
MAPPED = HOST_VISIBLE | HOST_COHERENT


def machine(
    name: str, kind: str, heaps: list[tuple[float, bool]], types: list[tuple[int, int]], index: int = 0
) -> Capabilities:
    """`heaps`: (GB, device-local); `types`: (heap, flags)."""
    return Capabilities(
        index=index, name=name, kind=kind, vendor="-", driver=f"driver of {name}", driver_version=1, api=(1, 3, 0),
        features=frozenset(REQUIRED), extensions=(), subgroup=32, subgroup_min=32, subgroup_max=32, matrix_shapes=(),
        heaps=tuple(Heap(int(size * GB), local) for size, local in heaps),
        memory_types=tuple(MemoryType(i, heap, flags) for i, (heap, flags) in enumerate(types)),
        largest_allocation=4 * GB, shared_memory=32768, workgroup_invocations=1024, workgroup_count=(65535,) * 3,
        timestamp_ns=1.0, queue_family=0, cache_key="0",
    )  # fmt: skip


# A card whose memory the host sees through a window of 256 MB, and one of which it sees all.
SMALL_WINDOW = machine(
    "old card", "discrete", [(8, True), (32, False), (0.25, True)],
    [(1, 0), (0, DEVICE_LOCAL), (1, MAPPED), (1, MAPPED | HOST_CACHED), (2, DEVICE_LOCAL | MAPPED)],
)  # fmt: skip
ALL_MAPPED = machine(
    "new card", "discrete", [(24, True), (64, False)],
    [(0, DEVICE_LOCAL), (1, MAPPED), (1, MAPPED | HOST_CACHED), (0, DEVICE_LOCAL | MAPPED)], index=1,
)  # fmt: skip
# One memory, shown as two heaps (a 780M under RADV), and as one (lavapipe).
SHARED = machine(
    "laptop", "integrated", [(16, True), (8, False)],
    [(0, DEVICE_LOCAL), (0, DEVICE_LOCAL | MAPPED), (1, MAPPED), (0, DEVICE_LOCAL | MAPPED | HOST_CACHED),
     (1, MAPPED | HOST_CACHED)], index=2,
)  # fmt: skip
SOFTWARE = machine("llvmpipe", "software", [(2, True)], [(0, DEVICE_LOCAL | MAPPED | HOST_CACHED)], index=3)

# A Radeon 780M as RADV shows it, with 32 GB of memory, 0.5 of them carved out by the firmware and half the rest for the
# GPU (GTT): both are one memory, of which two thirds are called the device's. Each kind of memory is there once more
# with AMD's flags for uncached memory, which is ten times slower.
AMD_UNCACHED = 0xC0
_GTT, _LOCAL = 0, 1
_KINDS = [
    (_LOCAL, DEVICE_LOCAL),
    (_GTT, MAPPED),
    (_LOCAL, DEVICE_LOCAL | MAPPED),
    (_GTT, MAPPED | HOST_CACHED),
]
PHOENIX = replace(
    machine(
        "780M", "integrated", [(5.4, False), (10.8, True)],
        _KINDS + [(heap, flags | AMD_UNCACHED) for heap, flags in _KINDS], index=4,
    ),
    vendor="AMD", subgroup=64, subgroup_min=32, subgroup_max=64, shared_memory=65536,
    matrix_shapes=(MatrixShape(16, 16, 16, "f16", "f16", "f32"),),
)  # fmt: skip

"""What a device's memory gives at most: the limit that tokens a second are set beside."""

from __future__ import annotations

import ctypes
import mmap
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tandem.devices.cpu.device import CPUDevice
from tandem.devices.device import Device
from tandem.devices.vulkan.binding import ffi
from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.queue import TRANSFER_TOUCHES, TRANSFER_WRITES
from tandem.program.program import Program
from tandem.settings import read_settings

ENOUGH = 0.2  # seconds a measurement takes at least
REPEATS = 5
MOST_READ = 512 << 20  # bytes: more than caches hold
COPY = 256 << 20  # bytes of each of the two buffers of a GPU


def measure_bandwidth(device: Device, nbytes: int) -> tuple[float, str]:
    """(bytes a second, how it was measured), before a model is loaded. `nbytes` are read again and again, as a
    model's weights are: what stays in the caches between steps counts."""
    if isinstance(device, CPUDevice):
        return _host_reads(device.threads, nbytes), "reads"
    assert isinstance(device, VulkanDevice)
    if device.capabilities.kind == "software":
        return _host_reads(read_settings().threads, nbytes), "reads of the CPU"
    return copies(device), "a copy"


def _host_reads(threads: int, nbytes: int) -> float:
    """The best of some searches, by all threads together, for a byte that is not there."""
    share = min(nbytes, MOST_READ) // threads
    memory = mmap.mmap(-1, threads * share, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)  # as the weights' memory
    view = np.frombuffer(memory, np.uint8)
    view[:] = 1  # untouched pages are all one page, and in the caches
    search = ctypes.CDLL(None).memchr
    search.argtypes, search.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
    with ThreadPoolExecutor(threads) as pool:

        def read(passes: int) -> float:
            def part(i: int) -> None:
                for _ in range(passes):
                    search(view.ctypes.data + i * share, 0, share)

            begun = time.perf_counter()
            list(pool.map(part, range(threads)))
            return time.perf_counter() - begun

        passes = 1 + int(ENOUGH / read(1))
        seconds = min(read(passes) for _ in range(REPEATS))
    return passes * threads * share / seconds


def copies(device: VulkanDevice) -> float:
    """The best of some copies between two buffers: bytes read and bytes written."""
    buffers = []
    for name in ("from", "to"):
        device.allocate(name, COPY)
        buffers.append(device.arenas[name].locate(0)[0].buffer)
    region = ffi.new("VkBufferCopy[]", [(0, 0, COPY)])

    def copy(times: int) -> float:
        begun = time.perf_counter()
        with device.queue.once() as commands:
            for i in range(times):
                device.vk.CmdCopyBuffer(commands, buffers[i % 2], buffers[1 - i % 2], 1, region)
                device.queue.barrier(commands, TRANSFER_WRITES, TRANSFER_TOUCHES)
        return time.perf_counter() - begun

    times = 1 + int(ENOUGH / copy(1))
    seconds = min(copy(times) for _ in range(REPEATS))
    device.place(Program([], {}, {}))  # gives the buffers back
    return 2 * COPY * times / seconds

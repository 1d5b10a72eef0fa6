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
        return HostReads(device.threads, min(nbytes, MOST_READ)).best(), "reads"
    assert isinstance(device, VulkanDevice)
    if device.capabilities.kind == "software":
        return HostReads(read_settings().threads, min(nbytes, MOST_READ)).best(), "reads of the CPU"
    return copies(device), "a copy"


class HostReads:
    """Reads of `nbytes` by all threads together: each searches its share for a byte that is not there."""

    def __init__(self, threads: int, nbytes: int) -> None:
        self.threads, self.share = threads, nbytes // threads
        memory = mmap.mmap(-1, threads * self.share, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)  # as the weights' memory
        self._memory = np.frombuffer(memory, np.uint8)
        self._memory[:] = 1  # untouched pages are all one page, and in the caches
        self._search = ctypes.CDLL(None).memchr
        self._search.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        self._search.restype = ctypes.c_void_p

    def rate(self, nbytes: float) -> float:
        """Bytes a second, of reading at least `nbytes`."""
        passes = max(1, round(nbytes / (self.share * self.threads)))

        def read(i: int) -> None:
            for _ in range(passes):
                self._search(self._memory.ctypes.data + i * self.share, 0, self.share)

        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(lambda _: None, range(self.threads)))  # the threads are there
            begun = time.perf_counter()
            list(pool.map(read, range(self.threads)))
            return passes * self.share * self.threads / (time.perf_counter() - begun)

    def best(self) -> float:
        once = self.rate(0)
        return max(once, *(self.rate(ENOUGH * once) for _ in range(REPEATS)))


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

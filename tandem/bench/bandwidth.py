"""Measures the read bandwidth of a device's memory: the memory side of the roofline."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tandem.devices.cpu.device import CPUDevice
from tandem.devices.device import Device
from tandem.devices.split.device import SplitDevice
from tandem.devices.tensor_parallel.device import TensorParallelDevice
from tandem.devices.vulkan.binding import ffi
from tandem.devices.vulkan.capabilities import PUSH_BYTES
from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.pipelines import STAGE_COMPUTE
from tandem.devices.vulkan.queue import COMPUTE_READS_WRITES, COMPUTE_WRITES
from tandem.program.program import Program
from tandem.settings import read_settings

MIN_SECONDS = 0.2  # of a measurement
REPEATS = 5
MAX_HOST_READ = 512 << 20  # bytes: larger than the caches
GPU_READ = 1 << 30  # bytes
READ_BY_WORKGROUP = 256 * 8 * 16  # bytes that a workgroup of the kernel memory_read reads


def measure_bandwidth(device: Device, nbytes: int) -> tuple[float, str]:
    """(bytes per second, how it was measured). To be called before a model is loaded.

    It reads `nbytes` repeatedly, as steps read a model's weights, so cache hits between passes count.
    """
    if isinstance(device, SplitDevice | TensorParallelDevice):
        parts = device.devices if isinstance(device, SplitDevice) else [device.main]
        return _together(parts, nbytes), "reads of each, added up, but the host's memory once"
    if isinstance(device, CPUDevice):
        return HostReads(device.threads, min(nbytes, MAX_HOST_READ)).best(), "reads"
    assert isinstance(device, VulkanDevice)
    if device.capabilities.kind == "software":
        return _host_reads(nbytes), "reads of the CPU"
    # The larger size because short launches do not reach the full bandwidth, the smaller one because a small model may
    # stay in a large cache.
    sizes = {GPU_READ, min(GPU_READ, nbytes // READ_BY_WORKGROUP * READ_BY_WORKGROUP)} - {0}
    return max(device_reads(device, size) for size in sizes), "reads"


def _together(devices: Sequence[Device], nbytes: int) -> float:
    """The bandwidth of several devices together. Devices that share the host's memory count once."""
    rates = [(each.shares_memory, measure_bandwidth(each, nbytes)[0]) for each in devices]
    host = max(_host_reads(nbytes), *(rate for shares, rate in rates if shares), 0.0)
    return host + sum(rate for shares, rate in rates if not shares)


def _host_reads(nbytes: int) -> float:
    return HostReads(read_settings().threads, min(nbytes, MAX_HOST_READ)).best()


class HostReads:
    """Reads `nbytes` with all threads: each runs memchr over its share for a byte that does not occur."""

    def __init__(self, threads: int, nbytes: int) -> None:
        self.threads, self.share = threads, nbytes // threads
        memory = mmap.mmap(-1, threads * self.share, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)  # like the memory of the weights
        self._memory = np.frombuffer(memory, np.uint8)
        self._memory[:] = 1  # untouched pages would all map to one zero page, which stays in the cache
        self._search = ctypes.CDLL(None).memchr
        self._search.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        self._search.restype = ctypes.c_void_p

    def rate(self, nbytes: float) -> float:
        """Bytes a second, measured while reading at least `nbytes`."""
        passes = max(1, round(nbytes / (self.share * self.threads)))

        def read(i: int) -> None:
            for _ in range(passes):
                self._search(self._memory.ctypes.data + i * self.share, 0, self.share)

        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(lambda _: None, range(self.threads)))  # starts the threads
            begun = time.perf_counter()
            list(pool.map(read, range(self.threads)))
            return passes * self.share * self.threads / (time.perf_counter() - begun)

    def best(self) -> float:
        once = self.rate(0)
        return max(once, *(self.rate(MIN_SECONDS * once) for _ in range(REPEATS)))


def device_reads(device: VulkanDevice, nbytes: int) -> float:
    """The best rate in bytes per second of a kernel that only reads a buffer of zeros."""
    device.allocate_arena("read", nbytes)
    push = np.zeros(PUSH_BYTES // 8, np.uint64)
    push[:2] = device.arenas["read"].address(0), device.scratch.address
    pipeline = device.pipelines.get("memory_read")

    def read(times: int) -> float:
        begun = time.perf_counter()
        with device.queue.once() as commands:
            device.vk.CmdBindPipeline(commands, 1, pipeline)
            device.vk.CmdPushConstants(
                commands, device.pipelines.layout, STAGE_COMPUTE, 0, PUSH_BYTES, ffi.from_buffer(push)
            )
            for _ in range(times):
                device.vk.CmdDispatch(commands, nbytes // READ_BY_WORKGROUP, 1, 1)
                device.queue.barrier(commands, COMPUTE_WRITES, COMPUTE_READS_WRITES)
        return time.perf_counter() - begun

    times = 1 + int(MIN_SECONDS / min(read(1) for _ in range(REPEATS)))
    seconds = min(read(times) for _ in range(REPEATS))
    device.allocate(Program([], {}, {}))  # frees the buffer
    return nbytes * times / seconds

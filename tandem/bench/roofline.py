"""The roofline of a device: its peak bandwidth and operations, the share that a result reaches, and whether a result
above it must be wrong."""

from __future__ import annotations

import threading
import time

from tandem import native
from tandem.bench.bandwidth import measure_bandwidth
from tandem.bench.hardware import known_hardware, load_hardware
from tandem.bench.result import Limits
from tandem.devices.cpu.device import CPUDevice
from tandem.devices.device import Device
from tandem.devices.split.device import SplitDevice
from tandem.devices.tensor_parallel.device import TensorParallelDevice
from tandem.devices.vulkan.device import VulkanDevice
from tandem.settings import read_settings

MAX_SHARE = 1.1  # of a limit: above it, the result or the limit was measured wrongly
LOOPS, REPEATS = 1_000_000, 5


def measure_limits(device: Device, nbytes: int) -> Limits:
    """Measures the limits for a model of `nbytes`. To be called before it is loaded: it uses a GPU's memory."""
    read, how = measure_bandwidth(device, nbytes)
    ops, source = _arithmetic(device)
    return {"bytes_per_s": read, "bytes_from": how, "ops_per_s": ops, "ops_from": source}


def raised(limits: Limits, device: Device, nbytes: int) -> Limits:
    """The limits after another measurement, on the CPU: a limit is the best rate seen, and other processes or virtual
    machines may have slowed the first measurement. A GPU is not measured again, for its memory holds the model."""
    if not computes_on_cpu(device):
        return limits
    again = measure_limits(device, nbytes)
    return {
        **limits,
        "bytes_per_s": max(limits["bytes_per_s"], again["bytes_per_s"]),
        "ops_per_s": max(filter(None, (limits["ops_per_s"], again["ops_per_s"])), default=None),
    }


def share(bytes_per_s: float, ops_per_s: float, limits: Limits) -> tuple[float, str]:
    """The share of the nearer limit that is reached, and the name of that limit."""
    memory = bytes_per_s / limits["bytes_per_s"], "memory"
    return max(memory, (ops_per_s / limits["ops_per_s"], "arithmetic")) if limits["ops_per_s"] else memory


def impossible(bytes_per_s: float, ops_per_s: float, limits: Limits) -> str:
    """Why a result cannot be right; "" if it can."""
    of, bound = share(bytes_per_s, ops_per_s, limits)
    if of <= MAX_SHARE:
        return ""
    most = limits["bytes_per_s"] if bound == "memory" else limits["ops_per_s"] or 0.0
    rate, unit = (bytes_per_s / 1e9, "GB/s") if bound == "memory" else (ops_per_s / 1e12, "TOP/s")
    return (
        f"{rate:,.4g} {unit} is above the roofline of {most / (1e9 if bound == 'memory' else 1e12):,.4g} {unit} "
        f"({bound}): the clock, the count or the limit is wrong"
    )


def host_ops(threads: int) -> float:
    """int8 operations per second of `threads` threads together; 0: not known for this instruction set. Measured by the
    processor time of each thread, so that other processes do not lower the limit."""
    peak, isa = native.load().tandem_peak, native.best_isa().encode()
    rates = [[0.0] * threads for _ in range(REPEATS)]

    def work(i: int) -> None:
        for repeat in rates:
            begun = time.thread_time()
            done = peak(isa, LOOPS)
            repeat[i] = done / max(time.thread_time() - begun, 1e-9)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    return max(map(sum, rates))


def _arithmetic(device: Device) -> tuple[float | None, str | None]:
    if isinstance(device, SplitDevice):
        each = [_arithmetic(part)[0] for part in device.devices if not computes_on_cpu(part)]
        if len(each) < len(device.devices):
            each.append(host_ops(read_settings().threads))
        return (
            (sum(filter(None, each)), "the sum of the devices, the CPU once") if all(each) else (None, None)
        )
    if isinstance(device, TensorParallelDevice):
        return None, None  # the accelerator's rate is not known
    if computes_on_cpu(device):
        threads = device.threads if isinstance(device, CPUDevice) else read_settings().threads
        ops = host_ops(threads)
        return (ops, f"int8 dot products of {native.best_isa()}") if ops else (None, None)
    for known in map(load_hardware, known_hardware()):
        if known.kind != "cpu" and known.title.partition(" of ")[0] in device.describe():
            return known.peak_top_s * 1e12, f"{known.name} in tandem/bench/hardware.toml"
    return None, None


def computes_on_cpu(device: Device) -> bool:
    """Whether the device, or the main one of several, is the CPU or a software renderer."""
    device = device.main if isinstance(device, TensorParallelDevice) else device
    return isinstance(device, CPUDevice) or (
        isinstance(device, VulkanDevice) and device.capabilities.kind == "software"
    )

"""Chooses how many layers each device gets, from measured speed and free memory."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence

import numpy as np

from tandem.devices.device import Device
from tandem.devices.split.cut import OWN, cut
from tandem.errors import DoesNotFitError
from tandem.kernels.abi import COUNTS
from tandem.program.program import Launch, Program, Tensor

MIN_MEASURED_BYTES = 64 << 20  # weight bytes that a measurement reads: more than most caches hold
REPEATS, LONG = 3, 0.3  # maximum steps and seconds of a measurement


def balance(program: Program, starts: Sequence[int], devices: Sequence[Device]) -> list[int]:
    """Number of layers for each device. With several sequences, minimises the slowest stage (steps overlap); with one,
    the sum of all stages."""
    layers = [program.launches[begin:end] for begin, end in zip(starts, [*starts[1:], None], strict=True)]
    rows, most = program.max_counts["rows"], program.max_counts["tokens"]
    tokens = max(1, min(rows // len(devices), most))
    work = [_bytes(layer, tokens) for layer in layers]
    own, common = _memory(program, layers)
    free = [device.free_memory() for device in devices]
    rates = [_rate(device, program, starts, work, tokens) for device in devices]
    for nbytes in zip(*free, strict=True):  # first each device's own memory, then any
        room = [n - common for n in nbytes]
        counts = partition(work, rates, own, room, max if rows > 1 else operator.add)
        if counts:
            return list(counts)
    raise DoesNotFitError(
        f"the layers, {sum(own) / 1e9:.2f} GB in all, do not fit: "
        + ", ".join(f"{d.name} has {n / 1e9:.2f} GB" for d, (_, n) in zip(devices, free, strict=True))
        + f" free, {common / 1e9:.2f} GB of it needed by each: use a smaller context, batch or model"
    )


def partition(
    work: Sequence[float],
    rates: Sequence[float],
    sizes: Sequence[float],
    room: Sequence[float],
    join: Callable[[float, float], float],
) -> tuple[int, ...] | None:
    """Number of consecutive items for each worker, at least one, that minimises the time. `join` combines the times of
    two workers (max or sum). None: the items do not fit."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # items assigned -> (time, counts)
    for rate, most in zip(rates, room, strict=True):
        taken: dict[int, tuple[float, tuple[int, ...]]] = {}
        for begin, (before, counts) in best.items():
            for end in range(begin + 1, len(work) + 1):
                if sum(sizes[begin:end]) > most:
                    break
                option = join(before, sum(work[begin:end]) / rate), (*counts, end - begin)
                taken[end] = min(option, taken.get(end, option))
        best = taken
    return best[len(work)][1] if len(work) in best else None


def _bytes(launches: Sequence[Launch], tokens: int) -> float:
    counts = dict.fromkeys(COUNTS, tokens)
    return sum(launch.cost(counts).bytes for launch in launches)


def _rate(
    device: Device, program: Program, starts: Sequence[int], work: Sequence[float], tokens: int
) -> float:
    """Measures the bytes per second of a step of only the first layers, with `tokens` tokens."""
    count = next((n for n in range(1, len(work)) if sum(work[:n]) >= MIN_MEASURED_BYTES), len(work))
    part = cut(program, starts, [count])[0]
    device.allocate(part.program)
    for tensor in part.tensor_map.values():
        if tensor.arena == "weights":  # unwritten pages map to one zero page, which stays in cache
            device.write(tensor, np.zeros(tensor.nbytes, np.uint8))
    device.memory("step")[: 4 * len(COUNTS)].view(np.int32)[:] = tokens
    recording = device.record(part.program)
    recording.replay()  # a GPU compiles its pipelines here
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) < LONG:
        begun = time.perf_counter()
        recording.replay()
        seconds.append(time.perf_counter() - begun)
    device.allocate(Program([], {}, {}))  # frees the memory
    return sum(work[:count]) / min(seconds)


def _memory(program: Program, layers: Sequence[Sequence[Launch]]) -> tuple[list[int], int]:
    """Returns the bytes of each layer, and bytes that every device needs: activations, StepInputs, tensors of several
    layers."""
    users: dict[Tensor, set[int]] = {}
    for i, launches in enumerate(layers):
        for launch in launches:
            for tensor in launch.buffers.values():
                if tensor is not None and tensor.arena in OWN:
                    users.setdefault(tensor.root, set()).add(i)
    own = [0] * len(layers)
    common = sum(nbytes for arena, nbytes in program.arena_bytes.items() if arena not in OWN)
    for tensor, used_by in users.items():
        if len(used_by) == 1:
            own[min(used_by)] += tensor.nbytes
        else:
            common += tensor.nbytes
    return own, common

"""How many layers each device gets, by the time that it takes for some of them and the memory it has."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence

import numpy as np

from tandem.devices.device import Device
from tandem.devices.split.cut import OWN, cut
from tandem.errors import DoesNotFitError
from tandem.kernels.kernel import COUNTS
from tandem.program.program import Launch, Program, Tensor

ENOUGH = 64 << 20  # bytes of weights that a measurement reads: more than most caches hold
REPEATS, LONG = 3, 0.3  # steps of a measurement, or seconds after which it ends


def balance(program: Program, starts: Sequence[int], devices: Sequence[Device]) -> list[int]:
    """Layers for each device. Where several sequences are served, the slowest part of a step takes as little as it can;
    a sequence alone has each device wait for the others, so that all parts together do."""
    layers = [program.launches[begin:end] for begin, end in zip(starts, [*starts[1:], None], strict=True)]
    rows, most = program.max_counts["rows"], program.max_counts["tokens"]
    tokens = max(1, min(rows // len(devices), most))
    work = [_bytes(layer, tokens) for layer in layers]
    own, common = _memory(program, layers)
    free = [device.free_memory() for device in devices]
    rates = [_rate(device, program, starts, work, tokens) for device in devices]
    for nbytes in zip(*free, strict=True):  # of the devices' own speed; if that is not enough, of any
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
    work: Sequence[float], rates: Sequence[float], sizes: Sequence[float], room: Sequence[float],
    join: Callable[[float, float], float],
) -> tuple[int, ...] | None:  # fmt: skip
    """How many items in a row each worker takes, one at least, for the least time: `join` makes one of two workers'
    times. None if there is not room for them."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # items that are taken -> time, counts
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
    """Bytes a second in a step of the first layers alone, with so many tokens."""
    count = next((n for n in range(1, len(work)) if sum(work[:n]) >= ENOUGH), len(work))
    part = cut(program, starts, [count])[0]
    device.place(part.program)
    for tensor in part.moved.values():
        if tensor.arena == "weights":  # pages that were never written are all one page, and in the caches
            device.write(tensor, np.zeros(tensor.nbytes, np.uint8))
    device.memory("step")[: 4 * len(COUNTS)].view(np.int32)[:] = tokens
    recording = device.record(part.program)
    recording.replay()  # a GPU compiles what is new
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) < LONG:
        begun = time.perf_counter()
        recording.replay()
        seconds.append(time.perf_counter() - begun)
    device.place(Program([], {}, {}))  # gives the memory back
    return sum(work[:count]) / min(seconds)


def _memory(program: Program, layers: Sequence[Sequence[Launch]]) -> tuple[list[int], int]:
    """Bytes that each layer needs, and those that every device does: activations, StepInputs and what layers share."""
    users: dict[Tensor, set[int]] = {}
    for i, launches in enumerate(layers):
        for launch in launches:
            for tensor in launch.buffers.values():
                if tensor is not None and tensor.arena in OWN:
                    users.setdefault(tensor.root, set()).add(i)
    own = [0] * len(layers)
    common = sum(nbytes for arena, nbytes in program.arena_bytes.items() if arena not in OWN)
    for tensor, found in users.items():
        if len(found) == 1:
            own[min(found)] += tensor.nbytes
        else:
            common += tensor.nbytes
    return own, common

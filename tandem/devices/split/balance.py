"""How many layers each device gets: as many as it computes in the time that the others take for theirs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tandem.devices.device import Device
from tandem.devices.split.cut import OWN, cut
from tandem.errors import DoesNotFitError
from tandem.kernels.kernel import COUNTS
from tandem.program.program import Launch, Program, Tensor

ENOUGH = 64 << 20  # bytes of weights that a measurement reads: more than most caches hold
REPEATS, LONG = 3, 0.3  # steps of a measurement, or seconds after which it ends


def balance(program: Program, starts: Sequence[int], devices: Sequence[Device]) -> list[int]:
    """Layers for each device, so that the slowest part of a step takes as little as it can, within their memory."""
    layers = [program.launches[begin:end] for begin, end in zip(starts, [*starts[1:], None], strict=True)]
    tokens = max(1, min(program.max_counts["rows"] // len(devices), program.max_counts["tokens"]))
    work = [_bytes(layer, tokens) for layer in layers]
    own, common = _memory(program, layers)
    free = [device.free_memory()[1] for device in devices]
    rates = [_rate(device, program, starts, work, tokens) for device in devices]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # layers placed -> slowest part, counts
    for rate, most in zip(rates, free, strict=True):
        placed: dict[int, tuple[float, tuple[int, ...]]] = {}
        for begin, (slowest, counts) in best.items():
            for end in range(begin + 1, len(layers) + 1):
                if common + sum(own[begin:end]) > most:
                    break
                option = max(slowest, sum(work[begin:end]) / rate), (*counts, end - begin)
                placed[end] = min(option, placed.get(end, option))
        best = placed
    if len(layers) not in best:
        raise DoesNotFitError(
            f"the layers, {sum(own) / 1e9:.2f} GB in all, do not fit: "
            + ", ".join(f"{d.name} has {n / 1e9:.2f} GB" for d, n in zip(devices, free, strict=True))
            + f" free, {common / 1e9:.2f} GB of it needed by each: use a smaller context, batch or model"
        )
    return list(best[len(layers)][1])


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

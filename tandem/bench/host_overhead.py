"""Measures the host overhead of a step, and how long the device is idle between steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tandem.engine.engine import Engine
from tandem.engine.params import SamplingParams

WARM_UP = 8  # steps: recordings are made, caches filled


@dataclass(frozen=True)
class HostOverhead:
    """Microseconds a step, averaged over `steps` decode steps."""

    steps: int
    host_us: float  # of this thread, without the calls that submit a step to the device or wait for it
    submit_us: float  # of the driver call that submits a step
    step_us: float  # wall time
    idle: float | None  # share of the time that the device is idle, by its timestamps; None: it has none


def measure_host_overhead(
    engine: Engine, *, batch: int = 1, steps: int = 200, depth: int = 16
) -> HostOverhead:
    """Decodes `steps` tokens in each of `batch` sequences."""
    params = SamplingParams(max_tokens=steps + WARM_UP + 4, ignore_eos=True)
    for i in range(batch):
        engine.submit([1 + i] * depth, params)
    with ExitStack() as undo:
        submits = _submits(engine.device, undo)
        watches = [
            _Watch(step_slot.recording, engine.device.step_slots == 1, undo)
            for step_slot in engine.step_slots
        ]
        for _ in range(WARM_UP):
            engine.step()
        for watch in watches:
            watch.clear()
        submits.clear()
        wall, thread = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            engine.step()
        wall, thread = time.perf_counter() - wall, time.thread_time() - thread
        for sequence in list(engine.scheduler.running):
            engine.cancel(sequence)
        engine.step()
    submit = sum(submits)
    host = thread - sum(watch.seconds for watch in watches) - submit
    spans = sorted(span for watch in watches for span in watch.spans)
    return HostOverhead(
        steps, host / steps * 1e6, submit / steps * 1e6, wall / steps * 1e6, _idle_share(spans)
    )


def _submits(device: Any, undo: ExitStack) -> list[float]:
    """A list to which the seconds of each submit call of this thread are appended from now on."""
    seconds: list[float] = []
    if not hasattr(device, "queue"):
        return seconds
    vk = device.queue.vk
    call = vk.QueueSubmit

    def timed(*args: Any) -> Any:
        begun = time.thread_time()
        result = call(*args)
        seconds.append(time.thread_time() - begun)
        return result

    vk.QueueSubmit = timed
    undo.callback(setattr, vk, "QueueSubmit", call)
    return seconds


class _Watch:
    """Measures the calls of a recording: seconds of this thread, and spans on the device."""

    def __init__(self, recording: Any, synchronous: bool, undo: ExitStack) -> None:
        self.recording, self.on_device = recording, hasattr(recording, "timed")
        if self.on_device:
            undo.enter_context(recording.timed())
        for name in ("finish", "start") if synchronous else ("finish",):
            setattr(recording, name, self._timed(getattr(recording, name), name == "finish"))
            undo.callback(delattr, recording, name)
        self.clear()

    def clear(self) -> None:
        self.seconds, self.spans = 0.0, list[tuple[float, float]]()

    def _timed(self, call: Callable[[], None], finish: bool) -> Callable[[], None]:
        def timed() -> None:
            begun = time.thread_time()
            call()
            if finish and self.on_device:
                self.spans.append(self.recording.times())
            self.seconds += time.thread_time() - begun

        return timed


def _idle_share(spans: list[tuple[float, float]]) -> float | None:
    if len(spans) < 2:
        return None
    idle = sum(max(0.0, begin - end) for (_, end), (begin, _) in pairwise(spans))
    return idle / (spans[-1][1] - spans[0][0])

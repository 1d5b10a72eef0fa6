"""What a step costs the host, and how long the device waits for it between steps."""

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
class Steady:
    steps: int
    host_us: float  # of this thread a step, without the calls that wait for the device or hand it the step
    submit_us: float  # the driver's, to hand it over
    step_us: float
    idle: float | None  # share of the time without a step on the device, by its timestamps; None: it has none


def steady(engine: Engine, *, batch: int = 1, steps: int = 200, depth: int = 16) -> Steady:
    """Decodes `steps` tokens of each of `batch` sequences."""
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
    return Steady(steps, host / steps * 1e6, submit / steps * 1e6, wall / steps * 1e6, _idle_share(spans))


def _submits(device: Any, undo: ExitStack) -> list[float]:
    """Seconds of this thread in each call that hands work to a driver, from now on."""
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
    """Times what a recording's calls take of this thread, and on the device."""

    def __init__(self, recording: Any, synchronous: bool, undo: ExitStack) -> None:
        self.recording, self.on_device = recording, hasattr(recording, "watched")
        if self.on_device:
            undo.enter_context(recording.watched())
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

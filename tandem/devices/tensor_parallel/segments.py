"""Runs in-flight steps on the main device, one segment at a time.

A segment collects the accelerators' results of the last partitioned launch, runs the launches up to the next
partitioned one, submits the accelerators' partitions of it, and computes the main device's own. Then the step waits
for the accelerators, and the main device is free for a segment of the next step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Event, Thread

from tandem.devices.tensor_parallel.accelerator import MAX_RECENT_TIMES, PartitionResult


@dataclass(eq=False)
class SegmentedStep:
    step_slot: int
    tokens: int
    kind: str  # "off" or "alone": main device only; "measure": measure, then decide; "together": partitioned
    begun: float = 0.0
    segment: int = 0  # the next segment to run
    # (worker, first unit, number of units, future result)
    waiting: list[tuple[int, int, int, Future[PartitionResult]]] = field(default_factory=list)
    rest: float = 0.0  # seconds in launches that are not partitioned
    first: bool = False  # records new partitions on the way, so its times do not count
    error: BaseException | None = None
    done: Event = field(default_factory=Event)


class SegmentRunner:
    """`run(step)` runs a step's next segment and returns whether it was the last. `behind`: a step may follow the
    previous step one segment behind; otherwise it waits until the previous step is done."""

    def __init__(self, run: Callable[[SegmentedStep], bool], *, behind: bool) -> None:
        # When the main device was busy.
        self.times: deque[tuple[float, float]] = deque(maxlen=MAX_RECENT_TIMES)
        self._run, self._behind = run, behind
        self._steps: list[SegmentedStep] = []  # oldest first
        self._changed, self._open = Condition(), True
        self._thread = Thread(target=self._work, name="tandem-segments", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        return not self._steps

    def add(self, step: SegmentedStep) -> None:
        with self._changed:
            self._steps.append(step)
            self._changed.notify_all()

    def withdraw(self, step: SegmentedStep) -> None:
        """Releases the waiter of a step that may not have been added."""
        with self._changed:
            if step not in self._steps:
                step.done.set()
            self._changed.notify_all()  # `add` may have been interrupted before its notify

    def stop(self) -> None:
        """Stops after the steps in flight."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        self._thread.join()

    def wake(self, _: object = None) -> None:
        with self._changed:
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while (step := self._ready()) is None:
                    if not self._open and not self._steps:
                        return
                    self._changed.wait()
            begun = time.perf_counter()
            try:
                last = self._run(step)
            except BaseException as error:  # raised in `finish`
                step.error, last = error, True
            self.times.append((begun, time.perf_counter()))
            if last:
                with self._changed:
                    self._steps.remove(step)
                step.done.set()
            else:
                for *_, future in step.waiting:
                    future.add_done_callback(self.wake)

    def _ready(self) -> SegmentedStep | None:
        """Returns the oldest step whose results have arrived. Steps stay in order: later tokens attend to earlier
        ones."""
        before: SegmentedStep | None = None
        for step in self._steps:
            follows = before is None or (
                self._behind and before.kind == step.kind == "together" and before.segment > step.segment
            )
            if follows and all(future.done() for *_, future in step.waiting):
                return step
            before = step
        return None

"""Steps on their way through the main device and its helpers, in legs.

A leg runs on the main device: it gathers what helpers have answered, runs the launches up to the next divided one,
gives helpers their shares, and does its own. Then the step waits, and the main device is free for a leg of the step
behind it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Event, Thread

from tandem.devices.hybrid.accelerator import KEPT, Answer


@dataclass(eq=False)
class Trip:
    step_slot: int
    tokens: int
    kind: str  # off or alone: on the main device; measure: then decide; together
    begun: float = 0.0
    leg: int = 0  # the next one
    waiting: list[tuple[int, int, int, Future[Answer]]] = field(
        default_factory=list
    )  # (worker, first, count, answer)
    rest: float = 0.0  # seconds of what is not divided
    first: bool = False  # with new shares, which are recorded on the way: its times tell nothing
    error: BaseException | None = None
    done: Event = field(default_factory=Event)


class Flow:
    """`run(trip)` does a trip's next leg and says whether it was the last. `behind`: a step may follow another one leg
    behind it; else it waits until that is done."""

    def __init__(self, run: Callable[[Trip], bool], *, behind: bool) -> None:
        self.times: deque[tuple[float, float]] = deque(maxlen=KEPT)  # when the main device was at work
        self._run, self._behind = run, behind
        self._trips: list[Trip] = []  # oldest first
        self._changed, self._open = Condition(), True
        self._thread = Thread(target=self._work, name="tandem hybrid", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        return not self._trips

    def add(self, trip: Trip) -> None:
        with self._changed:
            self._trips.append(trip)
            self._changed.notify_all()

    def withdraw(self, trip: Trip) -> None:
        """Of a trip that may have been added or not: it has not begun, or somebody waits until it is done."""
        with self._changed:
            if trip not in self._trips:
                trip.done.set()
            self._changed.notify_all()  # it may have been added without a word

    def stop(self) -> None:
        """After the trips that are on their way."""
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
                while (trip := self._ready()) is None:
                    if not self._open and not self._trips:
                        return
                    self._changed.wait()
            begun = time.perf_counter()
            try:
                last = self._run(trip)
            except BaseException as error:  # whoever waits for the step hears of it
                trip.error, last = error, True
            self.times.append((begun, time.perf_counter()))
            if last:
                with self._changed:
                    self._trips.remove(trip)
                trip.done.set()
            else:
                for *_, answer in trip.waiting:
                    answer.add_done_callback(self.wake)

    def _ready(self) -> Trip | None:
        """The oldest trip that can go on. Later tokens look back at earlier ones, so none overtakes another."""
        before: Trip | None = None
        for trip in self._trips:
            follows = before is None or (
                self._behind and before.kind == trip.kind == "together" and before.leg > trip.leg
            )
            if follows and all(answer.done() for *_, answer in trip.waiting):
                return trip
            before = trip
        return None

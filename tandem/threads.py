"""Runs functions in threads, for loading (`concurrent.futures` does the same, but its import takes 4 ms), and
throttles threads that work beside the engine's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from threading import Lock, Thread, local
from typing import Any, Generic, TypeVar

from tandem.errors import OutOfMemoryError

T = TypeVar("T")
WORK_SECONDS = 0.002  # s of CPU time between two sleeps
CREDIT_SECONDS = 0.005  # s of CPU time that a thread may use at once after it did nothing for long


class CPUBudget(local):
    """The CPU time that this thread may use: a fraction (`share`) of real time. Unused time is saved, up to
    CREDIT_SECONDS."""

    share = 1.0
    credit = 0.0  # s of CPU time that it may use without a sleep
    worked = 0.0  # its CPU time at `since`
    since = 0.0


_budget = CPUBudget()


def set_share(share: float) -> None:
    """Gives this thread a share of the time: from now on, `throttle` sleeps when it has used more."""
    _budget.share, _budget.credit = share, CREDIT_SECONDS
    _budget.worked, _budget.since = time.thread_time(), time.monotonic()


def share() -> float:
    """Returns the part of the time that this thread may use as CPU time."""
    return _budget.share


def throttle(least: float = WORK_SECONDS) -> None:
    """Sleeps when the thread has used more than its share of CPU time; looks only after `least` seconds of it. The
    loops of long work call it: a thread that works for several steps takes a core and the GIL from the engine."""
    if _budget.share == 1.0 or (worked := time.thread_time() - _budget.worked) <= least:
        return
    earned = _budget.share * (time.monotonic() - _budget.since)
    _budget.credit = min(_budget.credit + earned, CREDIT_SECONDS) - worked
    _budget.worked, _budget.since = _budget.worked + worked, time.monotonic()
    if _budget.credit < 0:
        time.sleep(-_budget.credit / _budget.share)


def throttled(items: Iterable[T]) -> Iterator[T]:
    """Yields the items, with a call of `throttle` after each."""
    for item in items:
        yield item
        throttle()


class BackgroundCall(Generic[T]):
    """Calls a function in its own thread (a future)."""

    def __init__(self, function: Callable[..., T], *args: Any) -> None:
        self._returned: list[T] = []
        self._raised: list[BaseException] = []
        self._thread = Thread(target=self._run, args=(function, *args))
        try:
            self._thread.start()
        except RuntimeError:  # "can't start new thread"
            raise OutOfMemoryError from None

    def _run(self, function: Callable[..., T], *args: Any) -> None:
        try:
            self._returned.append(function(*args))
        except BaseException as error:
            self._raised.append(error)

    def join(self) -> None:
        """Waits for the call to end."""
        self._thread.join()

    def result(self) -> T:
        """Waits for the call to end; returns its result or raises its exception."""
        self.join()
        for error in self._raised:
            raise error
        return self._returned[0]


def each(function: Callable[[T], object], items: Iterable[T], threads: int) -> None:
    """Calls a function for each item in `threads` threads, the calling one included. Stops at the first error."""
    lock, rest, failed = Lock(), iter(items), False
    end: Any = object()

    def work() -> None:
        nonlocal failed
        try:
            while not failed:
                with lock:
                    item = next(rest, end)
                if item is end:
                    return
                function(item)
        except BaseException:
            failed = True
            raise

    others: list[BackgroundCall[None]] = []
    try:
        for _ in range(threads - 1):
            others.append(BackgroundCall(work))
        work()
    except BaseException:
        failed = True
        raise
    finally:
        for other in others:
            other.result()

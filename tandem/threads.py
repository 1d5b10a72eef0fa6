"""Runs functions in threads, for loading (`concurrent.futures` does the same, but its import takes 4 ms), and lets
threads rest that work beside the engine's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from threading import Lock, Thread, local
from typing import Any, Generic, TypeVar

from tandem.errors import OutOfMemoryError

T = TypeVar("T")
WORK_SECONDS = 0.002  # of processor time between two rests


class Resting(local):
    """How long this thread rests: `rest` times as long as it worked."""

    rest = 0.0
    rested = 0.0  # its processor time when it last rested


_resting = Resting()


def set_rest(rest: float) -> None:
    """Makes `breathe` rest from now on, in this thread."""
    _resting.rest, _resting.rested = rest, time.thread_time()


def breathe(least: float = WORK_SECONDS) -> None:
    """Rests if this thread rests at all and has worked for `least` seconds since the last time. The loops of long work
    call it: a thread that works for as long as several steps takes a processor and Python's lock from the engine."""
    if _resting.rest and (worked := time.thread_time() - _resting.rested) > least:
        time.sleep(_resting.rest * worked)
        _resting.rested = time.thread_time()


def breathing(items: Iterable[T]) -> Iterator[T]:
    for item in items:
        yield item
        breathe()


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

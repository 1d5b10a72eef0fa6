"""Threads that help the main one to load. `concurrent.futures` would do, but its import takes 4 ms of every start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Beside(Generic[T]):
    """A call in a thread of its own."""

    def __init__(self, function: Callable[..., T], *args: Any) -> None:
        self._returned: list[T] = []
        self._raised: list[BaseException] = []
        self._thread = Thread(target=self._run, args=(function, *args))
        self._thread.start()

    def _run(self, function: Callable[..., T], *args: Any) -> None:
        try:
            self._returned.append(function(*args))
        except BaseException as error:
            self._raised.append(error)

    def join(self) -> None:
        """Waits for its end."""
        self._thread.join()

    def result(self) -> T:
        """Waits for its end; returns or raises what it did."""
        self.join()
        for error in self._raised:
            raise error
        return self._returned[0]


def each(function: Callable[[T], object], items: Iterable[T], threads: int) -> None:
    """Calls a function for each item, in so many threads of which this is one. After an error no more are begun."""
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

    others = [Beside(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        for other in others:
            other.result()

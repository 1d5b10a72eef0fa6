"""Prepares requests in threads: parsing, chat templates, tokenizing. The event loop goes on sending tokens meanwhile.

Python threads take turns, and the engine needs the processors. So one thread prepares all small requests, one those of
medium size, and one the large ones, each one request after the other: a request does not wait for larger ones, and the
engine's thread has few rivals however many requests there are. All but the thread of small requests rest after 50 ms
of work (`breathe`). Their priority is not lower, because while they wait for a processor they may hold the GIL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from threading import Barrier
from typing import ParamSpec, TypeVar

from tandem.errors import OutOfMemoryError
from tandem.threads import breathe, set_share

P = ParamSpec("P")
T = TypeVar("T")
THREADS = 8  # for what is no preparation: loading, and reading files
SMALL, MEDIUM = 4 << 10, 64 << 10  # bytes of a body at most
SHARE = 1 / 8  # of the time that a thread for medium or large requests works, when it has much to do


class Preparer:
    """A thread that makes calls one after the other, and works for `share` of the time at most."""

    def __init__(self, name: str, share: float) -> None:
        self._executor = ThreadPoolExecutor(1, name, set_share, (share,))

    def start(self) -> None:
        self._executor.submit(bool)

    async def run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, _after_a_rest, call)


def _after_a_rest(call: Callable[[], T]) -> T:
    breathe(0.0)
    return call()


_small, _medium, _large = (
    Preparer("tandem-small", 1),
    Preparer("tandem-medium", SHARE),
    Preparer("tandem-large", SHARE),
)
_preparer: ContextVar[Preparer] = ContextVar(
    "preparer", default=_small
)  # of the request that this task serves


def start_threads() -> None:
    """Starts the threads for this event loop's requests: later there may be no memory for a thread's start."""
    threads = ThreadPoolExecutor(THREADS, "tandem-request")
    all_started = Barrier(THREADS)  # or the first would take the next one's work
    try:
        for preparer in (_small, _medium, _large):
            preparer.start()
        for _ in range(THREADS):
            threads.submit(all_started.wait)
    except RuntimeError:  # "can't start new thread"
        all_started.abort()
        raise OutOfMemoryError from None
    asyncio.get_running_loop().set_default_executor(threads)


def set_size(size: int) -> None:
    """Says how many bytes the body of this task's request has."""
    _preparer.set(_small if size <= SMALL else _medium if size <= MEDIUM else _large)


async def prepare(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `call` in the thread for requests of this size."""
    return await _preparer.get().run(partial(call, *args, **kwargs))


async def translate(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `call`, which takes microseconds for a small request: in a thread only for a larger one."""
    return call(*args, **kwargs) if _preparer.get() is _small else await prepare(call, *args, **kwargs)


async def write(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `call`, which writes a large response to a request of any size."""
    return await _large.run(partial(call, *args, **kwargs))

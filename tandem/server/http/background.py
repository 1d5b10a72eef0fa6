"""Prepares requests in threads: parsing, chat templates, tokenizing. The event loop goes on sending tokens meanwhile.

Python threads share the GIL, and the engine needs the CPU cores. So there are only three threads: for small, medium and
large requests. Each prepares one request after the other. A request does not wait for larger ones, and the engine's
thread competes with few others, however many requests there are. The threads for medium and large requests are
throttled after 5 ms of work (tandem/threads.py). Their priority is not lower: a thread of low priority that waits for
a core may hold the GIL.
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
from tandem.threads import set_share, throttle

P = ParamSpec("P")
T = TypeVar("T")
THREADS = 8  # threads for all other work: loading, and reading files
SMALL, MEDIUM = 4 << 10, 64 << 10  # maximum bytes of a body in each class
SHARE = 1 / 8  # part of the time that a thread for medium or large requests may use as CPU time


class WorkerThread:
    """A thread that makes calls one after the other, and uses `share` of the time at most as CPU time."""

    def __init__(self, name: str, share: float) -> None:
        self._executor = ThreadPoolExecutor(1, name, set_share, (share,))

    def start(self) -> None:
        self._executor.submit(bool)

    async def run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, _throttled_call, call)


def _throttled_call(call: Callable[[], T]) -> T:
    throttle(0.0)
    return call()


_small, _medium, _large = (
    WorkerThread("tandem-small", 1),
    WorkerThread("tandem-medium", SHARE),
    WorkerThread("tandem-large", SHARE),
)
# The thread for the request that this task serves.
_thread: ContextVar[WorkerThread] = ContextVar("thread", default=_small)


def start_threads() -> None:
    """Starts the threads for this event loop's requests: later there may be no memory for a thread's start."""
    threads = ThreadPoolExecutor(THREADS, "tandem-request")
    all_started = Barrier(THREADS)  # otherwise the first thread could run all of these calls
    try:
        for thread in (_small, _medium, _large):
            thread.start()
        for _ in range(THREADS):
            threads.submit(all_started.wait)
    except RuntimeError:  # "can't start new thread"
        all_started.abort()
        raise OutOfMemoryError from None
    asyncio.get_running_loop().set_default_executor(threads)


def set_size(size: int) -> None:
    """Says how many bytes the body of this task's request has."""
    _thread.set(_small if size <= SMALL else _medium if size <= MEDIUM else _large)


def add_stored(size: int) -> None:
    """Says how many stored bytes this task's request prepares beside its body."""
    if size > MEDIUM or (size > SMALL and _thread.get() is _small):
        set_size(size)


async def run_in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `call` in the thread for requests of this size."""
    return await _thread.get().run(partial(call, *args, **kwargs))


async def run_inline_if_small(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `call` in the event loop for a small request, for which it takes microseconds; else in the thread for
    requests of this size."""
    return call(*args, **kwargs) if _thread.get() is _small else await run_in_thread(call, *args, **kwargs)


async def run_in_large_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `call`, such as writing a large response, in the thread for large requests, whatever this request's size."""
    return await _large.run(partial(call, *args, **kwargs))

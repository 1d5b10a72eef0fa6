"""Prepares requests in threads: parsing, chat templates, tokenizing. The event loop goes on sending tokens meanwhile.

Python threads take turns. So large requests have one thread for all of them, which prepares one at a time: they wait
for each other, while small requests and the engine's thread find at most one rival. Its priority is not lower, because
while it waits for a processor it may hold the GIL.
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

P = ParamSpec("P")
T = TypeVar("T")
THREADS = 8  # for requests that are not large, and for loading
LARGE = 64 << 10  # bytes of a body; preparing a smaller one takes milliseconds

_is_large: ContextVar[bool] = ContextVar("is_large", default=False)  # of the request that this task serves
_large_requests = ThreadPoolExecutor(1, "tandem-large")


def start_threads() -> None:
    """Starts the threads that prepare this event loop's requests: later there may be no memory for a thread's start."""
    threads = ThreadPoolExecutor(THREADS, "tandem-request")
    all_started = Barrier(THREADS)  # or the first would take the next one's work
    try:
        _large_requests.submit(bool)
        for _ in range(THREADS):
            threads.submit(all_started.wait)
    except RuntimeError:  # "can't start new thread"
        all_started.abort()
        raise OutOfMemoryError from None
    asyncio.get_running_loop().set_default_executor(threads)


def set_size(size: int) -> None:
    """Says how many bytes the body of this task's request has."""
    _is_large.set(size > LARGE)


async def prepare(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `call` in a thread: of all large requests, if this task's request is one."""
    executor = _large_requests if _is_large.get() else None
    return await asyncio.get_running_loop().run_in_executor(executor, partial(call, *args, **kwargs))


async def translate(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `call`, which takes microseconds for a small request: in a thread only for a large one."""
    return await prepare(call, *args, **kwargs) if _is_large.get() else call(*args, **kwargs)

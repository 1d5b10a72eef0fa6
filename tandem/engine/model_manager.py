"""Several models in one process: each is loaded at its first use, and unloaded after a time without use.

    models = ModelManager({"small": "smollm2", "gemma": "/models/gemma.gguf"}, device="auto", keep_alive=300)
    async with models.use("small") as llm:  # an AsyncLLM
        ...
    await models.close()

A ModelManager belongs to one event loop. It loads and closes models in threads, one at a time, so that each load sees
how much memory is really free.

Models that do not fit in the memory together have time slices. A model that is waited for may be used until its slice
ends; then new requests to it wait until the other one is loaded. So at most a fifth of the time goes into loading,
however requests alternate, and each model is loaded in the end.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tandem.engine.async_llm import AsyncLLM
from tandem.errors import DoesNotFitError, ModelNotFoundError, RequestError
from tandem.model.locate import comparable, resolve

CLOSED = "the models are closed: start again"
CLOCK_STEP = 0.01  # seconds by which a timer may be early
TIME_SLICE = 4.0  # times as long as it took to load, a model may be used while another waits for its memory
GRACE = 0.25  # of the seconds that it took to load: an idle model waits so long for its next request
T = TypeVar("T")


@dataclass(frozen=True)
class ModelSpec:
    """A model to be served, and how it is loaded."""

    file: str | os.PathLike[str]  # a GGUF file, or a name that `tandem pull` has fetched
    options: Mapping[str, Any] = field(default_factory=dict)  # of AsyncLLM, beside those of all models
    keep_alive: float | None = None  # seconds that it stays loaded after its last use; None: as all models
    pinned: bool = False  # it stays loaded

    def shares(self, other: ModelSpec) -> bool:
        """Whether both are the same loaded model."""
        return (os.fspath(self.file), self.options) == (os.fspath(other.file), other.options)


@dataclass(frozen=True)
class Loaded:
    """A description of a model in memory."""

    name: str
    llm: AsyncLLM
    nbytes: int  # on the device
    device: str  # its name: cpu, vulkan:0 ...
    users: int
    expires: float | None  # Unix time at which it is unloaded; None: when another model needs its memory
    pinned: bool  # it is not unloaded


class _Entry:
    """A model that is loaded or being loaded."""

    def __init__(self, name: str, spec: ModelSpec, keep_alive: float) -> None:
        self.name, self.spec, self.keep_alive = name, spec, keep_alive
        self.users = 0
        self.last_used = time.monotonic()
        self.load_seconds = 0.0
        self.slice_end = math.inf  # once it is loaded: when others may have its memory
        self.opening: asyncio.Task[AsyncLLM]
        self.timer: asyncio.TimerHandle | None = None

    @property
    def llm(self) -> AsyncLLM | None:
        """None while it is being loaded, or if loading failed."""
        done = self.opening.done() and not self.opening.cancelled() and not self.opening.exception()
        return self.opening.result() if done else None

    @property
    def nbytes(self) -> int:
        return self.llm.llm.nbytes if self.llm else 0

    @property
    def idle(self) -> bool:
        return self.llm is not None and not self.users

    @property
    def seconds_to_keep(self) -> float:
        """How long an idle model that others wait for stays loaded for its next request."""
        return min(self.slice_end, self.last_used + GRACE * self.load_seconds) - time.monotonic()


class ModelManager:
    def __init__(
        self,
        specs: Mapping[str, str | os.PathLike[str] | ModelSpec],
        *,
        keep_alive: float | None = None,
        max_wait: float = 0.0,
        **options: Any,
    ) -> None:
        """`specs`: the names of the models, each with a GGUF file or a name that `tandem pull` has fetched. Names with
        the same file and options share a loaded model.
        `keep_alive`: seconds that a model stays loaded after its last use; None: until another needs its memory.
        `max_wait`: seconds that a request waits for memory that models in use have.
        `options`: of AsyncLLM, for all models."""
        self._specs = {
            name: spec if isinstance(spec, ModelSpec) else ModelSpec(spec) for name, spec in specs.items()
        }
        self._options, self._max_wait = options, max_wait
        # Is told in a sentence which model is loaded or unloaded, and why.
        self.report: Callable[[str], None] = lambda _: None
        self._keep_alive = math.inf if keep_alive is None else keep_alive
        self._entries: list[_Entry] = []
        self._lock = asyncio.Lock()  # held while a model is loaded or closed
        self._queue = asyncio.Lock()  # held by the first of the models that wait for memory
        self._waiting = 0  # models that wait for memory
        self._changed = asyncio.Event()  # set when a model is loaded, unloaded or idle; replaced each time
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def names(self) -> list[str]:
        return list(self._specs)

    def spec(self, name: str) -> ModelSpec:
        if name not in self._specs:
            raise self._unknown(name)
        return self._specs[name]

    def shared_name(self, name: str) -> str:
        """The first of the names that share a loaded model with this one."""
        spec = self.spec(name)
        return next(other for other, each in self._specs.items() if each.shares(spec))

    def add(self, name: str, spec: str | os.PathLike[str] | ModelSpec) -> None:
        """Adds a model. A name that exists keeps its model."""
        self._specs.setdefault(name, spec if isinstance(spec, ModelSpec) else ModelSpec(spec))

    def remove(self, name: str) -> None:
        """Forgets a name; its model is closed as soon as nobody uses it, if no other name has it."""
        entry = self._entry(spec := self.spec(name))
        del self._specs[name]
        others = [other for other, each in self._specs.items() if each.shares(spec)]
        if entry and others:
            entry.name = others[0]
        elif entry:
            entry.keep_alive = 0.0
            self._start(self._expire(entry))

    def known_name(self, name: str) -> str:
        """The name of a model as it was added, also if `name` is another way to write it; an unknown name unchanged."""
        same = (known for known in self._specs if comparable(known) == comparable(name))
        return name if name in self._specs else next(same, name)

    def path(self, name: str) -> Path:
        """Returns the file of a model."""
        return resolve(os.fspath(self.spec(name).file))

    def loaded(self) -> list[Loaded]:
        """Returns the models in memory: models in use first, then by last use."""
        ready = [(entry, llm) for entry in self._entries if (llm := entry.llm)]
        ready.sort(key=lambda pair: (not pair[0].users, -pair[0].last_used))
        return [_describe(entry, llm, self._is_pinned(entry.spec)) for entry, llm in ready]

    @asynccontextmanager
    async def use(self, name: str, *, keep_alive: float | None = None) -> AsyncIterator[AsyncLLM]:
        """Loads a model if need be, and keeps it loaded for the `async with` block. `keep_alive`: seconds that it stays
        loaded afterwards (math.inf: until another model needs its memory), unless it is pinned; None: the default."""
        while self._must_wait(entry := self._find(name)):
            await self._changed.wait()
        entry.users += 1
        if keep_alive is None or self._is_pinned(entry.spec):
            keep_alive = self._default_keep_alive(self.spec(name))
        entry.keep_alive = keep_alive
        try:
            yield await asyncio.shield(entry.opening)  # other users may wait for the same load
        finally:
            entry.users -= 1
            self._schedule_close(entry)

    async def unload(self, name: str) -> None:
        """Closes a model as soon as nobody uses it, unless it is pinned."""
        entry = self._entry(self._specs[name]) if name in self._specs else None
        if entry and not self._is_pinned(entry.spec):
            entry.keep_alive = 0.0
            await self._expire(entry)

    async def close(self) -> None:
        """Ends the requests that are left, and closes all models."""
        self._closed = True
        self._notify()
        for entry in list(self._entries):
            await asyncio.wait([entry.opening])
            await self._close_locked(entry)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- loading and closing

    def _find(self, name: str) -> _Entry:
        if self._closed:
            raise RequestError(CLOSED)
        name, spec = self.shared_name(name), self.spec(name)
        entry = self._entry(spec)
        if entry and entry.llm and entry.llm.failure:  # for example, its device was lost
            self._entries.remove(entry)
            self._start(self._close_locked(entry))
            entry = None
        if not entry:
            entry = _Entry(name, spec, self._default_keep_alive(spec))
            self._entries.append(entry)
            entry.opening = self._start(self._open(entry))
        entry.name = name  # the one that it was loaded by may be forgotten
        return entry

    def _entry(self, spec: ModelSpec) -> _Entry | None:
        """Not by name: a name may stand for another model while requests still use the one before."""
        return next((entry for entry in self._entries if entry.spec.shares(spec)), None)

    def _default_keep_alive(self, spec: ModelSpec) -> float:
        if self._is_pinned(spec):
            return math.inf
        return self._keep_alive if spec.keep_alive is None else spec.keep_alive

    def _is_pinned(self, spec: ModelSpec) -> bool:
        return any(each.pinned and each.shares(spec) for each in self._specs.values())

    def _must_wait(self, entry: _Entry) -> bool:
        """Whether the next request to a model waits for another model to be loaded: its time slice is over."""
        is_over = entry.llm is not None and time.monotonic() >= entry.slice_end
        return bool(self._waiting) and is_over and not self._is_pinned(entry.spec) and not self._closed

    def _unknown(self, name: str) -> ModelNotFoundError:
        return ModelNotFoundError(f"no model is called {name}: there is {', '.join(self._specs) or 'none'}")

    async def _open(self, entry: _Entry) -> AsyncLLM:
        try:
            try:
                llm = await self._load(entry)
            except DoesNotFitError as error:
                llm = await self._load_in_queue(entry, error)
        except BaseException:
            self._entries.remove(entry)
            self._notify()
            raise
        self._notify()
        asyncio.get_running_loop().call_soon(self._schedule_close, entry)  # its users may have been cancelled
        return llm

    async def _load(self, entry: _Entry) -> AsyncLLM:
        """Loads a model, if it fits beside those in memory."""
        async with self._lock:
            if self._closed:
                raise RequestError(CLOSED)
            began = time.monotonic()
            options = {**self._options, **entry.spec.options}
            llm = await asyncio.to_thread(AsyncLLM, entry.spec.file, **options)
            entry.load_seconds = time.monotonic() - began
            entry.slice_end = time.monotonic() + TIME_SLICE * entry.load_seconds
        self.report(f"{entry.name} is loaded on {llm.llm.device.name}: {llm.llm.nbytes / 1e9:.1f} GB")
        return llm

    async def _load_in_queue(self, entry: _Entry, error: DoesNotFitError) -> AsyncLLM:
        """Loads a model that does not fit: closes idle models first, the least recently used first, as long as that can
        free enough memory, and waits for models in use."""
        deadline, loaded = time.monotonic() + self._max_wait, self._nbytes
        self._waiting += 1
        try:
            async with self._queue:
                while not self._closed:
                    others = [each for each in self._entries if each.llm and not self._is_pinned(each.spec)]
                    idle = [each for each in others if each.idle]
                    keep = [each for each in idle if self._max_wait and each.seconds_to_keep > 0]
                    ready = [each for each in idle if each not in keep]
                    # Others came and went since; 0: unknown, any memory may help.
                    missing = (error.missing or 1) + self._nbytes - loaded
                    if missing > sum(each.nbytes for each in others):
                        raise self._explained(error) from None
                    if missing <= sum(each.nbytes for each in ready):
                        if missing > 0:
                            least = min(ready, key=lambda each: each.last_used)
                            await self._close_locked(least, f"{entry.name} needs its memory")
                        try:
                            return await self._load(entry)
                        except DoesNotFitError as still:
                            error, loaded = still, self._nbytes
                            continue
                    left = deadline - time.monotonic()
                    if left <= 0 or not entry.users:
                        raise self._explained(error) from None
                    await self._next_change(min([left, *(each.seconds_to_keep for each in keep)]))
        finally:
            self._waiting -= 1
        raise RequestError(CLOSED)

    @property
    def _nbytes(self) -> int:
        """Bytes of all models in memory."""
        return sum(entry.nbytes for entry in self._entries)

    def _notify(self) -> None:
        """Wakes all that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_change(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), max(CLOCK_STEP, seconds))

    def _explained(self, error: DoesNotFitError) -> DoesNotFitError:
        loaded = self.loaded()
        used = [
            f"{each.name} ({each.nbytes / 1e9:.1f} GB)" for each in loaded if each.users and not each.pinned
        ]
        pinned = [f"{each.name} ({each.nbytes / 1e9:.1f} GB)" for each in loaded if each.pinned]
        beside = f"; being used meanwhile: {', '.join(used)}" if used else ""
        beside += f"; pinned: {', '.join(pinned)}" if pinned else ""
        return DoesNotFitError(f"{error}{beside}", error.missing)

    def _schedule_close(self, entry: _Entry) -> None:
        """Starts the timer that closes an idle model."""
        self._notify()
        if entry.idle:
            entry.last_used = time.monotonic()
            if entry.timer:
                entry.timer.cancel()
            if entry.keep_alive < math.inf and not self._closed:
                after = asyncio.get_running_loop().call_later
                entry.timer = after(entry.keep_alive, lambda: self._start(self._expire(entry)))

    async def _expire(self, entry: _Entry) -> None:
        async with self._lock:
            due = entry.last_used + entry.keep_alive - CLOCK_STEP
            if entry.idle and time.monotonic() >= due:  # else it was used meanwhile
                await self._close(entry, f"it was not used for {entry.keep_alive:g} s")

    async def _close_locked(self, entry: _Entry, reason: str = "") -> None:
        async with self._lock:
            if not reason or entry.idle:  # else it was used meanwhile
                await self._close(entry, reason)

    async def _close(self, entry: _Entry, reason: str = "") -> None:
        if entry.timer:
            entry.timer.cancel()
        if entry in self._entries:
            self._entries.remove(entry)
        if entry.llm:
            await entry.llm.close()
            if reason:
                self.report(f"{entry.name} is unloaded: {reason}")
        self._notify()

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved; callers that waited for the task got it too


def _describe(entry: _Entry, llm: AsyncLLM, pinned: bool) -> Loaded:
    expires_soon = not entry.users and entry.keep_alive < math.inf
    expires = time.time() + entry.last_used + entry.keep_alive - time.monotonic() if expires_soon else None
    device = llm.llm.device.name
    return Loaded(entry.name, llm, entry.nbytes, device, entry.users, expires, pinned)

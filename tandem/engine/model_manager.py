"""Several models in one process: each is loaded at its first use, and unloaded after a time without use.

    models = ModelManager({"small": "smollm2", "gemma": "/models/gemma.gguf"}, device="auto", keep_alive=300)
    async with models.use("small") as llm:  # an AsyncLLM
        ...
    await models.close()

A ModelManager belongs to one event loop. It loads and closes models in threads, one at a time, so that each load sees
how much memory is really free.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tandem.engine.async_llm import AsyncLLM
from tandem.errors import DoesNotFitError, ModelNotFoundError, RequestError
from tandem.model.locate import comparable, resolve

CLOSED = "the models are closed: start again"
CLOCK_STEP = 0.01  # seconds by which a timer may be early
T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """A description of a model in memory."""

    name: str
    llm: AsyncLLM
    nbytes: int  # on the device
    device: str  # its name: cpu, vulkan:0 ...
    users: int
    expires: float | None  # Unix time at which it is unloaded; None: when another model needs its memory


class _Entry:
    """A model that is loaded or being loaded."""

    def __init__(self, name: str, keep_alive: float) -> None:
        self.name, self.keep_alive = name, keep_alive
        self.users = 0
        self.last_used = time.monotonic()
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


class ModelManager:
    def __init__(
        self,
        specs: Mapping[str, str | os.PathLike[str]],
        *,
        keep_alive: float | None = None,
        per_model_options: Mapping[str, Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        """`specs`: the names of the models, each with a GGUF file or a name that `tandem pull` has fetched.
        `keep_alive`: seconds that a model stays loaded after its last use; None: until another needs its memory.
        `options`: of AsyncLLM, for all models; `per_model_options`: for single models, by name."""
        self._specs, self._options, self._per_model_options = dict(specs), options, per_model_options or {}
        self._keep_alive = math.inf if keep_alive is None else keep_alive
        self._entries: dict[str, _Entry] = {}
        self._lock = asyncio.Lock()  # held while a model is loaded or closed
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def names(self) -> list[str]:
        return list(self._specs)

    def add(self, name: str, spec: str | os.PathLike[str]) -> None:
        """Adds a model. A name that exists keeps its model."""
        self._specs.setdefault(name, spec)

    def known_name(self, name: str) -> str:
        """The name of a model as it was added, also if `name` is another way to write it; an unknown name unchanged."""
        same = (known for known in self._specs if comparable(known) == comparable(name))
        return name if name in self._specs else next(same, name)

    def path(self, name: str) -> Path:
        """Returns the file of a model."""
        if name not in self._specs:
            raise self._unknown(name)
        return resolve(os.fspath(self._specs[name]))

    def loaded(self) -> list[Loaded]:
        """Returns the models in memory: models in use first, then by last use."""
        ready = [(entry, llm) for entry in self._entries.values() if (llm := entry.llm)]
        ready.sort(key=lambda pair: (not pair[0].users, -pair[0].last_used))
        return [_describe(entry, llm) for entry, llm in ready]

    @asynccontextmanager
    async def use(self, name: str, *, keep_alive: float | None = None) -> AsyncIterator[AsyncLLM]:
        """Loads a model if need be, and keeps it loaded for the `async with` block. `keep_alive`: seconds that it stays
        loaded afterwards (math.inf: until another model needs its memory); None: the default."""
        entry = self._find(name)
        entry.users += 1
        entry.keep_alive = self._keep_alive if keep_alive is None else keep_alive
        try:
            yield await asyncio.shield(entry.opening)  # other users may wait for the same load
        finally:
            entry.users -= 1
            self._schedule_close(entry)

    async def unload(self, name: str) -> None:
        """Closes a model as soon as nobody uses it."""
        if entry := self._entries.get(name):
            entry.keep_alive = 0.0
            await self._expire(entry)

    async def close(self) -> None:
        """Ends the requests that are left, and closes all models."""
        self._closed = True
        for entry in list(self._entries.values()):
            await asyncio.wait([entry.opening])
            await self._close_locked(entry)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- loading and closing

    def _find(self, name: str) -> _Entry:
        if self._closed:
            raise RequestError(CLOSED)
        if name not in self._specs:
            raise self._unknown(name)
        entry = self._entries.get(name)
        if entry and entry.llm and entry.llm.failure:  # for example, its device was lost
            self._start(self._close_locked(self._entries.pop(name)))
            entry = None
        if not entry:
            entry = self._entries[name] = _Entry(name, self._keep_alive)
            entry.opening = self._start(self._open(entry))
        return entry

    def _unknown(self, name: str) -> ModelNotFoundError:
        return ModelNotFoundError(f"no model is called {name}: there is {', '.join(self._specs) or 'none'}")

    async def _open(self, entry: _Entry) -> AsyncLLM:
        try:
            async with self._lock:
                llm = await self._load(entry.name)
        except BaseException:
            del self._entries[entry.name]
            raise
        asyncio.get_running_loop().call_soon(self._schedule_close, entry)  # its users may have been cancelled
        return llm

    async def _load(self, name: str) -> AsyncLLM:
        """Loads a model. If it does not fit, closes idle models first, the least recently used first, as long as that
        can free enough memory."""
        while not self._closed:
            try:
                options = {**self._options, **self._per_model_options.get(name, {})}
                return await asyncio.to_thread(AsyncLLM, self._specs[name], **options)
            except DoesNotFitError as error:
                idle = [entry for entry in self._entries.values() if entry.idle]
                if not idle or error.missing > sum(entry.nbytes for entry in idle):
                    raise self._explained(error) from None
            await self._close(min(idle, key=lambda entry: entry.last_used))
        raise RequestError(CLOSED)

    def _explained(self, error: DoesNotFitError) -> DoesNotFitError:
        used = [f"{each.name} ({each.nbytes / 1e9:.1f} GB)" for each in self.loaded() if each.users]
        beside = f"; being used meanwhile: {', '.join(used)}" if used else ""
        return DoesNotFitError(f"{error}{beside}", error.missing)

    def _schedule_close(self, entry: _Entry) -> None:
        """Starts the timer that closes an idle model."""
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
                await self._close(entry)

    async def _close_locked(self, entry: _Entry) -> None:
        async with self._lock:
            await self._close(entry)

    async def _close(self, entry: _Entry) -> None:
        if entry.timer:
            entry.timer.cancel()
        if self._entries.get(entry.name) is entry:
            del self._entries[entry.name]
        if entry.llm:
            await entry.llm.close()

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved; callers that waited for the task got it too


def _describe(entry: _Entry, llm: AsyncLLM) -> Loaded:
    expires_soon = not entry.users and entry.keep_alive < math.inf
    expires = time.time() + entry.last_used + entry.keep_alive - time.monotonic() if expires_soon else None
    return Loaded(entry.name, llm, entry.nbytes, llm.llm.device.name, entry.users, expires)

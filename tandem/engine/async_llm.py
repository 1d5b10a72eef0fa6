"""The Python API for asyncio: `from tandem import AsyncLLM`.

A thread steps the engine while there are requests. The event loop hands it new and cancelled ones through an inbox and
gets tokens back, all of a step at once: neither waits for the other.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Self

from tandem.engine.llm import LLM
from tandem.engine.reply import Reply, Result, Token
from tandem.engine.requests import Message
from tandem.errors import QueueFullError, RequestError
from tandem.kernels.kernel import Array

DEFAULT_QUEUE = 1024  # requests that may wait
CLOSED = "the model is closed: open it again"


class _Outbox:
    """What is on its way to the event loop that asked for it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.items: asyncio.Queue[Any] = asyncio.Queue()  # BaseException: a failure; None: the end


class _Stream(_Outbox):
    """Lists of tokens."""

    def __init__(self, reply: Reply) -> None:
        super().__init__()
        self.reply = reply


class _Embedding(_Outbox):
    """A vector, computed a part at a time."""

    def __init__(self, parts: Generator[Array | None]) -> None:
        super().__init__()
        self.parts = parts


class AsyncLLM:
    """A model ready to answer many at once. Close it, or use it in an `async with` block."""

    def __init__(
        self, model: str | os.PathLike[str] | LLM, *, queue: int = DEFAULT_QUEUE, **options: Any
    ) -> None:
        """`model` and `options`: as for LLM, or one that is open already. `queue`: requests that may wait; one more
        is refused with a QueueFullError."""
        if not isinstance(queue, int) or queue < 0:
            raise RequestError(f"queue={queue!r}: give the number of requests that may wait, 0 or more")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._max_requests = queue + self.llm.engine.scheduler.limits.sequences - 1
        self._outboxes: set[_Outbox] = set()  # only the event loop's side touches it
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake, self._closing = threading.Event(), False
        self._gate = threading.Lock()  # of the inbox, and of whether the thread still reads it
        self.failure: BaseException | None = None  # why it does not
        self._thread = threading.Thread(target=self._serve, name="tandem-engine", daemon=True)
        self._thread.start()

    # ---- for the event loop

    async def generate(self, prompt: str | list[int], **params: Any) -> Result:
        """Continues a text or token ids. Parameters as in SamplingParams. Cancelling the task stops the request. Ask
        several times at once for several answers: the prompt is computed once."""
        return await self._whole(await asyncio.to_thread(self.llm.prepare, prompt, **params))

    async def chat(self, messages: Iterable[Message], **params: Any) -> Result:
        """Answers a conversation."""
        return await self._whole(await asyncio.to_thread(self.llm.prepare, messages, **params))

    async def stream(
        self, prompt: str | list[int] | Iterable[Message], **params: Any
    ) -> AsyncIterator[Token]:
        """Like generate or chat, one item a token. Closing the iterator stops the request."""
        reply = await asyncio.to_thread(self.llm.prepare, prompt, **params)
        async with aclosing(self._tokens(reply)) as steps:
            async for tokens in steps:
                for token in tokens:
                    yield token

    async def embed(self, prompt: str | list[int], *, pooling: str = "mean") -> Array:
        """A vector of length 1 for a text: see LLM.embed. Others are served meanwhile."""
        parts = await asyncio.to_thread(self.llm.embedding, prompt, pooling)
        vectors: list[Array] = [vector async for vector in self._receive(_Embedding(parts))]
        return vectors[0]

    async def close(self) -> None:
        """Ends the requests that are left, and gives everything back."""
        self._closing = True
        self._wake.set()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._thread.join()
        self.llm.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _whole(self, reply: Reply) -> Result:
        async with aclosing(self._tokens(reply)) as steps:
            async for _ in steps:
                pass
        return reply.result()

    async def _tokens(self, reply: Reply) -> AsyncGenerator[list[Token], None]:
        async with aclosing(self._receive(_Stream(reply))) as steps:
            async for tokens in steps:
                yield tokens
        reply.check()

    async def _receive(self, outbox: _Outbox) -> AsyncGenerator[Any, None]:
        if len(self._outboxes) >= self._max_requests:
            raise QueueFullError(
                f"{len(self._outboxes)} requests are being served or waiting: try again later"
            )
        self._outboxes.add(outbox)
        try:
            if not self._tell(lambda: self._begin(outbox)):
                raise self.failure or RequestError(CLOSED)
            while (item := await outbox.items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._outboxes.discard(outbox)
            self._tell(lambda: self._end(outbox))

    def _tell(self, message: Callable[[], None]) -> bool:
        """Hands a message to the thread; False if it does not read them any more."""
        with self._gate:
            if self.failure is None:
                self._inbox.append(message)
                self._wake.set()
            return self.failure is None

    # ---- for the thread

    def _serve(self) -> None:
        self._served: dict[_Stream, None] = {}
        self._embeddings: dict[_Embedding, None] = {}
        failure: BaseException = RequestError(CLOSED)
        try:
            while not self._closing:
                self._wake.wait()
                self._wake.clear()
                while (self._inbox or self._served or self._embeddings) and not self._closing:
                    self._turn()
        except BaseException as error:  # a lost device: every request gets it, and those that come later
            failure = error
        with self._gate:
            self.failure = failure
        while self._inbox:
            with suppress(Exception):  # what failed may have left things in disorder, and others wait
                self._inbox.popleft()()
        self._deliver([(outbox, failure) for outbox in (*self._served, *self._embeddings)])

    def _turn(self) -> None:
        """Takes what is in the inbox, makes a step, and sends the new tokens off."""
        while self._inbox:
            self._inbox.popleft()()
        with self.llm.lock:
            self.llm.cancel_left()
            if self._served:
                self.llm.engine.step()
            deltas: list[tuple[_Outbox, Any]] = []
            for stream in list(self._served):
                reply = stream.reply
                if reply.has_new_tokens:
                    deltas.append((stream, self.llm.take(reply)))
                if reply.done:
                    deltas.append((stream, None))
                    del self._served[stream]
            if self._embeddings:
                deltas += self._embed()
        self._deliver(deltas)

    def _embed(self) -> list[tuple[_Outbox, Any]]:
        """A part of the first embedding."""
        first = next(iter(self._embeddings))
        found: Array | BaseException | None
        try:
            found = next(first.parts)
        except RequestError as error:
            found = error
        if found is None:
            return []
        del self._embeddings[first]
        return [(first, found), (first, None)]

    def _begin(self, outbox: _Outbox) -> None:
        if isinstance(outbox, _Embedding):
            self._embeddings[outbox] = None
        elif isinstance(outbox, _Stream):
            self._served[outbox] = None
            with self.llm.lock:
                self.llm.engine.enqueue(outbox.reply.sequence)

    def _end(self, outbox: _Outbox) -> None:
        with self.llm.lock:
            if isinstance(outbox, _Embedding):
                self._embeddings.pop(outbox, None)
                outbox.parts.close()
            elif isinstance(outbox, _Stream):
                self._served.pop(outbox, None)
                if outbox.reply.sequence.finish_reason is None:
                    self.llm.engine.cancel(outbox.reply.sequence)

    def _deliver(self, deltas: list[tuple[_Outbox, Any]]) -> None:
        """One call into each event loop."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[_Outbox, Any]]] = {}
        for outbox, item in deltas:
            loops.setdefault(outbox.loop, []).append((outbox, item))
        for loop, items in loops.items():
            with suppress(RuntimeError):  # it was closed, and nobody waits any more
                loop.call_soon_threadsafe(_put, items)


def _put(deltas: list[tuple[_Outbox, Any]]) -> None:
    for outbox, item in deltas:
        outbox.items.put_nowait(item)

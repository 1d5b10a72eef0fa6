"""The Python API for asyncio: `from tandem import AsyncLLM`.

A thread waits for the tokens of all requests, and so runs the engine's steps (Driver). The event loop sends it
commands (submit, cancel) through an inbox, and receives the tokens of each step in one call. Neither blocks the other.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tandem.engine.input_processor import Message
from tandem.engine.llm import LLM
from tandem.engine.output import OutputReader, Result, Token
from tandem.engine.params import CONSTRAINTS, TextTokens
from tandem.errors import (
    DeadlineError,
    DeviceError,
    OutOfMemoryError,
    QueueFullError,
    RequestError,
    TandemError,
    UnsupportedModelError,
)
from tandem.kernels.kernel import Array

if TYPE_CHECKING:
    from tandem.engine.disk_cache import DiskCache

DEFAULT_QUEUE = 1024  # maximum number of waiting requests
CLOSED = "the model is closed: open it again"
READ_TIMEOUT = 1.0  # s without a read after which a stream above `max_unread` is ended
HARD_LIMIT_FACTOR = 8  # times `max_unread`: above this, any stream is ended
# Times `max_unread`, for all streams together: above this, the limit of each stream is an equal part of the total.
TOTAL_FACTOR = 64
IDLE_SECONDS = 1.0  # without a request, after which the prefix cache is saved to the disk
SAVE_PAUSE = 0.01  # s between two parts of it
UNREAD = "the response was not read as fast as it was generated: read it, or ask for fewer tokens"


class _Outbox:
    """Deltas of one request, on their way to the event loop that made it."""

    def __init__(self, work: OutputReader | Generator[Array | None]) -> None:
        self.work = work  # what to stream, or an embedding to compute in parts
        self.loop = asyncio.get_running_loop()
        # Lists of tokens, or a vector; BaseException: the request failed; None: the end.
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.unread = 0  # values of the tokens in `items`
        self.last_read = 0.0  # by the loop's clock
        self.is_watched = False  # it is above `max_unread`: `_watch` will check it
        self.is_cut = False  # it was ended because nobody read it

    def values(self, item: Any) -> int:
        """A token counts as one value and its log-probabilities."""
        if not isinstance(item, list) or not isinstance(self.work, OutputReader):
            return 0
        return len(item) * (1 + (self.work.sequence.request.params.logprobs or 0))


class AsyncLLM:
    """A loaded model that serves many requests at a time. Close it, or use it in an `async with` block."""

    def __init__(
        self,
        model: str | os.PathLike[str] | LLM,
        *,
        queue: int = DEFAULT_QUEUE,
        max_unread: int | None = None,
        **options: Any,
    ) -> None:
        """`model` and `options`: as for LLM, or an LLM that is open. `queue`: maximum number of requests that wait;
        one more is refused with a QueueFullError. `max_unread`: soft limit on a stream's buffer, in values (a token
        counts as one and its log-probabilities). Above it, a stream that was not read for 1 s is ended; above 8 times
        it, any stream is ended (DeadlineError). The limit of all streams together is 64 times as
        high: above it, the soft limit of each stream is an equal part of it."""
        if not isinstance(queue, int) or queue < 0:
            raise RequestError(f"queue={queue!r}: give the number of requests that may wait, 0 or more")
        if max_unread is not None and (not isinstance(max_unread, int) or max_unread < 1):
            raise RequestError(f"max_unread={max_unread!r}: give a whole number, 1 or more, or None")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._driver = self.llm.driver
        self._max_requests = queue + self.llm.engine.max_sequences
        self._max_unread = math.inf if max_unread is None else max_unread
        self._outboxes: set[_Outbox] = set()  # outboxes of all requests; for the event loop only
        self._unread = 0  # values in all of them; for the event loop only
        self._inbox: deque[Callable[[], None]] = deque()  # commands to the thread
        self._wake, self._closing = threading.Event(), False
        self._inbox_lock = threading.Lock()  # of `_inbox` and `failure`
        self.failure: BaseException | None = None  # why the thread has ended
        # Output constraints are compiled one at a time, and other requests do not wait for them.
        self._constraints = ThreadPoolExecutor(1, "tandem-constraints")
        self._thread = threading.Thread(target=self._serve, name="tandem-engine", daemon=True)
        try:
            self._constraints.submit(bool)  # starts its thread: later there may be no memory for one
            self._thread.start()
        except RuntimeError:  # "can't start new thread"
            self._constraints.shutdown()
            if self.llm is not model:
                self.llm.close()
            raise OutOfMemoryError from None

    # ---- for the event loop

    async def generate(self, prompt: str | list[int], **params: Any) -> Result:
        """Continues a text or token ids. Parameters as in SamplingParams. Cancelling the task ends the request.

        For several completions make several requests at once: the prompt is computed once."""
        return await self._whole(await self._prepare(prompt, params))

    async def chat(self, messages: Iterable[Message], **params: Any) -> Result:
        """Answers a conversation."""
        return await self._whole(await self._prepare(messages, params))

    async def stream(
        self, prompt: str | list[int] | Iterable[Message], **params: Any
    ) -> AsyncIterator[Token]:
        """Like generate or chat, one item per token. Closing the iterator ends the request."""
        output = await self._prepare(prompt, params)
        output.is_streamed = True
        async with aclosing(self._tokens(output)) as steps:
            async for tokens in steps:
                for token in tokens:
                    yield token

    async def _prepare(
        self, prompt: str | list[int] | Iterable[Message], params: dict[str, Any]
    ) -> OutputReader:
        is_constrained = any(params.get(name) is not None for name in CONSTRAINTS)
        work = partial(self.llm.prepare, prompt, **params)
        return await asyncio.get_running_loop().run_in_executor(
            self._constraints if is_constrained else None, work
        )

    async def embed(
        self,
        prompt: str | list[int] | list[str] | list[list[int]],
        *,
        pooling: str | None = None,
        truncate: bool = False,
    ) -> Array:
        """Returns a vector of length 1 for a text, or one for each, like LLM.embed. Other requests are served
        meanwhile."""
        parts = await asyncio.to_thread(self.llm.embedding, prompt, pooling, truncate=truncate)
        return await self._result(parts)

    async def rerank(self, pairs: Sequence[TextTokens]) -> Array:
        """Returns the scores of pairs that `LLM.pairs` has made. Other requests are served meanwhile."""
        return await self._result(self.llm.ranking(pairs))

    async def _result(self, parts: Generator[Array | None]) -> Array:
        results: list[Array] = [result async for result in self._receive(_Outbox(parts))]
        return results[0]

    async def close(self) -> None:
        """Ends the requests that are left, and frees everything."""
        self._closing = True
        self._wake.set()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._thread.join()
        self._constraints.shutdown(cancel_futures=True)
        self.llm.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _whole(self, output: OutputReader) -> Result:
        async with aclosing(self._tokens(output)) as steps:
            async for _ in steps:
                pass
        return output.result()

    async def _tokens(self, output: OutputReader) -> AsyncGenerator[list[Token], None]:
        is_scored = False
        async with aclosing(self._receive(_Outbox(output))) as steps:
            async for tokens in steps:
                if output.scores_prompt and not is_scored:  # in a thread, or others would wait
                    scores = await asyncio.to_thread(output.prompt_logprobs)
                    tokens[0], is_scored = replace(tokens[0], prompt_logprobs=scores), True
                yield tokens
        output.check()

    async def _receive(self, outbox: _Outbox) -> AsyncGenerator[Any, None]:
        self._driver.check_process()
        if len(self._outboxes) >= self._max_requests:
            raise QueueFullError(
                f"{len(self._outboxes)} requests are being served or waiting: try again later"
            )
        self._outboxes.add(outbox)
        try:
            if not self._send(lambda: self._begin(outbox)):
                raise self.failure or RequestError(CLOSED)
            while (item := await outbox.items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                self._count(outbox, -outbox.values(item))
                outbox.last_read = outbox.loop.time()
                # Otherwise a slow reader would block the loop until it has read all items.
                if not outbox.items.empty():
                    await asyncio.sleep(0)
                yield item
        finally:
            self._outboxes.discard(outbox)
            self._unread -= outbox.unread
            self._send(lambda: self._end(outbox))

    def _send(self, command: Callable[[], None]) -> bool:
        """Sends a command to the thread; False if the thread has ended."""
        with self._inbox_lock:
            if self.failure is None:
                self._inbox.append(command)
                self._wake.set()
            return self.failure is None

    # ---- for the thread

    def _serve(self) -> None:
        self._streams: dict[OutputReader, _Outbox] = {}
        self._embeddings: dict[_Outbox, None] = {}
        failure: BaseException = RequestError(CLOSED)
        try:
            while not self._closing:
                if self._driver.engine.disk:
                    self._save_while_idle(self._driver.engine.disk)
                self._wake.wait()
                self._wake.clear()
                while (self._inbox or self._streams or self._embeddings) and not self._closing:
                    try:
                        self._serve_once()
                    except (MemoryError, OutOfMemoryError):
                        self._fail_all(OutOfMemoryError())
        except BaseException as error:  # a lost device fails all requests, also later ones
            failure = error
        with self._inbox_lock:
            self.failure = failure
        while self._inbox:
            # The failure may have left the engine in disorder; the other requests still wait.
            with suppress(Exception):
                self._inbox.popleft()()
        self._deliver([(outbox, failure) for outbox in (*self._streams.values(), *self._embeddings)])

    def _save_while_idle(self, disk: DiskCache) -> None:
        """Saves the prefix cache to the disk until there is something to do: little is left when the process ends."""
        parts = disk.save_in_parts()
        pause = IDLE_SECONDS
        while not self._wake.wait(pause):
            try:
                self._driver.forward(parts)
            except StopIteration:
                return
            pause = SAVE_PAUSE

    def _fail_all(self, error: TandemError) -> None:
        """Ends all requests with an error, and goes on with those that come."""
        outboxes = [*self._streams.values(), *self._embeddings]
        sequences = [output.sequence for output in self._streams]
        self._streams.clear()
        self._embeddings.clear()
        with self._driver.locked():
            for outbox in outboxes:
                if isinstance(outbox.work, Generator):
                    outbox.work.close()
            engine = self._driver.engine
            engine.out_of_memory(sequences)
            if engine.cache.free_blocks != engine.cache.blocks:
                raise DeviceError("the KV cache is in disorder after a failure: open the model again")
        self._deliver([(outbox, error) for outbox in outboxes])

    def _serve_once(self) -> None:
        """Runs the commands of the inbox and one step, and delivers the new tokens."""
        while self._inbox:
            self._inbox.popleft()()
        items: list[tuple[_Outbox, Any]] = []
        if self._streams:
            for output, tokens in self._driver.advance(self._streams):
                outbox = self._streams[output]
                if tokens:
                    items.append((outbox, tokens))
                if output.done:
                    items.append((outbox, None))
                    del self._streams[output]
        if self._embeddings:
            items += self._embed()
        self._deliver(items)

    def _embed(self) -> list[tuple[_Outbox, Any]]:
        """Runs one part of the first embedding, which then goes behind the others."""
        first = next(iter(self._embeddings))
        assert not isinstance(first.work, OutputReader)
        result: Array | BaseException | None
        try:
            result = self._driver.forward(first.work)
        except (RequestError, UnsupportedModelError) as error:
            result = error
        del self._embeddings[first]
        if result is None:
            self._embeddings[first] = None
            return []
        return [(first, result), (first, None)]

    def _begin(self, outbox: _Outbox) -> None:
        if isinstance(outbox.work, OutputReader):
            self._streams[outbox.work] = outbox
            self._driver.submit([outbox.work])
        else:
            self._embeddings[outbox] = None

    def _end(self, outbox: _Outbox) -> None:
        if isinstance(outbox.work, OutputReader):
            self._streams.pop(outbox.work, None)
            self._driver.cancel([outbox.work])
        else:
            self._embeddings.pop(outbox, None)
            with self._driver.locked():
                outbox.work.close()

    def _deliver(self, items: list[tuple[_Outbox, Any]]) -> None:
        """Makes one call into each event loop."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[_Outbox, Any]]] = {}
        for outbox, item in items:
            loops.setdefault(outbox.loop, []).append((outbox, item))
        for loop, its in loops.items():
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(self._put, its)

    # ---- for the event loop, called by the thread

    def _put(self, items: list[tuple[_Outbox, Any]]) -> None:
        for outbox, item in items:
            if outbox.is_cut or outbox not in self._outboxes:
                continue
            outbox.items.put_nowait(item)
            self._count(outbox, outbox.values(item))
            if outbox.unread > self._soft_limit() and not outbox.is_watched:
                outbox.is_watched = True
                outbox.loop.call_later(READ_TIMEOUT, self._watch, outbox)

    def _count(self, outbox: _Outbox, values: int) -> None:
        outbox.unread += values
        self._unread += values

    def _soft_limit(self) -> float:
        total = TOTAL_FACTOR * self._max_unread
        return (
            self._max_unread if self._unread <= total else min(self._max_unread, total / len(self._outboxes))
        )

    def _watch(self, outbox: _Outbox) -> None:
        """Ends a stream that is still not read. It is called some time after the limit was exceeded, because the reader
        may only have waited for this event loop."""
        outbox.is_watched = False
        idle = outbox.loop.time() - outbox.last_read
        limit = self._soft_limit() if idle > READ_TIMEOUT else HARD_LIMIT_FACTOR * self._max_unread
        if outbox.unread > limit and outbox in self._outboxes:
            outbox.is_cut = True
            outbox.items.put_nowait(DeadlineError(UNREAD))
            self._send(partial(self._end, outbox))

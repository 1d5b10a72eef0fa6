"""The engine loop: Driver runs one step of an engine at a time under a lock, for LLM (sync) and AsyncLLM."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from tandem.engine.engine import Engine
from tandem.engine.output import OutputReader, Result, Token
from tandem.errors import DeviceError, OutOfMemoryError, RequestError
from tandem.interrupts import deferred

T = TypeVar("T")
Deltas = list[tuple[OutputReader, list[Token]]]


class _Closed(DeviceError):
    pass


class Driver:
    """Runs one step at a time under a lock, for LLM (sync) and AsyncLLM.

    `run`, `stream` and `AsyncLLM._serve` loop over `advance`. LLM's callers loop in their own threads, AsyncLLM in one
    thread for all its requests; a step serves every request. Benchmarks and the draft model step engines of their own.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.closed = False
        self._lock = threading.Lock()  # held by every caller of the engine
        self._holder = 0  # the thread that has the lock
        self._process = os.getpid()
        self._abandoned: deque[OutputReader] = deque()  # cancelled by their readers, still in the engine

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A `with` block in which no other thread uses the engine. Raises an error where it would wait for ever."""
        self.check_process()
        if self._holder == threading.get_ident():
            raise RequestError(
                "the model is computing the step that called this: use another LLM in a callback"
            )
        with self._lock:
            if self.closed:
                raise _Closed("the model is closed: open the model again")
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = 0

    def close(self, free: Callable[[], None]) -> None:
        """Calls `free` after the step that runs, once: other threads that close the model wait until it is done."""
        with suppress(_Closed), self.locked():
            self.closed = True
            free()

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that opened the model: it has none of the model's threads."""
        return self._process != os.getpid()

    def check_process(self) -> None:
        if self.forked:
            raise DeviceError("the model was opened before this process was forked: open it in this process")

    def run(self, outputs: list[OutputReader]) -> list[Result]:
        """Serves requests to their ends, in the caller's thread."""
        try:
            self.submit(outputs)
            while unfinished := [output for output in outputs if not output.done]:
                self.advance(unfinished)
        finally:
            self.cancel(outputs)
        return [output.result() for output in outputs]

    def stream(self, output: OutputReader) -> Iterator[Token]:
        """Yields the tokens of a request, in the caller's thread. Closing the iterator ends the request."""
        is_scored, output.is_streamed = False, True
        try:
            self.submit([output])  # at the first next(): an unread stream takes no place in the queue
            while not output.done:
                for _, tokens in self.advance([output]):
                    if tokens and output.scores_prompt and not is_scored:
                        tokens[0] = replace(tokens[0], prompt_logprobs=output.prompt_logprobs())
                        is_scored = True
                    yield from tokens
            output.check()
        finally:
            self.cancel([output])

    def submit(self, outputs: Iterable[OutputReader]) -> None:
        with self.locked():
            for output in outputs:
                self.engine.enqueue(output.sequence)

    def advance(self, outputs: Collection[OutputReader]) -> Deltas:
        """Returns the new tokens of these requests, after one step if there are none yet.

        Lists each request that has new tokens or is done. A step serves every request, so a request that was not read
        for some steps has several new tokens."""
        with self.locked(), deferred():
            for output in outputs:
                if output.has_new_tokens:
                    break
            else:
                self._cancel_abandoned()
                try:
                    self.engine.step()
                except MemoryError:
                    self.engine.out_of_memory(output.sequence for output in outputs)
                    raise OutOfMemoryError from None
            deltas: Deltas = []
            for output in outputs:
                if output.has_new_tokens:
                    deltas.append((output, self._read(output)))
                elif output.sequence.finish_reason is not None:
                    deltas.append((output, []))
            return deltas

    def forward(self, parts: Iterator[T]) -> T:
        """Runs the next part of an out-of-band forward (`Engine.captured`)."""
        with self.locked():
            self._cancel_abandoned()
            return next(parts)

    def cancel(self, outputs: Iterable[OutputReader]) -> None:
        """Ends requests that are not finished: at once if the lock is free, otherwise before the next step.

        It never waits. A stream may be collected as garbage anywhere, also in a thread that holds the lock."""
        for output in outputs:
            # One that has finished is still running if an interrupt came before the scheduler removed it.
            if output.sequence.finish_reason is None or output.sequence.state.table_row >= 0:
                self._abandoned.append(output)
        if self._lock.acquire(blocking=False):
            try:
                with deferred():
                    self._cancel_abandoned()
            finally:
                self._lock.release()

    def _cancel_abandoned(self) -> None:
        while self._abandoned:
            self.engine.cancel(self._abandoned.popleft().sequence)

    def _read(self, output: OutputReader) -> list[Token]:
        tokens = []
        while output.has_new_tokens:
            tokens.append(output.next())
        if output.detokenizer.stopped:
            self.engine.cancel(output.sequence)
        return tokens

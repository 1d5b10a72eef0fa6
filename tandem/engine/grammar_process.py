"""Checks grammars before the engine compiles them: refuses those that take too long or too much memory.

A regular expression of a few hundred bytes, with intersections, may take hours to compile. A thread cannot be ended
from outside, but a process can. So a separate process forks a child for each grammar, and the operating system ends the
child when it exceeds its time limit.

There are two such processes. The quick one gives each grammar a few milliseconds, which is enough for ordinary ones. A
grammar that needs longer goes to the slow one, so ordinary grammars do not wait for it. Both compile for a vocabulary
of 256 bytes, not for the model's: nearly all of the time is spent on the regular expressions.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import signal
import struct
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from pathlib import Path

from tandem.engine.structured_output import parser_limits
from tandem.errors import OutOfMemoryError, QueueFullError, RequestError

QUICK, SLOW = 0.02, 1.0  # s of CPU time for a grammar; an ordinary one of 64 KiB takes 0.2
WALL = 2.0  # s of real time for a grammar, and for waiting until the grammars before it are done
ANSWER = 5 * WALL  # s for the process's answer; without one it is killed: somebody has stopped it
MEMORY = 96 << 20  # bytes for grammars; ordinary ones take 40 MB at most
MAX_KNOWN = 1024  # grammars whose result is remembered
REQUEST, RESULT = struct.Struct("<id"), struct.Struct("<i")  # (size, seconds); how the child ended
OUT_OF_TIME, OUT_OF_WALL = -signal.SIGPROF, -signal.SIGALRM
TOO_COMPLEX = (OUT_OF_TIME, -signal.SIGABRT, -signal.SIGSEGV)  # time, memory or stack


class GrammarChecker:
    """Checks grammars. For one event loop."""

    def __init__(self) -> None:
        self._quick, self._slow = GrammarProcess(QUICK, 5), GrammarProcess(SLOW, 10)
        # Hash of a grammar -> whether it can be compiled within the limits; the oldest is forgotten first.
        self._results: dict[bytes, bool] = {}
        self._running: dict[bytes, asyncio.Task[bool]] = {}  # requests with the same grammar share its check

    async def check(self, grammar: str) -> None:
        """Raises RequestError if the grammar cannot be compiled within the limits, QueueFullError if too many others
        wait, OutOfMemoryError if a process cannot start or is killed."""
        source = grammar.encode()
        key = hashlib.sha256(source).digest()
        good = self._results.get(key)
        if good is None:
            if key not in self._running:
                task = self._running[key] = asyncio.create_task(self._check(key, source))
                task.add_done_callback(lambda task: task.cancelled() or task.exception())  # all may have left
            good = await asyncio.shield(self._running[key])
        if not good:
            raise RequestError("the output constraint is too complex: simplify it")

    async def _check(self, key: bytes, source: bytes) -> bool:
        try:
            result = await self._quick.compile(source)
            if result in (OUT_OF_TIME, OUT_OF_WALL):
                result = await self._slow.compile(source)
            if result == OUT_OF_WALL:
                raise QueueFullError(
                    "the output constraint is too complex for a busy server: simplify it, or try again"
                )
            if result and result not in TOO_COMPLEX:
                raise OutOfMemoryError
            if len(self._results) >= MAX_KNOWN:
                del self._results[next(iter(self._results))]
            self._results[key] = not result
            return not result
        finally:
            del self._running[key]

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._quick.close()
        await self._slow.close()


class GrammarProcess:
    """A process that compiles grammars one after the other."""

    def __init__(self, seconds: float, nice: int) -> None:
        """`seconds`: maximum CPU time for a grammar. `nice`: niceness of the process."""
        self._seconds, self._nice = seconds, nice
        self._lock, self._starting = asyncio.Lock(), asyncio.Lock()
        self._process: Process | None = None

    async def compile(self, grammar: bytes) -> int:
        """Returns how the child that compiled the grammar ended: 0, or a negative signal number."""
        await self._started()  # that wait has no limit
        try:
            async with asyncio.timeout(WALL):
                await self._lock.acquire()
        except TimeoutError:
            raise QueueFullError("too many output constraints wait for their check: try again") from None
        try:
            process = await self._started()
            assert process.stdin
            process.stdin.write(REQUEST.pack(len(grammar), self._seconds) + grammar)
            async with asyncio.timeout(ANSWER):
                return await self._result(process)
        except TimeoutError:
            raise QueueFullError("the output constraint could not be checked in time: try again") from None
        finally:
            self._lock.release()

    async def _started(self) -> Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                command = (sys.executable, "-m", __name__, str(self._nice))
                try:
                    self._process = await asyncio.create_subprocess_exec(
                        *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
                    )
                except OSError:
                    raise OutOfMemoryError from None
                await self._result(self._process)
            return self._process

    async def _result(self, process: Process) -> int:
        assert process.stdout
        try:
            (result,) = RESULT.unpack(await process.stdout.readexactly(RESULT.size))
        except BaseException as error:  # the result would be read as that of the next grammar
            await self.close()
            if isinstance(error, asyncio.IncompleteReadError | OSError):  # it was killed
                raise OutOfMemoryError from None
            raise
        return int(result)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def main() -> None:
    from llguidance import LLMatcher, LLTokenizer

    os.nice(int(sys.argv[1]))
    limit = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer, limits = LLTokenizer("byte"), parser_limits()
    _send(0)  # it has started
    while header := sys.stdin.buffer.read(REQUEST.size):
        size, seconds = REQUEST.unpack(header)
        grammar = sys.stdin.buffer.read(size).decode()
        if not (child := os.fork()):
            signal.setitimer(signal.ITIMER_PROF, seconds)  # then SIGPROF ends it
            signal.setitimer(signal.ITIMER_REAL, WALL)  # then SIGALRM
            try:
                matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
                if not matcher.is_error():
                    matcher.compute_bitmask()
            except (ValueError, TypeError):
                pass
            except BaseException:  # no memory, or a panic of Rust's
                os.abort()
            # The model's own vocabulary may need less, so other errors are left to the compiler.
            os._exit(0)
        _send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _send(result: int) -> None:
    sys.stdout.buffer.write(RESULT.pack(result))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

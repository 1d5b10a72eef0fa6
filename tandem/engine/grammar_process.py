"""A process that compiles grammars first, to find those that take too long or too much memory.

A regular expression with intersections of a few hundred bytes may take hours to compile, and a thread cannot be ended.
A process can: the kernel ends it when a grammar exceeds its processor time, and the next grammar starts another. It has
a vocabulary of bytes, since the expressions take the time, not the vocabulary.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import struct
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from pathlib import Path

from tandem.engine.structured_output import parser_limits
from tandem.errors import OutOfMemoryError, RequestError

SECONDS = 1  # of processor time for a grammar; 64 KiB of an ordinary one take 0.2
MEMORY = 96 << 20  # bytes for grammars; ordinary ones take 40 MB at most
MAX_KNOWN = 1024  # grammars whose result is remembered
HEADER = struct.Struct("<i")
# How the process ends when a grammar exceeds its time, memory or stack.
LIMITS_EXCEEDED = (-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV)
TOO_COMPLEX = "the output constraint is too complex: simplify it"


class GrammarProcess:
    """Checks grammars one after the other. For one event loop."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._results: dict[str, str] = {}  # grammar -> problem; the oldest is forgotten first

    async def check(self, grammar: str) -> None:
        """Raises RequestError if the grammar cannot be compiled within the limits, OutOfMemoryError if the process
        cannot start or is killed."""
        problem = self._results.get(grammar)
        if problem is None:
            async with self._lock:
                try:
                    problem = await self._compile(grammar.encode())
                except (asyncio.IncompleteReadError, OSError):
                    process, self._process = self._process, None
                    if process is None or await process.wait() not in LIMITS_EXCEEDED:
                        raise OutOfMemoryError from None
                    problem = TOO_COMPLEX
                except BaseException:  # its answer would be read as that of the next grammar
                    await self.close()
                    raise
            if len(self._results) >= MAX_KNOWN:
                del self._results[next(iter(self._results))]
            self._results[grammar] = problem
        if problem:
            raise RequestError(problem)

    async def _compile(self, grammar: bytes) -> str:
        if self._process is None or self._process.returncode is not None:
            command = (sys.executable, "-m", __name__)
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
            )
        sent, received = self._process.stdin, self._process.stdout
        assert sent and received
        sent.write(HEADER.pack(len(grammar)) + grammar)
        await sent.drain()
        (size,) = HEADER.unpack(await received.readexactly(HEADER.size))
        return (await received.readexactly(size)).decode()

    async def close(self) -> None:
        process, self._process = self._process, None
        if process:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def main() -> None:
    from llguidance import LLMatcher, LLTokenizer

    os.nice(10)
    limit = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer, limits = LLTokenizer("byte"), parser_limits()
    while header := sys.stdin.buffer.read(HEADER.size):
        grammar = sys.stdin.buffer.read(HEADER.unpack(header)[0]).decode()
        seconds = int(time.process_time()) + 1 + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))  # then SIGXCPU
        try:
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()
        except (ValueError, TypeError):
            pass
        except BaseException:  # no memory, or a panic of Rust's
            os.abort()
        # The model's own vocabulary may need less, so other errors are left to the compiler.
        sys.stdout.buffer.write(HEADER.pack(0))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

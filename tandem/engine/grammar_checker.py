"""Checks grammars before the engine compiles them: refuses those that take too long or too much memory.

A regular expression of a few hundred bytes, with intersections, may take hours to compile.

There are two processes for it (job_process.py). The quick one gives each grammar a few milliseconds, which is enough
for ordinary ones. A grammar that needs longer goes to the slow one, so ordinary grammars do not wait for it. Both
compile for a vocabulary of 256 bytes, not for the model's: nearly all of the time is spent on the regular expressions.
"""

from __future__ import annotations

import asyncio
import hashlib

from tandem.engine.job_process import CRASHED, OUT_OF_TIME, OUT_OF_WALL, JobLimits, JobProcess, serve_jobs
from tandem.engine.structured_output import parser_limits
from tandem.errors import OutOfMemoryError, QueueFullError, RequestError

WALL = 2.0  # s of real time for a grammar
# An ordinary grammar of 64 KiB takes 0.2 s of CPU time.
QUICK, SLOW = JobLimits(0.02, WALL, 5), JobLimits(1.0, WALL, 10)
MEMORY = 64 << 20  # bytes for a grammar; ordinary ones take 40 MB at most
MAX_KNOWN = 1024  # grammars whose result is remembered
TOO_COMPLEX = (OUT_OF_TIME, *CRASHED)  # time, memory or stack


class GrammarChecker:
    """Checks grammars. For one event loop."""

    def __init__(self) -> None:
        self._quick, self._slow = (
            JobProcess(__name__, "output constraint", limits) for limits in (QUICK, SLOW)
        )
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
            ended, _ = await self._quick.run(source)
            if ended in (OUT_OF_TIME, OUT_OF_WALL):
                ended, _ = await self._slow.run(source)
            if ended == OUT_OF_WALL:
                raise QueueFullError(
                    "the output constraint is too complex for a busy server: simplify it, or try again"
                )
            if ended and ended not in TOO_COMPLEX:
                raise OutOfMemoryError
            if len(self._results) >= MAX_KNOWN:
                del self._results[next(iter(self._results))]
            self._results[key] = not ended
            return not ended
        finally:
            del self._running[key]

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._quick.close()
        await self._slow.close()


def main() -> None:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer, limits = LLTokenizer("byte"), parser_limits()

    def work(grammar: bytes) -> bytes:
        try:
            matcher = LLMatcher(tokenizer, grammar.decode(), log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()
        except (ValueError, TypeError):
            pass
        return b""  # the model's own vocabulary may need less, so other errors are left to the compiler

    serve_jobs(work, MEMORY)


if __name__ == "__main__":
    main()

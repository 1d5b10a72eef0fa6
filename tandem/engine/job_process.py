"""A process that does jobs for clients, each in a forked child with limits of time and memory.

What a client sends may make a library work for hours, take gigabytes or end its process: a regular expression of a few
hundred bytes, an image that claims to be large. A thread cannot be ended from outside, but a process can: the operating
system ends the child when it exceeds a limit. Its memory is then free, and the GIL was never held for it.

A job is bytes, and so is its result. A module with jobs ends with `if __name__ == "__main__": serve_jobs(...)`.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import struct
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tandem.errors import OutOfMemoryError, QueueFullError

# Seconds beyond a job's limit for the process's answer; without one it is killed: somebody has stopped it.
ANSWER = 10.0
REQUEST = struct.Struct("<Idd")  # size of the job, its limits in seconds
ANSWERED = struct.Struct("<iI")  # how the child ended, size of the result
OUT_OF_TIME, OUT_OF_WALL = -signal.SIGPROF, -signal.SIGALRM
CRASHED = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL)


class JobLimits(NamedTuple):
    """Of a job."""

    seconds: float  # CPU time
    wall: float  # real time, and as much for waiting until the jobs before it are done
    nice: int  # of the process


class JobProcess:
    """A process that does jobs one after the other. For one event loop."""

    def __init__(self, module: str, what: str, limits: JobLimits) -> None:
        """`module`: its main program calls `serve_jobs`. `what`: a job, for messages, such as "image"."""
        self._module, self._what, self._limits = module, what, limits
        self._lock, self._starting = asyncio.Lock(), asyncio.Lock()
        self._process: Process | None = None

    async def run(self, *job: bytes | bytearray) -> tuple[int, bytes]:
        """Does a job, whose parts are sent one after the other. Returns how the child that did it ended (0, or a
        negative signal number), and the result. Raises QueueFullError if too many others wait, OutOfMemoryError if the
        process cannot start or is killed.

        A job that has begun goes on if the caller is cancelled: otherwise the process would have to start again for
        each client that leaves, and the others would wait for it."""
        await self._started()  # that wait has no limit
        try:
            async with asyncio.timeout(self._limits.wall):
                await self._lock.acquire()
        except TimeoutError:
            raise QueueFullError(f"too many {self._what}s wait for their check: try again") from None
        begun = asyncio.ensure_future(self._run(job))
        begun.add_done_callback(lambda task: task.cancelled() or task.exception())  # the caller may have left
        return await asyncio.shield(begun)

    async def _run(self, job: Sequence[bytes | bytearray]) -> tuple[int, bytes]:
        """Does a job, and releases the lock."""
        try:
            process = await self._started()
            assert process.stdin
            process.stdin.write(REQUEST.pack(sum(map(len, job)), self._limits.seconds, self._limits.wall))
            for part in job:
                process.stdin.write(part)
            async with asyncio.timeout(self._limits.wall + ANSWER):
                return await self._answer(process)
        except TimeoutError:
            raise QueueFullError(f"the {self._what} could not be checked in time: try again") from None
        finally:
            self._lock.release()

    async def _started(self) -> Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                command = (sys.executable, "-m", self._module, str(self._limits.nice))
                try:
                    self._process = await asyncio.create_subprocess_exec(
                        *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
                    )
                except OSError:
                    raise OutOfMemoryError from None
                await self._answer(self._process)
            return self._process

    async def _answer(self, process: Process) -> tuple[int, bytes]:
        assert process.stdout
        try:
            ended, size = ANSWERED.unpack(await process.stdout.readexactly(ANSWERED.size))
            return ended, await process.stdout.readexactly(size)
        except BaseException as error:  # the answer would be read as that to the next job
            await self.close()
            if isinstance(error, asyncio.IncompleteReadError | OSError):  # it was killed
                raise OutOfMemoryError from None
            raise

    async def close(self) -> None:
        process, self._process = self._process, None
        if process:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def serve_jobs(work: Callable[[bytes], bytes], memory: int) -> None:
    """Calls `work` for each job, in a child that may take `memory` bytes. The process's argument is its niceness."""
    os.nice(int(sys.argv[1]))
    limit = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    result = os.memfd_create("result")  # not a pipe: a child that is ended leaves a part of an answer in it
    _send(result, 0)  # it has started
    while header := sys.stdin.buffer.read(REQUEST.size):
        size, seconds, wall = REQUEST.unpack(header)
        job = sys.stdin.buffer.read(size)
        if not (child := os.fork()):
            signal.setitimer(signal.ITIMER_PROF, seconds)  # then SIGPROF ends it
            signal.setitimer(signal.ITIMER_REAL, wall)  # then SIGALRM
            try:
                with open(result, "wb", closefd=False) as file:
                    file.write(work(job))
            except BaseException:  # no memory, or a panic of Rust's
                os.abort()
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        _send(result, ended)
        os.ftruncate(result, 0)
        os.lseek(result, 0, os.SEEK_SET)


def _send(result: int, ended: int) -> None:
    size = 0 if ended else os.fstat(result).st_size
    sys.stdout.buffer.write(ANSWERED.pack(ended, size))
    sys.stdout.buffer.flush()
    sent = 0
    while sent < size:
        sent += os.sendfile(sys.stdout.fileno(), result, sent, size - sent)

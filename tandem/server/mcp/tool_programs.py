"""MCP servers that the settings name: programs that read and write JSON-RPC, a line for each message. Each session has
a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tandem.errors import DeadlineError, QueueFullError, RequestError, SessionNotFoundError, ToolProgramError

MAX_SESSIONS = 8  # processes of all programs together
MAX_LINE = 1 << 20  # bytes of a message from a program
GRACE = 2.0  # seconds for a program to end when its input ends, and again after SIGTERM
NO_METHOD = {"code": -32601, "message": "Method not found"}  # this client offers nothing to programs


class ToolSession:
    """A process of a program, and the requests that it has not answered."""

    def __init__(self, name: str, process: Process) -> None:
        self.name, self._process = name, process
        self.unanswered: dict[int | str, asyncio.Future[bytes]] = {}
        self._reader = asyncio.ensure_future(self._read())

    @property
    def has_ended(self) -> bool:
        return self._reader.done()

    async def ask(self, message: Mapping[str, Any], seconds: float) -> bytes:
        """The program's answer to a request, as it wrote it. If nobody waits any more, the program is told so."""
        id = message["id"]
        if id in self.unanswered:
            raise RequestError(
                f"id: {json.dumps(id)[:80]} is of a request without an answer yet: use another"
            )
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.unanswered[id] = answer
        try:
            async with asyncio.timeout(seconds):
                await self.tell(message)
                return await answer
        except (TimeoutError, asyncio.CancelledError) as error:
            cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}}
            with suppress(ToolProgramError):
                self._write(cancelled)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise DeadlineError(f"{self.name} did not answer within {seconds:g} s: try again") from None
        finally:
            self.unanswered.pop(id, None)

    async def tell(self, message: Mapping[str, Any]) -> None:
        """Sends a message to the program."""
        self._write(message)
        assert self._process.stdin
        with suppress(ConnectionError):  # the reader notices, too
            await self._process.stdin.drain()

    def _write(self, message: Mapping[str, Any]) -> None:
        if self.has_ended:
            raise self._failure()
        assert self._process.stdin
        self._process.stdin.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout
        try:
            while line := await self._process.stdout.readline():
                self._take(line)
        except ValueError:  # a line of more than MAX_LINE bytes
            self._signal(signal.SIGKILL)
        for answer in self.unanswered.values():
            if not answer.done():
                answer.set_exception(self._failure())

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return  # a program's log in the wrong place
        if not isinstance(message, dict):
            return
        id = message.get("id")
        if "method" in message and id is not None:
            known = {"result": {}} if message["method"] == "ping" else {"error": NO_METHOD}
            self._write({"jsonrpc": "2.0", "id": id, **known})
        elif isinstance(id, int | str) and (answer := self.unanswered.get(id)) and not answer.done():
            answer.set_result(line)

    def _failure(self) -> ToolProgramError:
        return ToolProgramError(
            f"the program of {self.name} has ended, or wrote a line over {MAX_LINE} bytes: run it by hand"
        )

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def close(self) -> None:
        """Ends the process: its input ends first, as MCP says."""
        assert self._process.stdin
        self._process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE):
                    await self._process.wait()
                    break
            self._signal(number)
        await self._process.wait()
        self._signal(signal.SIGKILL)  # what it started and left
        self._reader.cancel()


class ToolPrograms:
    """The programs by name, and their sessions: the least recently used first."""

    def __init__(self, commands: Mapping[str, tuple[str, ...]]) -> None:
        self.commands = commands
        self._sessions: dict[str, ToolSession] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def command(self, name: str) -> tuple[str, ...]:
        if name not in self.commands:
            raise SessionNotFoundError(
                f"the server's settings name no MCP server {name[:80]}: see mcp in them"
            )
        return self.commands[name]

    async def start(self, name: str) -> str:
        """Starts the program of this name, and returns the id of its session."""
        command = self.command(name)
        for id in [id for id, session in self._sessions.items() if session.has_ended]:
            self._end(id)
        if len(self._sessions) >= MAX_SESSIONS:
            idle = next((id for id, session in self._sessions.items() if not session.unanswered), None)
            if idle is None:
                raise QueueFullError("too many MCP sessions have requests in progress: try again later")
            self._end(idle)
        id = secrets.token_hex(16)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=MAX_LINE, start_new_session=True
            )
        except OSError as error:
            raise ToolProgramError(f"{name} cannot be started: {error.strerror}") from None
        self._sessions[id] = ToolSession(name, process)
        return id

    def session(self, name: str, id: str) -> ToolSession:
        """The session of this id, which is the most recently used from now on."""
        session = self._sessions.pop(id, None)
        if session:
            self._sessions[id] = session
        if session is None or session.name != name:
            raise SessionNotFoundError("there is no such MCP session: initialize a new one")
        return session

    def end(self, name: str, id: str) -> None:
        self.session(name, id)
        self._end(id)

    def _end(self, id: str) -> None:
        closing = asyncio.ensure_future(self._sessions.pop(id).close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for id in list(self._sessions):
            self._end(id)
        await asyncio.gather(*self._closing)

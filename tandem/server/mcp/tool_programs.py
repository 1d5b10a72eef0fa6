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

from tandem.errors import DeadlineError, QueueFullError, RequestError, SessionNotFoundError, ToolProgramError
from tandem.settings import others_environment

MAX_SESSIONS = 8  # processes of all programs together, with those that are about to end
MAX_UNREAD = 4 << 20  # bytes that a program has not read, above which it gets no more messages
MAX_LINE = 1 << 20  # bytes of a message from a program
LINE_ENDS = "\x85\u2028\u2029"
GRACE = 2.0  # seconds for a program to end when its input ends, and again after SIGTERM
NO_METHOD = {"code": -32601, "message": "Method not found"}  # this client offers nothing to programs


class ToolSession:
    """A process of a program, and the requests that it has not answered."""

    def __init__(self, name: str, process: Process) -> None:
        self.name, self._process = name, process
        self.unanswered: dict[int | str, asyncio.Future[bytes]] = {}
        self._reader = asyncio.ensure_future(self._read())
        self._end = asyncio.ensure_future(self._wait())

    @property
    def has_ended(self) -> bool:
        return self._reader.done()

    async def ask(self, id: int | str, message: str, seconds: float) -> bytes:
        """The program's answer to a request, as it wrote it. If nobody waits any more, the program is told so."""
        if id in self.unanswered:
            raise RequestError(
                f"id: {json.dumps(id)[:80]} is of a request without an answer yet: use another"
            )
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.unanswered[id] = answer
        try:
            async with asyncio.timeout(seconds):
                self.tell(message)
                return await answer
        except (TimeoutError, asyncio.CancelledError) as error:
            cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}}
            with suppress(ToolProgramError, QueueFullError):
                self.tell(json.dumps(cancelled))
            if isinstance(error, asyncio.CancelledError):
                raise
            raise DeadlineError(f"{self.name} did not answer within {seconds:g} s: try again") from None
        finally:
            self.unanswered.pop(id, None)

    def tell(self, message: str) -> None:
        """Sends a message, a line of JSON, to the program."""
        assert self._process.stdin
        if self.has_ended or self._process.stdin.is_closing():
            raise self._failure()
        if self._process.stdin.transport.get_write_buffer_size() > MAX_UNREAD:
            raise QueueFullError(f"{self.name} has not read what it was sent before: try again later")
        for end in LINE_ENDS:  # JSON need not escape them, and some programs would read several messages
            message = message.replace(end, f"\\u{ord(end):04x}")
        self._process.stdin.write(message.encode() + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout
        try:
            while line := await self._process.stdout.readline():
                self._take(line)
                await asyncio.sleep(0)  # what has been read already is no reason to wait
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
        if not isinstance(id, int | str):
            return
        if "method" in message:
            known = {"result": {}} if message["method"] == "ping" else {"error": NO_METHOD}
            with suppress(ToolProgramError, QueueFullError):  # it asks and does not read
                self.tell(json.dumps({"jsonrpc": "2.0", "id": id, **known}))
        elif (answer := self.unanswered.get(id)) and not answer.done():
            answer.set_result(line)

    def _failure(self) -> ToolProgramError:
        return ToolProgramError(
            f"the program of {self.name} has ended, or wrote a line over {MAX_LINE} bytes: run it by hand"
        )

    async def _wait(self) -> None:
        await self._process.wait()
        self._signal(signal.SIGKILL)  # what it started and left; at once: its number may be another's later

    def _signal(self, number: int) -> None:
        if self._end.done():
            return
        with suppress(ProcessLookupError, PermissionError):  # of another user, if the command is sudo
            os.killpg(self._process.pid, number)

    async def close(self) -> None:
        """Ends the process: its input ends first, as MCP says."""
        assert self._process.stdin
        self._process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            await asyncio.wait([self._end], timeout=GRACE)
            self._signal(number)
        await asyncio.wait([self._end], timeout=GRACE)
        self._reader.cancel()


class ToolPrograms:
    """The programs by name, and their sessions: the least recently used first."""

    def __init__(self, commands: Mapping[str, tuple[str, ...]]) -> None:
        self.commands = commands
        self._sessions: dict[str, ToolSession] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()  # else many would see the room that there is for one

    def command(self, name: str) -> tuple[str, ...]:
        if name not in self.commands:
            raise SessionNotFoundError(
                f"the server's settings name no MCP server {name[:80]}: see mcp in them"
            )
        return self.commands[name]

    async def start(self, name: str) -> str:
        """Starts the program of this name, and returns the id of its session."""
        command = self.command(name)
        async with self._starting:
            await self._make_room()
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=DEVNULL,
                    limit=MAX_LINE,
                    start_new_session=True,
                    env=others_environment(),
                )
            except OSError as error:
                raise ToolProgramError(f"{name} cannot be started: {error.strerror}") from None
            id = secrets.token_hex(16)
            self._sessions[id] = ToolSession(name, process)
        return id

    async def _make_room(self) -> None:
        """Ends sessions, and waits for their processes, until there is room for one more."""
        for id in [id for id, session in self._sessions.items() if session.has_ended]:
            self._end(id)
        while len(self._sessions) + len(self._closing) >= MAX_SESSIONS:
            if not self._closing:
                idle = next((id for id, session in self._sessions.items() if not session.unanswered), None)
                if idle is None:
                    raise QueueFullError("too many MCP sessions have requests in progress: try again later")
                self._end(idle)
            await asyncio.wait(self._closing, return_when=asyncio.FIRST_COMPLETED)

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

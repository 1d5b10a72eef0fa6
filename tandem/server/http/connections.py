"""Connections: how many are open, and what one may send before its request is checked.

A connection that waits for its client to send a request, or the rest of one, may be closed at any time. When a limit is
reached, a new connection replaces the longest waiting one of the address with the most connections. So idle connections
cannot keep other clients out.
"""

from __future__ import annotations

import asyncio
import http
import json
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem.server.http import errors
from tandem.server.http.middleware import RETRY_AFTER, network_of
from tandem.server.settings import ServerSettings

MAX_HEAD = 32 << 10  # bytes of a request line and its headers; also of the trailers of a body
MAX_HEADERS = 100
DROP_SECONDS = 0.05  # between two reads of what follows the last request of a connection, and is dropped
LINGER_SECONDS = 1.0  # for a client to read why its request was refused
# Headers of which the app reads one, and others may read another.
SINGLE = (b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest", b"transfer-encoding")
BACKLOG = 1024  # connections that the kernel holds until they are accepted
ACCEPTED_AT_ONCE = 16  # before other events are handled
RESERVED_FILES = 128  # of the limit of open files: for models, devices, and connections that are being closed
PAUSE_SECONDS = 0.1  # without accepting, when no file can be opened
TCP_OPTIONS = {  # of the listening socket; those it accepts have them too
    socket.TCP_NODELAY: 1,  # a token is sent at once
    socket.TCP_KEEPIDLE: 30,  # s before the first probe
    socket.TCP_KEEPINTVL: 10,  # s between probes
    socket.TCP_KEEPCNT: 3,  # probes
}

log = logging.getLogger("tandem.server")


class Connections:
    """The open connections, by address; those that wait for their client in order, the longest waiting first."""

    def __init__(self, max_open: int, max_of_address: int) -> None:
        self.max_open, self.max_of_address = max_open, max_of_address
        self._addresses: dict[Connection, str] = {}
        self._counts: Counter[str] = Counter()
        self._waiting: dict[str, dict[Connection, None]] = {}

    def make_room(self, address: str) -> bool:
        """Closes waiting connections until one more of this address is allowed; False if too many are in use."""
        while self._counts[address] >= self.max_of_address:
            if not self._close_longest_waiting(address):
                return False
        while len(self._addresses) >= self.max_open:
            if not self.close_waiting():
                return False
        return True

    def close_waiting(self) -> bool:
        """Closes the longest waiting connection of the address that has most; False if none waits."""
        return bool(self._waiting) and self._close_longest_waiting(
            max(self._waiting, key=self._counts.__getitem__)
        )

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._addresses

    def add(self, connection: Connection, address: str) -> None:
        self._addresses[connection] = address
        self._counts[address] += 1
        self.set_waiting(connection, True)

    def remove(self, connection: Connection) -> None:
        self.set_waiting(connection, False)
        if (address := self._addresses.pop(connection, None)) is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def set_waiting(self, connection: Connection, waits: bool) -> None:
        """Whether a connection waits for its client, from now on."""
        if (address := self._addresses.get(connection)) is None:
            return
        waiting = self._waiting.setdefault(address, {})
        waiting.pop(connection, None)
        if waits:
            waiting[connection] = None
        elif not waiting:
            del self._waiting[address]

    def _close_longest_waiting(self, address: str) -> bool:
        if not (waiting := self._waiting.get(address)):
            return False
        connection = next(iter(waiting))
        self.remove(connection)
        if connection.transport:  # otherwise it closes when it is connected
            connection.transport.abort()
        return True


class Connection(HttpToolsProtocol):
    """A connection of uvicorn's, with limits that hold before an API key is checked.

    httptools keeps a header until it is complete, however long it gets, and uvicorn keeps every pipelined request.
    Here, a request that arrives before the response to the last one is dropped, and the connection ends with that
    response.
    """

    def __init__(self, settings: ServerSettings, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._settings, self._open_connections = settings, connections
        self._deadline: asyncio.TimerHandle | None = None
        self._unparsed = 0  # bytes since the last complete head or part of a body
        self._head = 0  # bytes of the URL, headers and trailers of the request
        self._in_head = False
        self._ignores = False  # what arrives is dropped

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._set_deadline(self._settings.read_timeout)
        if self not in self._open_connections:  # its place was given to another
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_connections.remove(self)
        self._cancel_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ignores:
            return self._read_slowly()
        self._unset_keepalive_if_required()
        # The next request of a kept-alive connection.
        if self._deadline is None and not self._is_responding():
            self._set_deadline(self._settings.read_timeout)
        self._unparsed += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            if not self._ignores:
                self._refuse(400, "this is not a valid HTTP request")
        if self._unparsed > MAX_HEAD and not self._ignores:
            self._refuse_head()

    # ---- what the parser calls

    def on_message_begin(self) -> None:
        if self._is_responding():
            self._end_after_response()
            raise _Stop
        super().on_message_begin()
        self._head, self._in_head = 0, True
        self.scope["tandem.transport"] = self.transport  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if self._in_head:  # a trailer must not become a header of a request that was checked
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # see `_parse`
            return
        self._unparsed, self._in_head = 0, False
        if fault := _fault(self.url, self.parser.get_http_version(), self.headers):
            self._refuse(400, fault)
            raise _Stop
        self._cancel_deadline()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # see `_parse`
            return
        self._unparsed = 0
        super().on_message_complete()
        self._open_connections.set_waiting(self, not self._is_responding())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._open_connections.set_waiting(self, True)

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, also if the client has not read the response."""
        self.transport.abort() if self.transport.get_write_buffer_size() else self.transport.close()

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > MAX_HEAD or len(self.headers) >= MAX_HEADERS:
            self._refuse_head()
            raise _Stop

    # ----

    def _parse(self, data: bytes) -> None:
        """Parses what was received. A request to change the protocol, as Java's clients send for HTTP/2, is parsed
        again without that header: httptools would drop its body."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":
                return self._refuse(400, "this server is no proxy: send it the requests for itself only")
            version = self.parser.get_http_version().encode()
            lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
            lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self.parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n" + data[upgrade.args[0] :])

    def _read_slowly(self) -> None:
        """Pauses reading for a moment: a client that does not stop sending costs little, and its disconnect is still
        noticed."""
        if not self.transport.is_closing():
            self.transport.pause_reading()
            self.loop.call_later(DROP_SECONDS, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_after_response(self) -> None:
        self._ignores = True
        if self._is_responding():
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    def _refuse_head(self) -> None:
        size = f"{MAX_HEAD >> 10} KiB or {MAX_HEADERS} headers"
        self._refuse(431, f"the head of the request is larger than {size}: send fewer and shorter headers")

    def _refuse(self, status: int, message: str) -> None:
        """Answers, unless a response has begun, and closes the connection."""
        log.warning("refused a request of %s: %s", self.client[0] if self.client else "-", message)
        self._ignores = True
        if self._is_responding() and self.cycle.response_started:
            return self.transport.abort()
        self.transport.write(error_response(status, message))
        if self._is_responding():  # the app waits for the rest of the body
            self.transport.close()
        self._set_deadline(LINGER_SECONDS)

    def _set_deadline(self, seconds: float) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline:
            self._deadline.cancel()
        self._deadline = None


def _fault(url: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """What is wrong with a head that a proxy, or whoever else checks a request, may read in another way; or nothing."""
    given: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in SINGLE and (name in given or not value):
            return f"the header {name.decode()} is empty or there twice: send it once"
        given[name] = value
    if version != "1.1" and (version != "1.0" or b"transfer-encoding" in given):
        return "send the request in HTTP/1.1"
    if b"host" not in given and version == "1.1":
        return "the header host is missing: send it"
    if given.get(b"transfer-encoding", b"chunked").strip().lower() != b"chunked":
        return "a body may be chunked, but have no other transfer-encoding"
    if not url.startswith((b"/", b"*")) and _authority(url) != given.get(b"host", b"").lower():
        return "the address in the first line is not that of the header host: send a path only"
    return ""


def _authority(url: bytes) -> bytes:
    """The host and port of an absolute URL."""
    return url.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0].lower()


class _Stop(Exception):
    """Ends the parsing of what was received."""


class Listener:
    """Accepts connections, as many as `connections` allows. Like asyncio's Server for uvicorn."""

    def __init__(
        self, bound: socket.socket, connections: Connections, create: Callable[[], Connection]
    ) -> None:
        self._bound, self._connections, self._create = bound, connections, create
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starved = False  # no file could be opened, which was logged
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in TCP_OPTIONS.items():
            bound.setsockopt(socket.IPPROTO_TCP, option, value)
        bound.setblocking(False)
        bound.listen(BACKLOG)
        self._listen()

    def _listen(self) -> None:
        if self._bound.fileno() >= 0:
            self._loop.add_reader(self._bound, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                peer, address = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                self._starved = False
                return
            except OSError as error:
                return self._pause(error)
            network = network_of(address[0])
            if self._connections.make_room(network):
                connection = self._create()
                self._connections.add(connection, network)
                task = self._loop.create_task(self._connect(connection, peer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                log.warning("refused a connection of %s: too many are in use", address[0])
                with peer, suppress(OSError):
                    peer.send(error_response(503, "too many connections are in use: try again later"))

    async def _connect(self, connection: Connection, peer: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, peer)
        except OSError:  # the client is gone
            self._connections.remove(connection)
            peer.close()

    def _pause(self, error: OSError) -> None:
        """Frees some files, and leaves the clients that wait to be accepted in the kernel's queue for a moment."""
        if not self._starved:
            log.warning("cannot accept connections (%s): raise the limit of open files", error.strerror)
        self._starved = True
        for _ in range(ACCEPTED_AT_ONCE):
            self._connections.close_waiting()
        self._loop.remove_reader(self._bound)
        self._loop.call_later(PAUSE_SECONDS, self._listen)

    def close(self) -> None:
        self._loop.remove_reader(self._bound)
        self._bound.close()

    async def wait_closed(self) -> None:
        pass


def allowed_connections(wanted: int) -> int:
    """How many connections the limit of open files allows, at most `wanted`. The soft limit is raised if it is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED_FILES + len(os.listdir("/proc/self/fd"))
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        if raised < needed:
            wanted = max(wanted - (needed - raised), 1)
            log.warning(
                "the limit of %d open files allows %d connections: raise it (LimitNOFILE, ulimit -n)",
                raised,
                wanted,
            )
    return wanted


def error_response(status: int, message: str) -> bytes:
    """A whole HTTP response, for what is refused before it is a request."""
    body = json.dumps(errors.body("", status, message)).encode()
    head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\nconnection: close\r\n"
    head += f"retry-after: {RETRY_AFTER}\r\n" * (status == 503)
    return f"{head}\r\n".encode() + body

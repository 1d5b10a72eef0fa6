"""ASGI middleware around the app: request ids, access log, origins, API keys, size and time limits, shutdown.

A request reaches the app only when its body is complete, so a slow or endless request holds nothing but its connection.
docs/SECURITY.md lists the guarantees and the test of each.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from tandem.devices.host_memory import MUCH, require_memory
from tandem.errors import OutOfMemoryError
from tandem.native import load
from tandem.server.http import errors
from tandem.server.http.error_formats import STREAMS
from tandem.server.settings import ServerSettings, read_api_keys

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

OPEN_PATHS = ("/", "/health", "/favicon.ico")  # need no API key
OPEN_FOLDER = "/page/"
MONITORING_PATHS = ("/live", "/metrics")  # do not count towards max_requests
# POST requests to these run a model; no others do.
MODEL_PATHS = frozenset(
    {
        *(
            "/v1/chat/completions",
            "/chat/completions",
            "/v1/completions",
            "/completions",
            "/completion",
            "/infill",
        ),
        *("/v1/responses", "/responses", "/v1/responses/compact", "/v1/messages", "/v1/embeddings"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/embedding", "/embeddings"),
        *("/rerank", "/reranking", "/v1/reranking", "/v1/rerank"),
    }
)
LIGHT = "served without running a model"  # the kind of their lines in the log
PAGES = ("/", "/docs")  # may be opened by a link on a page of another origin
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
PRIVATE_DOMAINS = (".local", ".internal", ".localhost")  # that nobody can register
TOTAL_BODY_FACTOR = 8  # the bodies of all requests together may have this many times max_body bytes
DISCARD_SECONDS = 2.0  # s to read the rest of a rejected body, so that the client sees the response
DISCARD_PAUSE = 0.02  # s between two reads of up to 256 KiB of it: the event loop has other work
# Error responses per second and client address; bursts of the same size; limited only while other requests run.
REFUSALS = 25
READS = 200  # the same for responses that run no model
MAX_DELAY, MAX_READ_DELAY = 5.0, 0.25  # s that such a response is delayed; /health stays below half a second
MAX_ADDRESSES = 4096  # client addresses whose responses are counted
INLINE = 256 << 10  # bytes of a body that the event loop joins and counts itself, in half a millisecond
RETRY_AFTER = 2  # seconds
NAT64 = bytes.fromhex("0064ff9b") + bytes(8)  # the first 12 bytes of its addresses
# Bytes of a response that its client need not read at once, and must read in each `write_timeout`.
UNREAD = 64 << 10
UNREAD_SECONDS = 0.05  # s between two checks of the unread bytes
MAX_RESPONSES = 256 << 20  # bytes of all responses that are larger than UNREAD, while they are sent
TEXT_BYTES, VALUE_BYTES = 4, 128  # memory for each byte of a body and for each value in it, when it is parsed

log = logging.getLogger("tandem.access")


class ApiKeys:
    """Checks API keys. Only their SHA-256 digests are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def accept(self, presented: str | None) -> bool:
        """Whether `presented` is a valid key; takes the same time for every key."""
        digest, found = _digest(presented or ""), False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found and bool(presented)


class Refusal(Exception):
    """A request that is rejected before it reaches the app."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class ClientGone(Exception):
    """The client disconnected before its request was complete."""


class Middleware:
    """Checks each request, then runs the app."""

    def __init__(self, app: App, settings: ServerSettings) -> None:
        self.app, self.settings = app, settings
        self.keys = ApiKeys(read_api_keys(settings.api_keys)) if settings.api_keys else None
        self.working = 0  # requests that count towards max_requests
        self.body_bytes = 0  # of all requests
        self.parsed_bytes = 0  # estimate of what they take when they are parsed
        self.draining = False  # shutting down: new requests are rejected
        self._exchanges: set[Exchange] = set()
        self._large: dict[
            Exchange, int
        ] = {}  # those that send a large response -> its bytes; the oldest first
        self._due: dict[tuple[str, int], float] = {}  # address, rate -> when its next response has no delay
        self._hostname = socket.gethostname().lower()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None  # no WebSockets
        exchange = Exchange(scope, receive, send, self.settings, self._slow_down, self._make_room)
        self._exchanges.add(exchange)
        try:
            await self._serve(exchange)
        except Refusal as refusal:
            await exchange.refuse(refusal)
        except MemoryError:
            await exchange.refuse(Refusal(503, str(OutOfMemoryError())))
        except (ClientGone, TimeoutError):
            exchange.abort()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not exchange.expired or task is None:
                raise
            task.uncancel()
            await exchange.end()
        finally:
            self._exchanges.discard(exchange)
            self._large.pop(exchange, None)
            self.body_bytes -= exchange.body_bytes
            self.parsed_bytes -= exchange.parsed_bytes
            exchange.write_log()

    async def _serve(self, exchange: Exchange) -> None:
        path = exchange.scope["path"]
        is_open = path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
        if self.draining:
            raise Refusal(503, "the server is shutting down: try again in a moment")
        self._check_origin(exchange)
        if exchange.scope["method"] == "OPTIONS" and exchange.origin:
            return await exchange.allow_origin()
        if self.keys and not is_open and not self.keys.accept(exchange.key()):
            raise Refusal(401, "the API key is missing or wrong: send it as `Authorization: Bearer KEY`")
        # Otherwise clients without a key could fill the memory that bodies of other requests need.
        if is_open and exchange.has_body():
            raise Refusal(400, f"{path[:80]} takes no body: send none")
        exchange.is_served = not is_open
        if exchange.is_light():
            await self._slow_down(exchange, READS, MAX_READ_DELAY)
        counts = not is_open and path not in MONITORING_PATHS
        self.check_capacity(counts)
        if exchange.has_body():
            self.check_bodies()
        await exchange.read_body(self)
        self.parsed_bytes += exchange.parsed_bytes
        self.check_capacity(counts)  # again: other requests may have arrived meanwhile
        if exchange.parsed_bytes:
            try:
                await self._require_memory()
            except OutOfMemoryError as error:
                raise Refusal(503, str(error)) from None
        self.working += counts
        exchange.is_counted = counts
        try:
            await self.app(exchange.scope, exchange.receive, exchange.send)
        finally:
            self.working -= exchange.is_counted
            exchange.is_counted = False

    async def _require_memory(self) -> None:
        if self.parsed_bytes < MUCH:
            require_memory(self.parsed_bytes)
        else:  # in a thread: it reads a dozen files, and after each the event loop would wait for the GIL
            await asyncio.to_thread(require_memory, self.parsed_bytes)

    async def _slow_down(self, exchange: Exchange, rate: int = REFUSALS, longest: float = MAX_DELAY) -> None:
        """Delays a response if its address gets more than `rate` responses in a second while others are served. Most
        clients wait for the response before they send the next request, so the delay slows them down.

        A delayed request does not count towards max_requests: otherwise 256 delayed refusals would keep others out."""
        self.working -= exchange.is_counted
        exchange.is_counted = False
        if not self.working:
            return
        now = time.perf_counter()
        if len(self._due) > MAX_ADDRESSES:
            self._due = {key: then for key, then in self._due.items() if then > now}
        key = exchange.network(), rate
        due = max(self._due.get(key, 0.0), now - 1.0)
        self._due[key] = min(due + 1 / rate, now + longest)
        if due > now:
            await asyncio.sleep(due - now)

    def check_capacity(self, counts: bool) -> None:
        if counts and self.working >= self.settings.max_requests:
            raise Refusal(429, f"{self.working} requests are in progress: try again later")

    def check_bodies(self) -> None:
        if self.body_bytes > TOTAL_BODY_FACTOR * self.settings.max_body:
            raise Refusal(429, "too many large requests are in progress: try again later")

    def _check_origin(self, exchange: Exchange) -> None:
        """Rejects web pages of other origins, and host names that DNS rebinding points at this machine."""
        allowed, host = self.settings.cors_origins, exchange.header(b"host")
        name = re.sub(r":\d*$", "", host).lower()
        if not self.keys and not self._is_own_name(name):
            raise Refusal(
                403,
                f"this server has no API keys and rejects the host name {name[:80]}: "
                f"start it with --api-keys, or add http://{name[:80]} to cors_origins",
            )
        origin = exchange.header(b"origin")
        if origin == "" and exchange.is_cross_origin() and "*" not in allowed:
            raise Refusal(403, "web pages of other origins may not call the server: see cors_origins")
        if origin in ("", f"http://{host}", f"https://{host}"):
            return
        if origin not in allowed and "*" not in allowed:
            raise Refusal(403, "this origin may not call the server: add it to cors_origins")
        exchange.origin = origin

    def _is_own_name(self, name: str) -> bool:
        """Whether a host name can be one of this server: not one that the owner of a web page may have registered."""
        named = (urlsplit(origin).hostname for origin in self.settings.cors_origins)
        if name in ("", self.settings.host, *LOOPBACK_HOSTS, *named):
            return True
        if self.settings.is_loopback:
            return False
        return (
            "." not in name or name.endswith(PRIVATE_DOMAINS) or name == self._hostname or _is_address(name)
        )

    def _make_room(self, exchange: Exchange, nbytes: int) -> None:
        """Makes room for a large part of a response: clients that read little of theirs would keep them all in memory.
        The oldest ones are cut. `nbytes` 0: it was sent."""
        self._large.pop(exchange, None)
        if not nbytes:
            return
        while self._large and sum(self._large.values()) + nbytes > MAX_RESPONSES:
            oldest = next(iter(self._large))
            del self._large[oldest]
            oldest.abort()
        self._large[exchange] = nbytes

    def drain(self) -> None:
        """Rejects new requests; running ones continue."""
        self.draining = True

    def expire(self) -> None:
        """Ends the running responses, each with an error in its API's format."""
        for exchange in self._exchanges:
            exchange.expire()


class Exchange:
    """One HTTP request and its response."""

    def __init__(
        self,
        scope: Any,
        receive: Receive,
        send: Send,
        settings: ServerSettings,
        slow_down: Callable[[Exchange], Awaitable[None]],
        make_room: Callable[[Exchange, int], None],
    ) -> None:
        self.scope, self._receive, self._send, self._settings = scope, receive, send, settings
        self._slow_down, self._make_room = slow_down, make_room
        self._task, self._begun = asyncio.current_task(), time.perf_counter()
        given = self.header(b"x-request-id")
        self.id = given if re.fullmatch(r"[\w.-]{1,64}", given, re.ASCII) else secrets.token_hex(8)
        self.origin = ""  # of an allowed web page of another origin
        self.expired = False
        self.is_served = False  # it has passed all checks, and is not open to everyone
        self.is_counted = False  # now, towards max_requests
        self.body_bytes = 0
        self.parsed_bytes = 0
        self._body: bytes | None = None
        self._status, self._sent, self._kind, self._complete = 0, 0, b"", False

    def header(self, name: bytes) -> str:
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == name), "")

    def network(self) -> str:
        """The address of the client, or its network; "-" if it is no address, as a local proxy may send any text."""
        client = (self.scope.get("client") or ("-",))[0]
        try:
            return network_of(str(ipaddress.ip_address(client)))
        except ValueError:
            return "-"

    def key(self) -> str:
        scheme, _, token = self.header(b"authorization").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else self.header(b"x-api-key")

    def is_cross_origin(self) -> bool:
        """Whether a web page of another origin caused the request. Browsers send no Origin with a GET of an image, a
        script or a link, but they send Sec-Fetch headers. A link to one of our pages is allowed."""
        if self.header(b"sec-fetch-site") in ("", "none", "same-origin"):
            return False
        opens = self.header(b"sec-fetch-mode"), self.header(b"sec-fetch-dest"), self.scope["method"]
        return opens != ("navigate", "document", "GET") or self.scope["path"] not in PAGES

    # ---- the request

    async def read_body(self, middleware: Middleware) -> None:
        limit, parts, more = self._settings.max_body, list[bytes](), True
        too_large = Refusal(413, f"the request is larger than {limit} bytes: shorten it, or raise max_body")
        if int(self.header(b"content-length") or 0) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self._settings.read_timeout):
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    more = message.get("more_body", False)
                    self.body_bytes += len(parts[-1])
                    middleware.body_bytes += len(parts[-1])
                    if self.body_bytes > limit:
                        raise too_large
                    if more:
                        middleware.check_bodies()
        except TimeoutError:
            seconds = self._settings.read_timeout
            raise Refusal(408, f"the request did not arrive within {seconds:g} s: send it faster") from None
        if self.body_bytes <= INLINE:
            self._body, values = _joined(parts)
        else:
            self._body, values = await asyncio.to_thread(_joined, parts)
        self.parsed_bytes = TEXT_BYTES * self.body_bytes + VALUE_BYTES * values

    async def receive(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    # ---- the response

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if 400 <= self._status < 500 and self._status not in (408, 429):
                await self._slow_down(self)
            headers: Headers = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
            headers.append((b"x-content-type-options", b"nosniff"))
            if self.origin:
                headers += [(b"access-control-allow-origin", self.origin.encode()), (b"vary", b"origin")]
                headers.append((b"access-control-expose-headers", b"x-request-id, retry-after"))
            self._kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
            async with asyncio.timeout(self._settings.write_timeout):
                await self._send({**message, "headers": headers})
        else:
            await self._send_body(message.get("body", b""), more=message.get("more_body", False))

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        """Sends a part of the response's body. A large one goes in pieces: each waits until most of those before it
        are read, and the event loop has other work."""
        if len(body) > UNREAD:
            self._make_room(self, len(body))
        for begin in range(0, max(1, len(body)), UNREAD):
            piece = body[begin : begin + UNREAD]
            self._sent += len(piece)
            self._complete = not more and begin + UNREAD >= len(body)
            async with asyncio.timeout(self._settings.write_timeout):
                await self._send(
                    {"type": "http.response.body", "body": piece, "more_body": not self._complete}
                )
            if self._is_closing():
                break
        if self._complete:
            await self._wait_until_read()
        if len(body) > UNREAD:
            self._make_room(self, 0)

    def _is_closing(self) -> bool:
        transport = self.scope.get("tandem.transport")
        return transport is not None and bool(transport.is_closing())

    async def _wait_until_read(self) -> None:
        """Waits while the client reads a large response. The request and the memory of its body count until then."""
        if (transport := self.scope.get("tandem.transport")) is None:
            return
        unread = transport.get_write_buffer_size()
        end = time.perf_counter() + self._settings.write_timeout
        while (now_unread := transport.get_write_buffer_size()) > UNREAD and not transport.is_closing():
            if now_unread < unread - UNREAD:
                unread, end = now_unread, time.perf_counter() + self._settings.write_timeout
            if time.perf_counter() > end:
                raise TimeoutError
            await asyncio.sleep(UNREAD_SECONDS)

    async def refuse(self, refusal: Refusal) -> None:
        if self._status:
            return self.abort()
        body = json.dumps(errors.body(self.scope["path"], refusal.status, refusal.message)).encode()
        headers: Headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if refusal.status in (429, 503):
            headers.append((b"retry-after", b"%d" % RETRY_AFTER))
        if refusal.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if refusal.status in (408, 503) or self._has_unread_body():
            headers.append((b"connection", b"close"))
        try:
            await self.send({"type": "http.response.start", "status": refusal.status, "headers": headers})
            await self.send({"type": "http.response.body", "body": body, "more_body": True})
            if refusal.status != 408 and self._has_unread_body() and not self.header(b"expect"):
                await self._discard_body()
            await self.send({"type": "http.response.body"})
        except TimeoutError:
            self.abort()

    def has_body(self) -> bool:
        length, encoding = self.header(b"content-length"), self.header(b"transfer-encoding")
        return length not in ("", "0") or encoding != ""

    def _has_unread_body(self) -> bool:
        return self._body is None and self.has_body()

    async def _discard_body(self) -> None:
        """Reads the rest of a rejected body. If the connection were closed at once, a client that is still sending
        would not see the response."""
        try:
            async with asyncio.timeout(DISCARD_SECONDS):
                while (await self._receive()).get("more_body"):
                    await asyncio.sleep(DISCARD_PAUSE)
        except TimeoutError:
            pass

    async def allow_origin(self) -> None:
        """Answers a CORS preflight. All requested headers are allowed: OpenAI's client sends a dozen."""
        requested = self.header(b"access-control-request-headers")
        allowed = (
            requested
            if re.fullmatch(r"[\w, -]{1,2000}", requested, re.ASCII)
            else "authorization, content-type, x-api-key"
        )
        headers = [(b"access-control-allow-methods", b"GET, POST"), (b"access-control-max-age", b"600")]
        headers.append((b"access-control-allow-headers", allowed.encode()))
        if self.header(b"access-control-request-private-network"):
            headers.append((b"access-control-allow-private-network", b"true"))
        await self.send({"type": "http.response.start", "status": 204, "headers": headers})
        await self.send({"type": "http.response.body"})

    def expire(self) -> None:
        self.expired = True
        if self._task:
            self._task.cancel()

    async def end(self) -> None:
        """Ends the response with an error because the server shuts down."""
        refusal = Refusal(503, "the server shut down before the response was complete: try again")
        if not self._status:
            return await self.refuse(refusal)
        if self._complete:
            return
        if self._kind.startswith(STREAMS):
            error = errors.stream_error(self.scope["path"], refusal.status, refusal.message)
            await self.send({"type": "http.response.body", "body": error.encode()})
        else:
            self.abort()

    def abort(self) -> None:
        """Closes the connection without sending buffered data."""
        if transport := self.scope.get("tandem.transport"):
            transport.abort()

    def is_light(self) -> bool:
        return self.scope["method"] != "POST" or self.scope["path"] not in MODEL_PATHS

    def write_log(self) -> None:
        """Writes a line for each request that runs a model. The lines of other requests are limited: clients can send
        thousands of them in a second."""
        if not self._settings.access_log:
            return
        kind = LIGHT if self.is_light() else None
        if not self.is_served or self._status >= 400:
            kind = f"status {self._status or '-'}"
        seconds = time.perf_counter() - self._begun
        client = (self.scope.get("client") or ("-",))[0]  # a local proxy may send any text
        client = client if re.fullmatch(r"[\w.:%-]{1,64}", client, re.ASCII) else "-"
        # Without the query, which may contain keys.
        path = self.scope["path"].encode("unicode_escape").decode()[:200]
        how = "" if self._complete else " cut"
        log.info(
            "%s %s %s %s %s %dB %.3fs%s",
            self.id,
            client,
            self.scope["method"],
            path,
            self._status or "-",
            self._sent,
            seconds,
            how,
            extra={"kind": kind},
        )


def _joined(parts: list[bytes]) -> tuple[bytes, int]:
    """(a body, the number of its values)."""
    body = b"".join(parts)
    return body, load().tandem_json_count(body, len(body))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def network_of(address: str) -> str:
    """The address, or the network of 64 bits of an IPv6 address: one client may have a whole network.

    Some networks stand for many IPv4 clients, and each of these counts: ::ffff:192.0.2.7 (a socket for both versions),
    64:ff9b::192.0.2.7 (NAT64) and Teredo. With 6to4, an IPv4 client has many networks, which count as one.
    """
    if ":" not in address:
        return address
    version6 = ipaddress.IPv6Address(address)
    version4 = version6.ipv4_mapped or version6.sixtofour or (version6.teredo and version6.teredo[1])
    if version6.packed.startswith(NAT64):
        version4 = ipaddress.IPv4Address(version6.packed[12:])
    return str(version4 or ipaddress.ip_network((version6.packed, 64), strict=False))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

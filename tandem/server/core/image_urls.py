"""Fetches images that requests name by an address, from the hosts that the server's settings allow.

A server that fetches what its users name could be made to call the services of its own network. So nothing is fetched
unless `--allow-image-urls` names the host; a name must stand for public addresses, and the connection goes to the
address that was checked; redirects are not followed.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from tandem.errors import QueueFullError, RequestError

SECONDS = 10.0  # to fetch one image
MAX_BYTES = 16 << 20  # of one image
THREADS = 4  # and files in memory
MAX_FETCHES = 32  # in memory, running and waiting
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class RemoteImage:
    """An image of a request, to be fetched."""

    url: str


class ImageFetcher:
    """Fetches the images of all requests in a few threads of its own. For one event loop."""

    def __init__(self, hosts: Collection[str]) -> None:
        """`hosts`: names that may be fetched from, with a port if it is not the usual one of http or https."""
        self._hosts = frozenset(host.lower() for host in hosts)
        self._threads = ThreadPoolExecutor(THREADS, "tandem-image-url")
        self._room = asyncio.Semaphore(THREADS)
        self._count = 0

    @asynccontextmanager
    async def fetched(self, image: RemoteImage) -> AsyncIterator[bytearray]:
        """The file behind an address, for a block that reads it: its memory is another's after the block. Raises a
        RequestError that says why there is none."""
        fetch = _Fetch(image.url, self._hosts)
        if self._count >= MAX_FETCHES:
            raise QueueFullError("too many images of requests are being fetched: try again later")
        self._count += 1
        try:
            async with self._room:
                yield await asyncio.get_running_loop().run_in_executor(self._threads, fetch.run)
        finally:
            self._count -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Fetch:
    """One GET request to an allowed host."""

    def __init__(self, url: str, hosts: Collection[str]) -> None:
        try:
            parts = urlsplit(url)
            self._host, port = (parts.hostname or "").lower(), parts.port
        except ValueError:
            raise RequestError("the address of an image is not valid: check it") from None
        if parts.scheme not in PORTS:
            raise RequestError(
                "an image must be a data URL (data:image/png;base64,...): this server fetches no images from such an "
                "address"
            )
        self._is_secure, self._port = parts.scheme == "https", port or PORTS[parts.scheme]
        name = self._host if port in (None, PORTS[parts.scheme]) else f"{self._host}:{port}"
        if name not in hosts:
            raise RequestError(
                f"this server fetches no images from {name[:80]!r}: send a data URL (data:image/png;base64,...), or "
                "start it with --allow-image-urls HOST"
            )
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if parts.username or not self._target.isascii() or any(c <= " " or c == "\x7f" for c in self._target):
            raise RequestError("the address of an image has letters that an address cannot have: encode them")

    def run(self) -> bytearray:
        try:
            return self._get(time.monotonic() + SECONDS)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise self._failed(f"no answer ({reason})") from None

    def _get(self, deadline: float) -> bytearray:
        channel = socket.create_connection((self._address(), self._port), SECONDS)
        if self._is_secure:
            channel = ssl.create_default_context().wrap_socket(
                channel, server_hostname=self._host, do_handshake_on_connect=False
            )
        # A host that sends a byte now and then keeps no thread.
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), _shut_down, (channel,))
        timer.daemon = True
        timer.start()
        connection = http.client.HTTPConnection(self._host, self._port)
        try:
            if isinstance(channel, ssl.SSLSocket):
                channel.do_handshake()
            connection.sock = channel
            connection.request("GET", self._target, headers={"Accept": "image/*", "User-Agent": "tandem"})
            response = connection.getresponse()
            if response.status != 200:
                raise self._failed(f"status {response.status}")
            data = bytearray()
            while piece := response.read1(1 << 16):
                data += piece
                if len(data) > MAX_BYTES:
                    raise self._failed(f"it has more than {MAX_BYTES >> 20} MiB")
            if time.monotonic() > deadline or response.length:
                raise self._failed("it ended too early, or came too slowly")
            return data
        finally:
            timer.cancel()
            connection.close()
            channel.close()

    def _address(self) -> str:
        """The address to connect to. One of this machine or its network must be named itself by the settings."""
        with suppress(ValueError):
            return str(ipaddress.ip_address(self._host))
        found = [
            str(one[4][0]) for one in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        ]
        if not found or not all(ipaddress.ip_address(one.partition("%")[0]).is_global for one in found):
            raise self._failed("the name stands for an address that is not public")
        return found[0]

    def _failed(self, reason: str) -> RequestError:
        return RequestError(f"the image at {self._host!r} cannot be fetched: {reason}")


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

"""The HTTP protocol of uvicorn with a deadline for request headers and TCP keepalive."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem.server.settings import ServerSettings

KEEPALIVE = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
}  # s, s, probes


def connection_class(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The protocol class that uvicorn instantiates for each connection."""

    class Connection(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if (peer := transport.get_extra_info("socket")) and peer.family != socket.AF_UNIX:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in KEEPALIVE.items():
                    peer.setsockopt(socket.IPPROTO_TCP, option, value)
            self._start_deadline()

        def data_received(self, data: bytes) -> None:
            idle = self.cycle is None or self.cycle.response_complete
            if idle and self._deadline is None:  # the next request of a kept-alive connection
                self._start_deadline()
            super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["tandem.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

        def on_headers_complete(self) -> None:
            self._cancel_deadline()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_deadline()
            super().connection_lost(exc)

        def _start_deadline(self) -> None:
            self._deadline = self.loop.call_later(settings.read_timeout, self.transport.abort)

        def _cancel_deadline(self) -> None:
            if self._deadline:
                self._deadline.cancel()
            self._deadline = None

    return Connection

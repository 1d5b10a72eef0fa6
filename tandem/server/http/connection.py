"""HTTP connections that cannot be held open for nothing: requests have a deadline, and silent peers are probed."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem.server.settings import ServerSettings

PROBES = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}  # seconds, seconds, count


def protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The class uvicorn makes one object of for each connection."""

    class Connection(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if (peer := transport.get_extra_info("socket")) and peer.family != socket.AF_UNIX:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in PROBES.items():
                    peer.setsockopt(socket.IPPROTO_TCP, option, value)
            self._expect_request()

        def data_received(self, data: bytes) -> None:
            idle = self.cycle is None or self.cycle.response_complete
            if idle and self._deadline is None:  # the begin of another request
                self._expect_request()
            super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["tandem.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

        def on_headers_complete(self) -> None:
            self._requested()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._requested()
            super().connection_lost(exc)

        def _expect_request(self) -> None:
            self._deadline = self.loop.call_later(settings.read_timeout, self.transport.abort)

        def _requested(self) -> None:
            if self._deadline:
                self._deadline.cancel()
            self._deadline = None

    return Connection

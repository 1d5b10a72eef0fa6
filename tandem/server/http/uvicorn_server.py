"""Runs the app on uvicorn: socket, timeouts, log, and a shutdown that ends every response."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem.errors import RequestError
from tandem.server.http.middleware import App, Middleware
from tandem.server.instances import registered
from tandem.server.settings import ServerSettings

KEEPALIVE = {
    socket.TCP_KEEPIDLE: 30,  # s before the first probe
    socket.TCP_KEEPINTVL: 10,  # s between probes
    socket.TCP_KEEPCNT: 3,  # probes
}
SWITCH_INTERVAL = 0.0005  # s that the engine's thread waits at most for the GIL while tokens are sent
SHUTDOWN_GRACE = 3.0  # s to send the error to clients whose responses were ended


def bind_socket(settings: ServerSettings) -> socket.socket:
    """A socket bound to the configured address: a taken port fails before a model is loaded."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((settings.host, settings.port))
    except (OSError, OverflowError, UnicodeError) as error:
        bound.close()
        where = f"{settings.host}:{settings.port}"
        raise RequestError(
            f"cannot listen on {where} ({error}): choose another address with --host or --port"
        ) from None
    return bound


def serve(
    app: App,
    settings: ServerSettings,
    bound: socket.socket,
    fatal: Callable[[], Exception | None] = lambda: None,
) -> None:
    """Serves `app` until SIGTERM or Ctrl-C, or until `fatal` returns an error, which is raised."""
    _log_to_stderr()
    middleware = Middleware(app, settings)
    host, port = bound.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    config = uvicorn.Config(
        middleware,
        http=_connection_class(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(settings.idle_timeout),
        timeout_graceful_shutdown=int(settings.shutdown + SHUTDOWN_GRACE),
    )
    with registered(url, list(settings.models), settings.api_keys):
        _Server(config, middleware, url, fatal).run(sockets=[bound])
    if error := fatal():
        raise error


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, middleware: Middleware, url: str, fatal: Callable[[], Exception | None]
    ) -> None:
        super().__init__(config)
        self.middleware, self.url, self.fatal = middleware, url, fatal

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        sys.setswitchinterval(SWITCH_INTERVAL)
        gc.collect()
        gc.freeze()  # the loaded objects stay: each collection that scans them would take as long as four steps
        print(f"tandem: listening at {self.url}", file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.fatal() is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.middleware.drain()
        timer = asyncio.get_running_loop().call_later(
            self.middleware.settings.shutdown, self.middleware.expire
        )
        await super().shutdown(sockets)
        timer.cancel()
        self._captured_signals.clear()  # uvicorn would raise them again after this shutdown


def _connection_class(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The class of uvicorn's connections: with a deadline for request headers, and TCP keepalive."""

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


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%S"))
    for name, level in (("tandem", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)

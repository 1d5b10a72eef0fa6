"""Runs the app on uvicorn: socket, timeouts, and a shutdown that ends every response."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from collections.abc import Callable

import uvicorn

from tandem.errors import RequestError
from tandem.server.http import background
from tandem.server.http.connections import Connection, Connections, Listener, allowed_connections
from tandem.server.http.limited_log import log_to_stderr
from tandem.server.http.middleware import App, Middleware
from tandem.server.instances import registered
from tandem.server.settings import ServerSettings

SWITCH_INTERVAL = 0.0005  # s that the engine's thread waits at most for the GIL while tokens are sent
COLLECT_TICKS = 600  # of 0.1 s between two collections of all garbage
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
    log_to_stderr()
    middleware = Middleware(app, settings)
    for warning in settings.warnings():
        print(f"tandem: warning: {warning}", file=sys.stderr, flush=True)
    host, port = bound.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    config = uvicorn.Config(
        middleware,
        loop="asyncio",  # uvloop is no dependency: all servers behave like those that are tested
        http=Connection,
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


def shorten_collections() -> None:
    """Python's garbage collector holds the GIL. The loaded objects stay, so it need not scan them, which would take as
    long as four steps. Nor does it scan the many objects of a large request over and over: all objects that are not
    new wait for `on_tick`, in the thread that makes them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 1 << 30)


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, middleware: Middleware, url: str, fatal: Callable[[], Exception | None]
    ) -> None:
        super().__init__(config)
        self.middleware, self.url, self.fatal = middleware, url, fatal

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        assert sockets
        self.servers = [self._listener(bound) for bound in sockets]  # type: ignore[misc]
        sys.setswitchinterval(SWITCH_INTERVAL)
        shorten_collections()
        print(f"tandem: listening at {self.url}", file=sys.stderr, flush=True)

    def _listener(self, bound: socket.socket) -> Listener:
        settings = self.middleware.settings
        max_open = allowed_connections(settings.max_connections)
        connections = Connections(max_open, min(settings.max_connections_per_address, max_open))

        def create() -> Connection:
            state, config = self.server_state, self.config
            return Connection(
                settings, connections, config=config, server_state=state, app_state=self.lifespan.state
            )

        return Listener(bound, connections, create)

    async def on_tick(self, counter: int) -> bool:
        if counter % COLLECT_TICKS == 0:
            self._collection = asyncio.create_task(background.write(gc.collect))
        return await super().on_tick(counter) or self.fatal() is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.middleware.drain()
        timer = asyncio.get_running_loop().call_later(
            self.middleware.settings.shutdown, self.middleware.expire
        )
        await super().shutdown(sockets)
        timer.cancel()
        self._captured_signals.clear()  # uvicorn would raise them again after this shutdown

"""Runs the app on uvicorn: socket, log, timeouts, and a shutdown that ends every response."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import uvicorn

from tandem.errors import RequestError
from tandem.server.http import background
from tandem.server.http.connections import Connection, Connections, Listener, allowed_connections
from tandem.server.http.middleware import LIGHT, App, Middleware
from tandem.server.instances import registered
from tandem.server.settings import ServerSettings

SWITCH_INTERVAL = 0.0005  # s that the engine's thread waits at most for the GIL while tokens are sent
COLLECT_TICKS = 600  # ticks of 0.1 s between two full garbage collections
SHUTDOWN_GRACE = 3.0  # s to send the error to clients whose responses were ended
MAX_LINES = 30  # log lines of a kind in a minute: clients write to the log with what they send
MAX_LIGHT_LINES = 600  # the same for requests that run no model
MAX_LENGTH = 1000  # characters of a message in the log
MAX_KINDS = 100  # kinds that are counted apart: a library may log without a format
MINUTE = 60.0  # s


def bind_socket(settings: ServerSettings) -> socket.socket:
    """A socket bound to the configured address: a taken port fails before a model is loaded."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((settings.host, settings.port))
    except (OSError, OverflowError, TypeError, ValueError) as error:
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
        loop="auto",  # uvloop but on Windows: a third of the time between steps that asyncio takes
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
    """Shortens garbage collections, which hold the GIL.

    Objects that exist now are never scanned again: they stay, and scanning them takes as long as four steps. Full
    collections do not start by themselves, since they would scan the objects of a large request again and again;
    `on_tick` starts them."""
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
        create = partial(
            Connection,
            settings,
            connections,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        return Listener(bound, connections, create)

    async def on_tick(self, counter: int) -> bool:
        if counter % COLLECT_TICKS == 0:
            self._collection = asyncio.create_task(background.run_in_large_thread(gc.collect))
        return await super().on_tick(counter) or self.fatal() is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.middleware.drain()
        timer = asyncio.get_running_loop().call_later(
            self.middleware.settings.shutdown, self.middleware.expire
        )
        await super().shutdown(sockets)
        timer.cancel()
        self._captured_signals.clear()  # uvicorn would raise them again after this shutdown


# ---- the log


class LineFormatter(logging.Formatter):
    """A message is one line of limited length, whatever a client has put into it. A traceback follows it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        shown = text[:MAX_LENGTH] + "..." * (len(text) > MAX_LENGTH)
        return "".join(c if c.isprintable() else "?" for c in shown.rstrip())


class LimitedHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes at most MAX_LINES of a kind in a minute to stderr, and afterwards how many it left out.

    A record's kind is its attribute `kind`, or else its format. Records of kind None are not limited.
    """

    def __init__(self) -> None:
        super().__init__()
        self._end = 0.0
        self._counts: Counter[str] = Counter()
        self.setFormatter(LineFormatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        kind: str | None = getattr(record, "kind", str(record.msg))
        if time.monotonic() > self._end:
            self._start_minute()
        if kind is not None:
            kind = kind if kind in self._counts or len(self._counts) < MAX_KINDS else "other"
            self._counts[kind] += 1
            if self._counts[kind] > _max_lines(kind):
                return
        super().emit(record)

    def _start_minute(self) -> None:
        left_out = {kind: count - _max_lines(kind) for kind, count in self._counts.items()}
        self._counts.clear()
        self._end = time.monotonic() + MINUTE
        for kind, count in left_out.items():
            if count <= 0:
                continue
            message, arguments = "left out %d more lines of this kind: %s", (count, kind)
            super().emit(logging.LogRecord("tandem", logging.WARNING, "", 0, message, arguments, None))


def _max_lines(kind: str) -> int:
    return MAX_LIGHT_LINES if kind == LIGHT else MAX_LINES


def log_to_stderr() -> None:
    """Writes the log of the server and of its libraries to stderr."""
    handler = LimitedHandler()
    for name, level in (("tandem", logging.INFO), ("uvicorn", logging.WARNING), ("asyncio", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)

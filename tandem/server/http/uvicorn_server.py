"""Runs the app: a socket, uvicorn with our timeouts, the log, and an end that leaves no answer hanging."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Callable

import uvicorn

from tandem.errors import RequestError
from tandem.server.http.connection import protocol
from tandem.server.http.middleware import App, Middleware
from tandem.server.instances import announced
from tandem.server.settings import ServerSettings

SWITCH = 0.0005  # seconds at most that the engine waits, after a step of 5 ms, for those who send tokens
MORE = 3.0  # seconds to say so to those whose answers were ended


def listen(settings: ServerSettings) -> socket.socket:
    """The port, taken at once: before minutes are spent on a model."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((settings.host, settings.port))
    except (OSError, OverflowError, UnicodeError) as error:
        bound.close()
        where = f"{settings.host}:{settings.port}"
        raise RequestError(
            f"cannot listen on {where} ({error}): choose another with --host or --port"
        ) from None
    return bound


def serve(
    app: App,
    settings: ServerSettings,
    bound: socket.socket,
    fatal: Callable[[], Exception | None] = lambda: None,
) -> None:
    """Until SIGTERM or Ctrl-C, or until there is something `fatal`, which it raises. `app`: of create_app; its
    lifespan opens and closes the models."""
    _log_to_stderr()
    guard = Middleware(app, settings)
    host, port = bound.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    config = uvicorn.Config(
        guard,
        http=protocol(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(settings.idle_timeout),
        timeout_graceful_shutdown=int(settings.shutdown + MORE),
    )
    with announced(url, list(settings.models), settings.api_keys):
        _Server(config, guard, url, fatal).run(sockets=[bound])
    if error := fatal():
        raise error


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, guard: Middleware, url: str, fatal: Callable[[], Exception | None]
    ) -> None:
        super().__init__(config)
        self.guard, self.url, self.fatal = guard, url, fatal

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        sys.setswitchinterval(SWITCH)
        gc.collect()
        gc.freeze()  # what was loaded stays: to look through it again takes as long as four steps
        print(f"tandem: listening at {self.url}", file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.fatal() is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.guard.drain()
        left = asyncio.get_running_loop().call_later(self.guard.settings.shutdown, self.guard.expire)
        await super().shutdown(sockets)
        left.cancel()
        self._captured_signals.clear()  # it was obeyed: this is an end like any other


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%S"))
    for name, level in (("tandem", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)

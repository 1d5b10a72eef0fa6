"""Replicas on Ray: `tandem serve --ray`. This process takes the requests, Ray Serve's replicas answer them.

A replica is the whole app with its models, without a port. Ray starts replicas, adds some when requests queue up, and
starts another where one has died; its requests fail with an error that says to try again, others notice nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray._private.services import canonicalize_bootstrap_address, find_bootstrap_address
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import RequestRouter

from tandem.engine.models import Models
from tandem.errors import DeviceError, RequestError
from tandem.model import registry
from tandem.server.app import create_app
from tandem.server.cluster import merged as gathered
from tandem.server.cluster.routing import PrefixAffinity, prefix_keys
from tandem.server.http import errors
from tandem.server.http.middleware import RETRY_AFTER, Message, Receive, Send
from tandem.server.monitoring.engine_monitor import live_snapshot
from tandem.server.settings import ServerSettings

SCOPE = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
)
POLL = 0.2  # seconds
ANSWER_SECONDS = 3.0  # for a cluster that is there
WATCH_SECONDS = 5.0  # for a replica to tell how it is: one that is busy opening a model is left out
# How soon more replicas are started: Ray's own delays are for requests that are over in no time.
SOON = {
    "metrics_interval_s": 2.0,
    "look_back_period_s": 6.0,
    "upscale_delay_s": 4.0,
    "downscale_delay_s": 300.0,
}
log = logging.getLogger("tandem.server")
LOST = "the replica that was answering is gone: try again"


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Ray's choice of a replica, by `PrefixAffinity`."""

    def initialize_state(self, **_: Any) -> None:
        self.memory = PrefixAffinity()
        self.begun: set[str] = set()  # requests; those that watch all replicas are not routed

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        keys = pending_request.args[1] if pending_request else []
        return [[by_id[name]] for name in self.memory.ranked(by_id, keys)]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        self.begun.add(pending_request.metadata.internal_request_id)
        self.memory.begin(replica_id, pending_request.args[1])

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        if internal_request_id in self.begun:
            self.begun.discard(internal_request_id)
            self.memory.end(replica_id)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self.memory.forget(replica_id)


class Replica:
    """The app as Ray runs it."""

    async def __init__(  # type: ignore[misc]
        self, specs: Mapping[str, str], settings: ServerSettings, options: dict[str, Any]
    ) -> None:
        files = {name: registry.resolve(model, pull=True) for name, model in specs.items()}
        self.models = models = Models(files, **options)
        self.app = create_app(models, settings)
        self._life = self.app.router.lifespan_context(self.app)
        await self._life.__aenter__()
        async with models.use(next(iter(specs))):  # it counts as there when it can answer
            pass

    async def live(self, roofline: bool) -> dict[str, Any]:
        return live_snapshot(self.models, roofline)

    async def metrics(self) -> tuple[str, str]:
        """Its id, and what it counts."""
        text: bytes = self.app.state.server.metrics.text()
        return serve.get_replica_context().replica_id.unique_id, text.decode()

    async def answer(self, request: dict[str, Any], _keys: list[bytes]) -> AsyncIterator[list[Message]]:
        """The messages of an ASGI app, those that are there at a time; when the caller goes, the app hears of it."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        body: list[Message] = [{"type": "http.request", "body": request["body"], "more_body": False}]

        async def receive() -> Message:
            return body.pop() if body else await asyncio.Future()

        async def run() -> None:
            try:
                await self.app(request["scope"], receive, messages.put)
            finally:
                messages.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            more = True
            while more:
                found = [await messages.get()]
                while not messages.empty():
                    found.append(messages.get_nowait())
                yield [message for message in found if message]
                more = found[-1] is not None
            await task
        finally:
            task.cancel()


class Front:
    """The app that this process serves: it hands requests on."""

    def __init__(self, handle: Any, name: str, guest: bool) -> None:
        """`guest`: the cluster is there without us."""
        self.handle, self.name, self.guest = handle.options(stream=True), name, guest

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        if scope["method"] == "GET" and scope["path"] in ("/live", "/metrics"):
            return await self._watch(scope, send)
        request: dict[str, Any] = {
            "scope": {key: scope[key] for key in SCOPE if key in scope},
            "body": await _body(receive),
        }
        passing = asyncio.create_task(self._pass_on(request, prefix_keys(request["body"]), send))
        leaving = asyncio.create_task(_hangs_up(receive))
        try:
            await asyncio.wait((passing, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not passing.done():
                passing.cancel()
                with suppress(asyncio.CancelledError):
                    await passing
        if not passing.cancelled():
            passing.result()
        return None

    async def _pass_on(self, request: dict[str, Any], keys: list[bytes], send: Send) -> None:
        kind: bytes | None = None  # of an answer that has begun
        messages = self.handle.answer.remote(request, keys)
        try:
            async for some in messages:
                for message in some:
                    if message["type"] == "http.response.start":
                        kind = dict(message["headers"]).get(b"content-type", b"")
                    await send(message)
        except (RayError, RayServeException):
            await _fail(request["scope"]["path"], kind, send)
        except asyncio.CancelledError:
            messages.cancel()
            raise

    async def _watch(self, scope: Any, send: Send) -> None:
        """All replicas answer, and are shown as one."""
        is_live = scope["path"] == "/live"
        asked = ("live", b"roofline=true" in scope["query_string"]) if is_live else ("metrics",)
        try:
            told = await self.handle.broadcast(*asked).results_async(
                timeout_s=WATCH_SECONDS, return_exceptions=True
            )
        except (RayError, RayServeException, TimeoutError):
            told = []
        told = [one for one in told if not isinstance(one, BaseException)]
        if not told:
            return await _fail(scope["path"], None, send)
        kind = b"application/json" if is_live else b"text/plain; charset=utf-8"
        body = json.dumps(gathered.live(told)).encode() if is_live else gathered.metrics(told)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": body})

    async def _live(self, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        if self.guest:
            await asyncio.to_thread(serve.delete, self.name)
        await asyncio.to_thread(ray.shutdown)
        await send({"type": "lifespan.shutdown.complete"})


async def _body(receive: Receive) -> bytes:
    parts, more = list[bytes](), True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _hangs_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _fail(path: str, kind: bytes | None, send: Send) -> None:
    body = json.dumps(errors.body(path, 503, LOST, "replica_lost")).encode()
    if kind is None:
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"%d" % RETRY_AFTER)]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
    elif kind.startswith(b"text/event-stream"):
        body = b"data: " + body + b"\n\n"
    await send({"type": "http.response.body", "body": body})


def start(
    specs: Mapping[str, str], settings: ServerSettings, options: dict[str, Any], *, replicas: tuple[int, int],
    threads: int | None, port: int,
) -> Front:  # fmt: skip
    """Replicas in the cluster that this machine is part of, or in one of this server's own."""
    guest = _join()
    fewest, most = replicas
    if not guest:
        threads = threads or max(1, int(ray.cluster_resources()["CPU"]) // most)
        _check_room(fewest * threads)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled")
    how: dict[str, Any] = {"num_replicas": fewest}
    if fewest != most:
        wanted = max(1, settings.batch // 2)  # requests a replica: a part of what it serves at a time
        limits = AutoscalingConfig(
            min_replicas=fewest, max_replicas=most, target_ongoing_requests=wanted, **SOON
        )
        how = {"autoscaling_config": limits}
    if settings.prefix_routing:
        how["request_router_config"] = RequestRouterConfig(request_router_class=PrefixRouter)
    deployment = serve.deployment(
        Replica,
        max_ongoing_requests=settings.max_requests,
        ray_actor_options={"num_cpus": threads or 1},
        graceful_shutdown_timeout_s=settings.shutdown,
        graceful_shutdown_wait_loop_s=POLL,
        **how,
    )
    name = f"tandem-{port}"
    handle = _run(deployment.bind(dict(specs), settings, {**options, "threads": threads}), name)
    return Front(handle, name, guest)


def _join() -> bool:
    """Whether there was a cluster to join; else one is begun here."""
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if found := existing_cluster():
        try:
            ray.init(**quiet)  # finds the same one, and the token of one that was begun here
        except ConnectionError as error:
            raise DeviceError(f"{error}: if {found} wants a token, set RAY_AUTH_MODE=token") from None
        return True
    ray.init(address="local", include_dashboard=False, **quiet)
    address = ray.get_runtime_context().gcs_address
    print(f"tandem: a Ray cluster is started for this server, at {address}", file=sys.stderr, flush=True)
    return False


def existing_cluster() -> str | None:
    """The one that RAY_ADDRESS names or `ray start` has begun; never that of another server, which ends with it."""
    address: str | None = canonicalize_bootstrap_address(None)
    if address is None or _answers(address):
        return address
    if address != find_bootstrap_address(None):
        raise DeviceError(
            f"no Ray cluster answers at {address}, which RAY_ADDRESS names: start it, or name another"
        )
    log.warning("no Ray cluster answers at %s any more: one is started here", address)
    return None


def _answers(address: str) -> bool:
    """Ray remembers clusters that were killed, and would wait for them for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def _check_room(needed: int) -> None:
    """Ray would wait for more machines, for ever."""
    if needed > (found := int(ray.cluster_resources()["CPU"])):
        ray.shutdown()
        raise RequestError(
            f"so many replicas and threads need {needed} cores, and here are {found}: use fewer"
        )


def _run(application: Any, name: str) -> Any:
    """A handle of the replicas, which are there then."""
    try:
        return serve.run(application, name=name, route_prefix=None)
    except RuntimeError as error:
        found = serve.status().applications.get(name)
        told = "\n".join(one.message for one in found.deployments.values()) if found else str(error)
        ours = re.findall(r"^tandem\.errors\.\w+: (.*)", told, re.MULTILINE)
        serve.delete(name)
        ray.shutdown()
        raise DeviceError(
            f"no replica could be started: {(ours or told.splitlines() or [error])[-1]}"
        ) from None

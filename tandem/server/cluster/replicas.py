"""Data-parallel replicas on Ray Serve: `tandem serve --ray`. This process has the port; replicas run the requests.

A replica is the whole app with its models, without a port. Ray starts replicas, adds some when requests queue up, and
replaces a replica that died; the requests of the dead replica fail with an error that says to try again.
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
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import serve
from ray._private.services import canonicalize_bootstrap_address, find_bootstrap_address
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import RequestRouter

from tandem.engine.model_manager import ModelManager, ModelSpec
from tandem.errors import DeviceError, RequestError
from tandem.model import locate
from tandem.server.app import create_app
from tandem.server.cluster import merged
from tandem.server.cluster.routing import PrefixAffinity, prefix_keys
from tandem.server.http import errors
from tandem.server.http.background import run_inline_if_small, set_size
from tandem.server.http.error_formats import STREAMS
from tandem.server.http.middleware import RETRY_AFTER, Message, Receive, Send
from tandem.server.monitoring.metrics import live_snapshot
from tandem.server.settings import ServerSettings

SCOPE_KEYS = (  # of the ASGI scope that a replica gets
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
POLL_SECONDS = 0.2
CONNECT_SECONDS = 3.0  # to connect to an existing cluster
MONITORING = ("/live", "/metrics", "/health")  # that all replicas answer together
MONITOR_SECONDS = 5.0  # for a replica's part of them: one that does not answer is left out
# For a replica to tell Ray that it is well: one that fails thrice is replaced, with its requests.
HEALTH_SECONDS = 10.0
# Autoscaling delays, for requests that take seconds; Ray's defaults are for short ones.
AUTOSCALING_DELAYS = {
    "metrics_interval_s": 2.0,
    "look_back_period_s": 6.0,
    "upscale_delay_s": 4.0,
    "downscale_delay_s": 300.0,
}
log = logging.getLogger("tandem.server")
LOST = "the replica that ran this request died: try again"


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Ray's request router: prefers the replica whose prefix cache has the prompt."""

    def initialize_state(self, **_: Any) -> None:
        self.affinity = PrefixAffinity()
        self.routed: set[str] = set()  # ids of requests in progress; broadcasts are not routed

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        keys = pending_request.args[1] if pending_request else []
        return [[by_id[name]] for name in self.affinity.ranked(by_id, keys)]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        self.routed.add(pending_request.metadata.internal_request_id)
        self.affinity.begin(replica_id, pending_request.args[1])

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        if internal_request_id in self.routed:
            self.routed.discard(internal_request_id)
            self.affinity.end(replica_id)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self.affinity.forget(replica_id)


class Replica:
    """The app as a Ray Serve deployment."""

    async def __init__(  # type: ignore[misc]
        self, specs: Mapping[str, ModelSpec], settings: ServerSettings, options: dict[str, Any]
    ) -> None:
        found = {
            name: replace(spec, file=locate.resolve(str(spec.file), pull=True))
            for name, spec in specs.items()
        }
        self.models = models = ModelManager(found, **options)
        self.app = create_app(models, settings)
        self._life = self.app.router.lifespan_context(self.app)
        await self._life.__aenter__()
        async with models.use(next(iter(specs))):  # a replica is ready when its first model is loaded
            pass

    async def live(self, roofline: bool) -> dict[str, Any]:
        return live_snapshot(self.models, roofline)

    async def health(self) -> tuple[str, str]:
        status, message = self.app.state.server.health()
        return status, message

    async def metrics(self) -> tuple[str, str]:
        """(replica id, metrics in Prometheus's text format)."""
        text: bytes = self.app.state.server.metrics.text()
        return serve.get_replica_context().replica_id.unique_id, text.decode()

    async def respond(self, request: dict[str, Any], _keys: list[bytes]) -> AsyncIterator[list[Message]]:
        """The app's ASGI messages, in batches of those available. If the caller disconnects, the app is cancelled."""
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
    """The ASGI app of this process: forwards requests to replicas."""

    def __init__(self, handle: Any, name: str, joined: bool) -> None:
        """`joined`: the cluster existed before this server."""
        self.handle, self.name, self.joined = handle.options(stream=True), name, joined

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._lifespan(receive, send)
        if scope["method"] == "GET" and scope["path"] in MONITORING:
            return await self._monitor(scope, send)
        body = await _body(receive)
        request: dict[str, Any] = {
            "scope": {key: scope[key] for key in SCOPE_KEYS if key in scope},
            "body": body,
        }
        set_size(len(body))
        keys = await run_inline_if_small(prefix_keys, body)
        forwarding = asyncio.create_task(self._forward(request, keys, send))
        disconnect = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((forwarding, disconnect), return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnect.cancel()
            if not forwarding.done():
                forwarding.cancel()
                with suppress(asyncio.CancelledError):
                    await forwarding
        if not forwarding.cancelled():
            forwarding.result()
        return None

    async def _forward(self, request: dict[str, Any], keys: list[bytes], send: Send) -> None:
        kind: bytes | None = None  # content type of a response that has started
        messages = self.handle.respond.remote(request, keys)
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

    async def _monitor(self, scope: Any, send: Send) -> None:
        """Merges what all replicas say that answer in time."""
        path = scope["path"]
        more = (b"roofline=true" in scope["query_string"],) if path == "/live" else ()
        asked = self.handle.broadcast(path[1:], *more)
        # In a thread: under asyncio, Ray has no results at all if one replica has none.
        collect = partial(asked.results, timeout_s=MONITOR_SECONDS, return_exceptions=True)
        try:
            results = await asyncio.to_thread(collect)
        except (RayError, RayServeException, TimeoutError):
            results = []
        results = [one for one in results if not isinstance(one, BaseException)]
        if not results:
            return await _fail(path, None, send)
        status, kind = 200, b"application/json"
        if path == "/live":
            body = json.dumps(merged.live(results)).encode()
        elif path == "/metrics":
            body, kind = merged.metrics(results), b"text/plain; charset=utf-8"
        else:
            found, message = merged.health(results)
            status, body = (
                200 if found == "ok" else 503,
                json.dumps({"status": found, "message": message}).encode(),
            )
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": body})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        if self.joined:
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _fail(path: str, kind: bytes | None, send: Send) -> None:
    body = json.dumps(errors.body(path, 503, LOST, "replica_lost")).encode()
    if kind is None:
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"%d" % RETRY_AFTER)]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
    elif kind.startswith(STREAMS):
        body = errors.stream_error(path, 503, LOST, "replica_lost").encode()
    await send({"type": "http.response.body", "body": body})


def start(
    specs: Mapping[str, ModelSpec],
    settings: ServerSettings,
    options: dict[str, Any],
    *,
    replicas: tuple[int, int],
    threads: int | None,
    port: int,
) -> Front:
    """Starts replicas in the cluster that this machine belongs to, or in a new local cluster."""
    joined = _join()
    min_replicas, max_replicas = replicas
    if not joined:
        threads = threads or max(1, int(ray.cluster_resources()["CPU"]) // max_replicas)
        _check_cores(min_replicas * threads)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled")
    scaling: dict[str, Any] = {"num_replicas": min_replicas}
    if min_replicas != max_replicas:
        target = max(1, settings.batch // 2)  # requests in progress at each replica
        autoscaling = AutoscalingConfig(
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            target_ongoing_requests=target,
            **AUTOSCALING_DELAYS,
        )
        scaling = {"autoscaling_config": autoscaling}
    if settings.prefix_routing:
        scaling["request_router_config"] = RequestRouterConfig(request_router_class=PrefixRouter)
    deployment = serve.deployment(
        Replica,
        max_ongoing_requests=settings.max_requests,
        ray_actor_options={"num_cpus": threads or 1},
        graceful_shutdown_timeout_s=settings.shutdown,
        graceful_shutdown_wait_loop_s=POLL_SECONDS,
        health_check_timeout_s=HEALTH_SECONDS,
        **scaling,
    )
    name = f"tandem-{port}"
    handle = _run(deployment.bind(dict(specs), settings, {**options, "threads": threads}), name)
    return Front(handle, name, joined)


def _join() -> bool:
    """Joins an existing cluster and returns True, or starts a local one and returns False."""
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if found := existing_cluster():
        try:
            ray.init(**quiet)  # finds the same cluster, and the token of a local one
        except ConnectionError as error:
            raise DeviceError(f"{error}: if {found} requires a token, set RAY_AUTH_MODE=token") from None
        return True
    ray.init(address="local", include_dashboard=False, **quiet)
    address = ray.get_runtime_context().gcs_address
    print(f"tandem: started a local Ray cluster at {address}", file=sys.stderr, flush=True)
    return False


def existing_cluster() -> str | None:
    """The address of the cluster that RAY_ADDRESS names or `ray start` started; never another server's."""
    address: str | None = canonicalize_bootstrap_address(None)
    if address is None or _answers(address):
        return address
    if address != find_bootstrap_address(None):
        raise DeviceError(
            f"no Ray cluster answers at {address}, which RAY_ADDRESS names: start it, or name another"
        )
    log.warning("no Ray cluster answers at %s any more: starting a local one", address)
    return None


def _answers(address: str) -> bool:
    """Whether a cluster accepts connections: Ray would wait minutes for one that was killed."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _check_cores(needed: int) -> None:
    """Rejects more replicas than there are cores: Ray would wait for more machines for ever."""
    if needed > (found := int(ray.cluster_resources()["CPU"])):
        ray.shutdown()
        raise RequestError(
            f"the replicas need {needed} cores, but there are {found}: use fewer replicas or --threads"
        )


def _run(application: Any, name: str) -> Any:
    """Waits until the replicas are ready and returns their handle."""
    try:
        return serve.run(application, name=name, route_prefix=None)
    except RuntimeError as error:
        found = serve.status().applications.get(name)
        messages = "\n".join(one.message for one in found.deployments.values()) if found else str(error)
        ours = re.findall(r"^tandem\.errors\.\w+: (.*)", messages, re.MULTILINE)
        serve.delete(name)
        ray.shutdown()
        raise DeviceError(
            f"no replica could be started: {(ours or messages.splitlines() or [error])[-1]}"
        ) from None

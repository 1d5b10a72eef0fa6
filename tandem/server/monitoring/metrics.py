"""Counts what requests and engines do: `/metrics` for Prometheus, `/live` for the web page."""

from __future__ import annotations

import asyncio
import resource
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import prometheus_client as prometheus
from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from tandem.bench.step_cost import ATTENTION, kv_read_per_position
from tandem.engine.async_llm import AsyncLLM
from tandem.engine.llm import LLM
from tandem.engine.model_manager import ModelManager
from tandem.engine.output import Usage
from tandem.engine.sequence import Chunk, Sequence
from tandem.errors import TandemError
from tandem.server.monitoring.roofline import Roofline, can_measure, measure_bandwidth, measure_parts

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 180, 600)  # seconds
ITL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # seconds
HISTORY_SECONDS = 180
RECENT_SECONDS = 3  # with work in them, for the averages of "now"
MAX_FIRST_TOKENS = 32  # times to first token that are kept
IDLE_SECONDS = 1.0  # without a step before the roofline is measured: a client may send its next request

# ---- responses


class Metrics:
    def __init__(self, models: ModelManager) -> None:
        self._registry = prometheus.CollectorRegistry()
        self._registry.register(_EngineCollector(models))
        self.requests = self._counter("requests", "Responses, by finish_reason", "finish_reason")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache")
        self.completion_tokens = self._counter("completion_tokens", "Generated tokens")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From a request to its first token", TTFT_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "From one token to the next", ITL_BUCKETS
        )

    def _counter(self, name: str, help: str, *labels: str) -> prometheus.Counter:
        return prometheus.Counter(f"tandem_{name}", help, ("model", *labels), registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> prometheus.Histogram:
        return prometheus.Histogram(
            f"tandem_{name}", help, ("model",), registry=self._registry, buckets=buckets
        )

    @contextmanager
    def request(self, model: str) -> Iterator[RequestTimer]:
        """Measures one response while the block runs."""
        timer = RequestTimer(self, model)
        try:
            yield timer
        except Exception:
            timer.finish_reason = "error"
            raise
        finally:
            self.requests.labels(model, timer.finish_reason).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class RequestTimer:
    """Time to first token, inter-token latency and usage of one response."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model
        self._start = self._last = time.perf_counter()
        self._first: float | None = None  # when the first token came
        self._histogram = metrics.time_to_first_token.labels(model)
        self._inter_token_latency = metrics.inter_token_latency.labels(model)
        self.finish_reason = "cancelled"  # until `done`

    def token(self) -> None:
        now = time.perf_counter()
        self._histogram.observe(now - self._last)
        self._first = self._first or now
        self._last, self._histogram = now, self._inter_token_latency

    def seconds(self) -> tuple[float, float]:
        """(seconds to the first token, seconds from the first token to the last) so far."""
        first = self._first or self._last
        return first - self._start, self._last - first

    def done(self, usage: Usage, finish_reason: str) -> None:
        self.finish_reason = finish_reason
        self._metrics.prompt_tokens.labels(self._model).inc(usage.prompt_tokens)
        self._metrics.cached_tokens.labels(self._model).inc(usage.cached_tokens)
        self._metrics.completion_tokens.labels(self._model).inc(usage.completion_tokens)


# ---- engines


@dataclass
class StepCounts:
    """Counts over one second, or in total."""

    at: int  # seconds since 1970
    tokens: int = 0  # generated
    prompt_tokens: int = 0  # computed, without prefix cache hits
    steps: int = 0
    sequences: int = 0  # sum of the batch sizes of all steps
    busy: float = 0.0  # seconds in steps
    between: float = 0.0  # seconds between steps, outside the engine, while requests were running
    decoding: float = 0.0  # seconds of decode steps (no prompt tokens)
    decoded: Counter[tuple[int, int]] = field(default_factory=Counter)  # decode steps by (tokens, rows)
    kv_bytes: float = 0.0  # KV cache traffic of decode steps
    admitted: int = 0  # prompt tokens of admitted requests
    cached: int = 0  # of them in the prefix cache
    drafted: int = 0  # draft tokens
    accepted: int = 0  # accepted draft tokens
    kv_used: float = 0.0  # maximum share of the KV blocks in use, of the fullest group


class EngineMonitor:
    """Monitors one engine. `on_step` runs in the engine's thread and takes a few microseconds."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine = llm, llm.engine
        self.seconds: deque[StepCounts] = deque(maxlen=HISTORY_SECONDS)
        self.first_tokens: deque[float] = deque(maxlen=MAX_FIRST_TOKENS)
        self.totals = StepCounts(0)
        self.requests = 0
        self.roofline: Roofline | None = None
        self._lock = threading.Lock()
        self._last, self._drafts_accepted = 0.0, 0
        self._admitted = self._cached = 0  # prompt tokens so far
        self._served: set[Sequence] = set()  # by the last step
        self._kv = _kv_bytes_per_position(llm)
        self._step_bytes: dict[tuple[int, int], float] = {}
        self.engine.on_step = self.on_step

    def on_step(self, chunks: list[Chunk], seconds: float) -> None:
        """Called by the engine after each step."""
        now = time.perf_counter()
        tokens = rows = prompt = drafted = 0
        kv_bytes, first = 0.0, list[float]()
        for chunk in chunks:
            total = chunk.total
            tokens += total
            if chunk.samples_next:
                rows += 1 + len(chunk.draft_tokens)
                drafted += len(chunk.draft_tokens)
                if chunk.sequence.first_token > self._last:
                    first.append(chunk.sequence.first_token - chunk.sequence.request.submitted)
            if chunk.count > 1:
                prompt += chunk.count
            end = chunk.begin + total
            for window, nbytes in self._kv:
                kv_bytes += nbytes * (min(end, window + total - 1) if window else end)
        accepted = self._accepted()
        sampled = sum(chunk.samples_next for chunk in chunks) + accepted
        admitted, cached = self._prompts()
        kv_used = self._kv_used()
        served = {chunk.sequence for chunk in chunks}
        waited = not served.isdisjoint(self._served)  # otherwise the engine may have been idle
        between = max(0.0, self.engine.step_called - self._last) if waited else 0.0
        self._last, self._served = now, served
        with self._lock:
            self.first_tokens.extend(first)
            self.requests += len(first)
            for into in (self._second(), self.totals):
                into.tokens += sampled
                into.prompt_tokens += prompt
                into.steps += 1
                into.sequences += len(chunks)
                into.busy += seconds
                into.between += between
                into.admitted += admitted
                into.cached += cached
                into.drafted += drafted
                into.accepted += accepted
                into.kv_used = max(into.kv_used, kv_used)
                if not prompt:
                    into.decoding += seconds
                    into.decoded[tokens, rows] += 1
                    into.kv_bytes += kv_bytes

    def _accepted(self) -> int:
        """Draft tokens that were accepted since the last step."""
        before, self._drafts_accepted = self._drafts_accepted, self.engine.scheduler.accepted_draft_tokens
        return self._drafts_accepted - before

    def _prompts(self) -> tuple[int, int]:
        """Prompt tokens that were admitted since the last step, and those of them in the prefix cache."""
        scheduler, admitted, cached = self.engine.scheduler, self._admitted, self._cached
        self._admitted, self._cached = scheduler.prompt_tokens, scheduler.cached_prompt_tokens
        return self._admitted - admitted, self._cached - cached

    def _kv_used(self) -> float:
        cache = self.engine.cache
        pools = zip(cache.blocks, cache.pools, strict=True)
        return max((1 - pool.num_free / blocks for blocks, pool in pools), default=0.0)

    def _second(self) -> StepCounts:
        now = int(time.time())
        if not self.seconds or self.seconds[-1].at != now:
            self.seconds.append(StepCounts(now))
        return self.seconds[-1]

    # ---- readers, in other threads

    async def measure(self) -> None:
        """Measures the roofline of a step once, when the engine is idle."""
        steps = self.totals.steps
        if self.roofline is None and not self._is_busy():
            found = await asyncio.to_thread(self._measure)
            if self.totals.steps == steps:  # otherwise a request disturbed it: try again later
                self.roofline = found

    def _is_busy(self) -> bool:
        stats = self.llm.stats()
        return stats.running + stats.waiting > 0 or time.perf_counter() < self._last + IDLE_SECONDS

    def _measure(self) -> Roofline | None:
        try:
            with self.llm.driver.locked():
                if self._is_busy():
                    return None
                parts = measure_parts(self.llm)
            return Roofline(measure_bandwidth(self.llm), parts)
        except TandemError:  # for example because the model was unloaded
            return None

    def snapshot(self) -> dict[str, Any]:
        """The state of this model in `/live`."""
        with self._lock:
            seconds, first = [*self.seconds], [*self.first_tokens]
        now, by_time = int(time.time()), {second.at: second for second in seconds}
        # Without the current second, which is not over.
        history = [by_time.get(at, StepCounts(at)) for at in range(now - HISTORY_SECONDS, now)]
        stats = self.llm.stats()
        return {
            "device": self.llm.device.describe(),
            "context": self.llm.context,
            "vision": self.llm.takes_images,
            "running": stats.running,
            "waiting": stats.waiting,
            "now": self._now(history),
            "history": {
                "until": now,
                "tokens": [second.tokens for second in history],
                "prompt_tokens": [second.prompt_tokens for second in history],
                "sequences": [round(second.sequences / max(second.steps, 1), 1) for second in history],
                "kv_used": [round(second.kv_used, 3) for second in history],
                "admitted": [second.admitted for second in history],
                "cached": [second.cached for second in history],
                "drafted": [second.drafted for second in history],
                "accepted": [second.accepted for second in history],
            },
            "first_token": {"last": first[-1], "median": statistics.median(first)} if first else None,
            "totals": {
                "requests": self.requests,
                "tokens": self.totals.tokens,
                "prompt_tokens": self.totals.prompt_tokens,
                "steps": self.totals.steps,
                "busy": self.totals.busy,
                "between": self.totals.between,
            },
            "speculation": asdict(stats.speculation) if stats.speculation else None,
            "kv": [asdict(group) for group in stats.kv],
            "states": asdict(stats.states) if stats.states else None,
            "disk": asdict(stats.disk) if stats.disk else None,
            "memory": _memory(self.llm),
            "roofline": asdict(self.roofline) if self.roofline else None,
        }

    def _now(self, history: list[StepCounts]) -> dict[str, Any]:
        """Averages over the last seconds with work; token rates are 0 if those are not recent."""
        worked = [second for second in history if second.steps][-RECENT_SECONDS:]
        recent = any(second.steps for second in history[-RECENT_SECONDS:])
        steps, decoding = sum(s.steps for s in worked), sum(s.decoding for s in worked)
        decoded = sum((s.decoded for s in worked), Counter[tuple[int, int]]())
        nbytes = sum(self._bytes(*shape) * n for shape, n in decoded.items()) + sum(
            s.kv_bytes for s in worked
        )
        busy, between = sum(s.busy for s in worked), sum(s.between for s in worked)
        worked_for = max(busy + between, 1e-9)
        return {
            "tokens_per_s": recent * sum(s.tokens for s in worked) / worked_for,
            "prompt_tokens_per_s": recent * sum(s.prompt_tokens for s in worked) / worked_for,
            "sequences": sum(s.sequences for s in worked) / max(steps, 1),
            "step_seconds": decoding / max(sum(decoded.values()), 1),
            "step_bytes": nbytes / max(sum(decoded.values()), 1),
            "bytes_per_s": nbytes / decoding if decoding else 0.0,
            "between": between / worked_for,
        }

    def _bytes(self, tokens: int, rows: int) -> float:
        """Memory traffic of a step in bytes, without reading the KV cache."""
        if (tokens, rows) not in self._step_bytes:
            self._step_bytes[tokens, rows] = self.engine.step_bytes(tokens, rows)
        return self._step_bytes[tokens, rows]


def _kv_bytes_per_position(llm: LLM) -> list[tuple[int, float]]:
    """(window, KV bytes that a step reads for each position) of each group of layers with the same window."""
    found: Counter[int] = Counter()
    for launch in llm.program.launches:
        if launch.kernel.name in ATTENTION:
            window, nbytes = kv_read_per_position(launch)
            found[window] += nbytes
    return list(found.items())


def _memory(llm: LLM) -> dict[str, Any]:
    """Memory heaps, with the bytes that this model uses in each."""
    arenas = {"weights": 0, "kv": 0, "other": 0}
    heaps: list[dict[str, Any]] = []
    device: Any = llm.device
    if not hasattr(device, "heaps_free"):
        free, _ = llm.device.free_memory()
        for arena, nbytes in llm.program.arena_bytes.items():
            arenas[arena if arena in arenas else "other"] += nbytes
        heaps.append({"name": "main memory", "free": free, **arenas})
    else:
        frees = device.heaps_free()
        for index, (heap, free) in enumerate(zip(device.capabilities.heaps, frees, strict=True)):
            held = dict(arenas)
            for placed in device.placed:
                if placed.type.heap == index:
                    held[placed.part.arena if placed.part.arena in held else "other"] += placed.part.nbytes
            heaps.append({"name": "GPU memory" if heap.device_local else "host memory", "free": free, **held})
    return {"heaps": heaps, "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


_monitors: WeakKeyDictionary[AsyncLLM, EngineMonitor] = WeakKeyDictionary()


def monitor_of(llm: AsyncLLM) -> EngineMonitor:
    """The monitor of a model, started at the first call."""
    if llm not in _monitors:
        _monitors[llm] = EngineMonitor(llm.llm)
    return _monitors[llm]


# ---- /metrics and /live


class _EngineCollector(Collector):
    """Reads the state of the engines at each scrape."""

    def __init__(self, models: ModelManager) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for loaded in self._models.loaded():
            for name, help, is_counter, labels, value in _engine_metrics(monitor_of(loaded.llm)):
                if name not in families:
                    kind = CounterMetricFamily if is_counter else GaugeMetricFamily
                    families[name] = kind(f"tandem_{name}", help, labels=("model", *labels))
                families[name].add_metric((loaded.name, *labels.values()), value)  # type: ignore[attr-defined]
        return families.values()


def _engine_metrics(monitor: EngineMonitor) -> Iterator[tuple[str, str, bool, dict[str, str], float]]:
    """(name, help, is counter, labels, value) of one engine's metrics."""
    state = monitor.snapshot()
    totals, now = state["totals"], state["now"]
    yield "requests_running", "Requests in the batch", False, {}, state["running"]
    yield "requests_waiting", "Requests in the queue", False, {}, state["waiting"]
    yield "steps", "Engine steps", True, {}, totals["steps"]
    yield "step_seconds", "Time in engine steps", True, {}, totals["busy"]
    yield "device_bytes_per_second", "Recent memory traffic of decoding", False, {}, now["bytes_per_s"]
    for group in state["kv"]:
        labels = {"window": str(group["window"])}
        yield "kv_blocks", "KV blocks", False, labels, group["blocks"]
        yield "kv_blocks_used", "KV blocks in use", False, labels, group["used"]
        yield "kv_blocks_cached", "KV blocks in the prefix cache", False, labels, group["cached"]
    if states := state["states"]:
        yield "state_slots", "Slots for recurrent states", False, {}, states["slots"]
        yield "state_slots_used", "State slots in use", False, {}, states["used"]
        yield "state_checkpoints", "Recurrent states in the prefix cache", False, {}, states["cached"]
        yield "state_slot_bytes", "Bytes of a recurrent state", False, {}, states["slot_bytes"]
        for reason, kept in states["kept"].items():
            labels = {"reason": reason}
            yield "state_checkpoints_kept", "Checkpoints kept, by why", True, labels, kept
            yield (
                "state_checkpoint_hits",
                "Requests that began with one",
                True,
                labels,
                states["hits"][reason],
            )
        yield "state_checkpoint_evictions", "Checkpoints that made room", True, {}, states["evicted"]
        recomputed = "Prompt tokens with KV blocks but no checkpoint"
        yield "state_recomputed_tokens", recomputed, True, {}, states["recomputed_tokens"]
    if disk := state["disk"]:
        yield "disk_cache_bytes", "Bytes of the prefix cache on disk", False, {}, disk["used"]
        yield (
            "disk_cache_budget_bytes",
            "Maximum bytes of the prefix cache on disk",
            False,
            {},
            disk["budget"],
        )
        yield "disk_cache_hits", "Requests with a prefix from the disk", True, {}, disk["hits"]
        yield "disk_cache_tokens", "Prompt tokens restored from the disk", True, {}, disk["restored_tokens"]
        yield "disk_cache_read_bytes", "Bytes read from the disk cache", True, {}, disk["read_bytes"]
        yield "disk_cache_written_bytes", "Bytes written to the disk cache", True, {}, disk["written_bytes"]
        yield "disk_cache_evictions", "Files evicted from the disk cache", True, {}, disk["evicted"]
        yield "disk_cache_damaged", "Files of the disk cache that were damaged", True, {}, disk["damaged"]
        yield "disk_cache_dropped", "Blocks that could not be saved to the disk", True, {}, disk["dropped"]
    for heap in state["memory"]["heaps"]:
        for part in ("weights", "kv", "other", "free"):
            labels = {"heap": heap["name"], "part": part}
            yield "device_memory_bytes", "Device memory", False, labels, heap[part]
    if speculation := state["speculation"]:
        yield "draft_tokens", "Draft tokens that were verified", True, {}, speculation["drafted"]
        yield "draft_tokens_accepted", "Draft tokens that were accepted", True, {}, speculation["accepted"]
        yield "speculative_steps", "Steps with draft tokens", True, {}, speculation["steps"]
        saved = speculation["saved_seconds"]
        yield "speculation_saved_seconds", "Time saved by speculation", False, {}, saved


def live_router(models: ModelManager) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/live")
    async def live(roofline: bool = False) -> dict[str, Any]:
        """The state of all loaded models. `roofline`: measure it once, which uses the device briefly."""
        return live_snapshot(models, roofline)

    return router


_measuring: set[asyncio.Task[None]] = set()


def live_snapshot(models: ModelManager, roofline: bool) -> dict[str, Any]:
    """The body of `/live`."""
    watched = {loaded.name: monitor_of(loaded.llm) for loaded in models.loaded()}
    if roofline:
        _measure_one(watched.values())
    return {"models": {name: one.snapshot() for name, one in watched.items()}}


def _measure_one(lives: Iterable[EngineMonitor]) -> None:
    """Starts one measurement at a time: two would slow each other down."""
    unknown = [live for live in lives if live.roofline is None and can_measure(live.llm)]
    if unknown and not _measuring:
        task = asyncio.get_running_loop().create_task(unknown[0].measure())
        _measuring.add(task)
        task.add_done_callback(_measuring.discard)

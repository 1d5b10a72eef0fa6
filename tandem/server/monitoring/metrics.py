"""`/metrics` for Prometheus: counters and histograms of requests, gauges of the engines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from tandem.engine.models import Models
from tandem.engine.output import Usage
from tandem.server.monitoring.engine_monitor import EngineMonitor, monitor_of

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 180, 600)  # seconds
ITL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # seconds


class Metrics:
    def __init__(self, models: Models) -> None:
        self._registry = CollectorRegistry()
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

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"tandem_{name}", help, ("model", *labels), registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tandem_{name}", help, ("model",), registry=self._registry, buckets=buckets)

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
        self._last, self._histogram = time.perf_counter(), metrics.time_to_first_token.labels(model)
        self._inter_token_latency = metrics.inter_token_latency.labels(model)
        self.finish_reason = "cancelled"  # until `done`

    def token(self) -> None:
        now = time.perf_counter()
        self._histogram.observe(now - self._last)
        self._last, self._histogram = now, self._inter_token_latency

    def done(self, usage: Usage, finish_reason: str) -> None:
        self.finish_reason = finish_reason
        self._metrics.prompt_tokens.labels(self._model).inc(usage.prompt_tokens)
        self._metrics.cached_tokens.labels(self._model).inc(usage.cached_tokens)
        self._metrics.completion_tokens.labels(self._model).inc(usage.completion_tokens)


class _EngineCollector(Collector):
    """Reads the state of the engines at each scrape."""

    def __init__(self, models: Models) -> None:
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

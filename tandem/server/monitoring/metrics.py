"""`/metrics`: what the server counts itself, and what its engines tell, in Prometheus's form."""

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

FIRST_TOKEN = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 180, 600)  # seconds
NEXT_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    def __init__(self, models: Models) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Engines(models))
        names = ("model",)
        self.requests = Counter(
            "tandem_requests", "Answers, by their end", ("model", "finish"), registry=registry
        )
        self.prompt = Counter("tandem_prompt_tokens", "Tokens of prompts", names, registry=registry)
        self.cached = Counter(
            "tandem_prompt_tokens_cached",
            "Of them: computed before, for another request",
            names,
            registry=registry,
        )
        self.answer = Counter("tandem_completion_tokens", "Tokens of answers", names, registry=registry)
        self.first = Histogram(
            "tandem_time_to_first_token_seconds", "From a request to its first token", names,
            registry=registry, buckets=FIRST_TOKEN,
        )  # fmt: skip
        self.next = Histogram(
            "tandem_inter_token_seconds",
            "From a token to the next",
            names,
            registry=registry,
            buckets=NEXT_TOKEN,
        )

    @contextmanager
    def request(self, model: str) -> Iterator[RequestTimer]:
        """Watches one answer."""
        watch = RequestTimer(self, model)
        try:
            yield watch
        except Exception:
            watch.finish = "error"
            raise
        finally:
            self.requests.labels(model, watch.finish).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class RequestTimer:
    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model
        self._last, self._histogram = time.perf_counter(), metrics.first.labels(model)
        self._next = metrics.next.labels(model)
        self.finish = "cancelled"  # unless it turns out otherwise

    def token(self) -> None:
        now = time.perf_counter()
        self._histogram.observe(now - self._last)
        self._last, self._histogram = now, self._next

    def done(self, usage: Usage, finish: str) -> None:
        self.finish = finish
        for counter, count in (
            (self._metrics.prompt, usage.prompt_tokens),
            (self._metrics.cached, usage.cached_tokens),
            (self._metrics.answer, usage.completion_tokens),
        ):
            counter.labels(self._model).inc(count)


class _Engines(Collector):
    """Asked each time someone looks."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for loaded in self._models.loaded():
            for name, help, counts, labels, value in _numbers(monitor_of(loaded.llm)):
                if name not in families:
                    kind = CounterMetricFamily if counts else GaugeMetricFamily
                    families[name] = kind(f"tandem_{name}", help, labels=("model", *labels))
                families[name].add_metric((loaded.name, *labels.values()), value)  # type: ignore[attr-defined]
        return families.values()


def _numbers(live: EngineMonitor) -> Iterator[tuple[str, str, bool, dict[str, str], float]]:
    """Name, meaning, whether it only grows, labels, value."""
    found = live.snapshot()
    yield "requests_running", "Requests that are being answered", False, {}, found["running"]
    yield "requests_waiting", "Requests in the queue", False, {}, found["waiting"]
    yield "steps", "Steps of the engine", True, {}, found["totals"]["steps"]
    yield "step_seconds", "Seconds in steps", True, {}, found["totals"]["busy"]
    yield (
        "device_bytes_per_second",
        "Memory traffic of decoding, lately",
        False,
        {},
        found["now"]["bytes_per_s"],
    )
    for group in found["kv"]:
        labels = {"window": str(group["window"])}
        yield "kv_blocks", "Blocks of the KV cache", False, labels, group["blocks"]
        yield "kv_blocks_used", "Of them: in use", False, labels, group["used"]
        yield (
            "kv_blocks_shareable",
            "Of them: ready for requests that begin alike",
            False,
            labels,
            group["shareable"],
        )
    for heap in found["memory"]["heaps"]:
        for part in ("weights", "kv", "other", "free"):
            labels = {"heap": heap["name"], "part": part}
            yield "device_memory_bytes", "Memory of the device", False, labels, heap[part]
    if speculation := found["speculation"]:
        yield "draft_tokens", "Draft tokens that were verified", True, {}, speculation["drafted"]
        yield "draft_tokens_accepted", "Of them: accepted", True, {}, speculation["accepted"]
        yield "speculative_steps", "Steps with draft tokens", True, {}, speculation["steps"]
        yield (
            "speculation_saved_seconds",
            "Time saved by speculation",
            False,
            {},
            speculation["saved_seconds"],
        )

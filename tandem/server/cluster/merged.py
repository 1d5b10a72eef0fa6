"""Merges `/live`, `/metrics` and `/health` of all replicas (`--ray`)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

State = dict[str, Any]  # of a model: `EngineMonitor.snapshot()`
SHARES = ("kv_used",)  # keys of `history` of which the largest counts; the others are summed
RATES = ("tokens_per_s", "prompt_tokens_per_s")  # keys of `now` that are summed; the others are averaged


def live(replicas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One `/live` response from those of all replicas."""
    names = dict.fromkeys(name for replica in replicas for name in replica["models"])
    found = {name: [r["models"][name] for r in replicas if name in r["models"]] for name in names}
    return {"models": {name: _merge(states) for name, states in found.items()}}


def _merge(states: list[State]) -> State:
    first, count = states[0], len(states)
    waits = [state["first_token"] for state in states if state["first_token"]]
    speculation = [state["speculation"] for state in states if state["speculation"]]
    heaps = [
        {**heap, "name": f"{heap['name']}, replica {number}"}
        for number, state in enumerate(states, 1)
        for heap in state["memory"]["heaps"]
    ]
    return {
        "device": f"{count} replica{'s' * (count > 1)}, {first['device']}",
        "context": first["context"],
        "vision": first["vision"],
        "running": sum(state["running"] for state in states),
        "waiting": sum(state["waiting"] for state in states),
        "now": _now([state["now"] for state in states]),
        "history": _history([state["history"] for state in states]),
        "first_token": {name: statistics.median(one[name] for one in waits) for name in waits[0]}
        if waits
        else None,
        "totals": _sums(state["totals"] for state in states),
        "speculation": _sums(speculation) if speculation else None,
        "kv": [
            {**_sums(groups), "window": groups[0]["window"]}
            for groups in zip(*(s["kv"] for s in states), strict=True)
        ],
        "memory": {"heaps": heaps, "process": sum(state["memory"]["process"] for state in states)},
        "roofline": next((state["roofline"] for state in states if state["roofline"]), None),
    }


def _now(nows: list[dict[str, float]]) -> dict[str, float]:
    worked = [now for now in nows if now["sequences"]] or nows
    return {
        name: sum(now[name] for now in nows)
        if name in RATES
        else statistics.mean(now[name] for now in worked)
        for name in nows[0]
    }


def _history(histories: list[dict[str, Any]]) -> dict[str, Any]:
    until = max(history["until"] for history in histories)
    lists = {name for name in histories[0] if name != "until"}
    return {"until": until} | {
        name: [
            (max if name in SHARES else sum)(values)
            for values in zip(*(history[name] for history in histories), strict=True)
        ]
        for name in lists
    }


def _sums(counts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    each = list(counts)
    return {name: sum(one[name] for one in each) for name in each[0]}


def health(replicas: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """(status, message) of the replica that is best: it can serve."""
    return min(replicas, key=lambda found: ("ok", "loading", "failed").index(found[0]))


def metrics(replicas: Iterable[tuple[str, str]]) -> bytes:
    """One metrics text from (replica id, metrics text) of all replicas; each sample gets the label `replica`."""
    families: dict[str, Metric] = {}
    for replica, text in replicas:
        for family in text_string_to_metric_families(text):
            into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                into.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    registry = CollectorRegistry()
    registry.register(_MergedMetrics(families.values()))
    return generate_latest(registry)


class _MergedMetrics(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families

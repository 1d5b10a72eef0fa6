"""From rounds to the rows of a result (result.py), and what is to be said of them."""

from __future__ import annotations

import numpy as np

from tandem.bench.machine import disturbed
from tandem.bench.profile import Group
from tandem.bench.result import Clock, Compared, Energy, Launches, Limits, PeerRow, Result, Row
from tandem.bench.roofline import OVER, impossible, share
from tandem.bench.rounds import Measured
from tandem.bench.sensors import Reading, Sensors
from tandem.bench.statistics import drift, median_interval, outliers, ratio_of_medians, ratio_of_runs

STEADY = 0.05  # share by which the last rounds may differ from the first
AGREED = 0.6  # Kendall's tau from which that is no chance
FEW = 5  # rounds, below which neither a drift nor an interval can be told
SAME_CLOCK = 0.9  # of the highest, that the lowest may be


def make_row(
    measured: Measured,
    readings: list[Reading],
    sensors: Sensors,
    limits: Limits,
    peer: list[float] | None = None,
) -> Row:
    """`peer`: seconds of a peer's rounds, which were taken in turn with ours."""
    workload, samples = measured.workload, measured.samples
    rates = measured.gb_per_s * 1e9, measured.tflop_per_s * 1e12
    of, bound = share(*rates, limits)
    why = impossible(*rates, limits)
    first = [each.first for each in measured.rounds]
    row: Row = {
        "label": workload.label,
        "kind": workload.kind,
        "tokens": workload.tokens,
        "batch": workload.batch,
        "depth": workload.depth,
        "steps": measured.steps,
        "seconds": measured.seconds,
        "samples": samples,
        "median": float(np.median(samples)),
        "interval": measured.interval,
        "outliers": outliers(measured.seconds),  # a rate cannot show how slow a round was
        "ttft": float(np.median(first)),
        "ttft_interval": median_interval(first),
        "step_seconds": [seconds for each in measured.rounds for seconds in each.steps],
        "bytes": measured.cost.bytes,
        "ops": measured.cost.ops,
        "gb_per_s": measured.gb_per_s,
        "tflop_per_s": measured.tflop_per_s,
        "of_roofline": of,
        "bound": bound,
        "others": _others(readings),
        "drift": drift(samples)[0],
        "energy": _energy(readings, sensors, workload.total),
        "clock": _clock(readings, sensors),
        "peer": _peer(workload.total, samples, peer) if peer else None,
        "warnings": [],
        "valid": not why,
        "why": why,
    }
    row["warnings"] = warnings(row, sum(reading.throttled for reading in readings))
    return row


def warnings(row: Row, throttled: int = 0) -> list[str]:
    found = [
        f"round {i + 1} of {len(row['samples'])} is an outlier: {row['samples'][i]:,.1f} tokens/s"
        for i in row["outliers"]
    ]
    if len(row["samples"]) >= FEW and abs(row["drift"]) > STEADY and abs(drift(row["samples"])[1]) > AGREED:
        found.append(
            f"the last rounds are {abs(row['drift']):.0%} {'faster' if row['drift'] > 0 else 'slower'} than the first"
        )
    clock = row["clock"]
    if clock and clock["low_mhz"] < SAME_CLOCK * clock["high_mhz"]:
        found.append(f"the clock was between {clock['low_mhz']:,.0f} and {clock['high_mhz']:,.0f} MHz")
    if throttled:
        found.append(f"the CPU was throttled {throttled} times: it is too hot")
    peer = row["peer"]
    if peer and peer["median"] / row["median"] * row["of_roofline"] > OVER:
        found.append("the peer is above the roofline: it was mismeasured, or did less than we")
    if others := disturbed(row["others"]):
        found.append(others)
    return found


def compare(new: Result, old: Result) -> list[Compared]:
    """Rows of the same label; the others have nothing to be compared with."""
    before = {row["label"]: row for row in old["rows"]}
    return [_compared(row, before[row["label"]]) for row in new["rows"] if row["label"] in before]


def unlike(new: Result, old: Result) -> list[str]:
    """In what the two differ besides the speed."""
    was, now = dict(old), dict(new)
    found = [
        f"the older result has another {name}: {was[name]}, not {now[name]}"
        for name in ("model", "device", "kv", "threads")
        if was[name] != now[name]
    ]
    labels = {row["label"] for row in new["rows"]}
    if not labels & {row["label"] for row in old["rows"]}:
        found.append(
            f"none of these tests is in the older result, which has {'; '.join(row['label'] for row in old['rows'])}"
        )
    for row in old["rows"]:
        if row["label"] in labels and (others := disturbed(row["others"])):
            found.append(f"in the older result, during {row['label']}, {others}")
    if old["machine"]["cpu"] != new["machine"]["cpu"]:
        found.append(f"the older result is of another machine: {old['machine']['cpu']}")
    return found


def launches(groups: list[Group]) -> list[Launches]:
    return [
        {
            "kernel": group.kernel,
            "name": group.name,
            "launches": group.launches,
            "seconds": group.seconds,
            "bytes": group.cost.bytes,
            "ops": group.cost.ops,
        }
        for group in groups
    ]


def _compared(new: Row, old: Row) -> Compared:
    ratio = ratio_of_runs(new["samples"], old["samples"])
    verdict = "faster" if ratio.low > 1 else "slower" if ratio.high < 1 else "the same"
    return {
        "label": new["label"],
        "old": old["median"],
        "new": new["median"],
        "ratio": ratio.value,
        "ratio_interval": (ratio.low, ratio.high),
        "verdict": verdict if new["valid"] and old["valid"] else "invalid",
    }


def _peer(tokens: int, ours: list[float], seconds: list[float]) -> PeerRow:
    samples = [tokens / each for each in seconds]
    ratio = ratio_of_medians(ours, samples)
    return {
        "samples": samples,
        "median": float(np.median(samples)),
        "interval": median_interval(samples),
        "ratio": ratio.value,
        "ratio_interval": (ratio.low, ratio.high),
    }


def _others(readings: list[Reading]) -> float:
    return sum(r.others * r.seconds for r in readings) / sum(r.seconds for r in readings)


def _energy(readings: list[Reading], sensors: Sensors, tokens: int) -> Energy | None:
    joules = [r.joules for r in readings if r.joules is not None]
    if not joules:
        return None
    middle = float(np.median(joules))
    watts = sum(joules) / sum(r.seconds for r in readings)
    return {
        "joules": middle,
        "joules_per_token": middle / tokens,
        "watts": watts,
        "source": sensors.energy_source,
    }


def _clock(readings: list[Reading], sensors: Sensors) -> Clock | None:
    seen = [float(np.median(r.clocks)) for r in readings if r.clocks]
    return {"low_mhz": min(seen), "high_mhz": max(seen), "source": sensors.clock_source} if seen else None

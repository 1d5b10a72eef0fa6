"""Turns rounds into the rows of a BenchResult (result.py), with warnings, and compares two of them."""

from __future__ import annotations

import numpy as np

from tandem.bench.machine import disturbed
from tandem.bench.profile import Group
from tandem.bench.result import BenchResult, Clock, Compared, Energy, Launches, Limits, PeerRow, Row
from tandem.bench.roofline import MAX_SHARE, impossible, share
from tandem.bench.rounds import Measured
from tandem.bench.sensors import Reading, Sensors
from tandem.bench.statistics import drift, median_interval, outliers, ratio_of_medians, ratio_of_runs

MAX_DRIFT = 0.05  # relative difference of the last rounds from the first, above which there is a warning
MIN_TAU = 0.6  # Kendall's tau above which a drift is significant
MIN_ROUNDS = 5  # below which a drift or an interval means little
MIN_CLOCK_RATIO = 0.9  # of the lowest to the highest clock, below which there is a warning


def make_row(
    measured: Measured,
    readings: list[Reading],
    sensors: Sensors,
    limits: Limits,
    peer: list[float] | None = None,
) -> Row:
    """`peer`: seconds of the peer's rounds, which alternated with ours."""
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
        # Of times, for the rate of a slow round is close to the others.
        "outliers": outliers(measured.seconds),
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
    if (
        len(row["samples"]) >= MIN_ROUNDS
        and abs(row["drift"]) > MAX_DRIFT
        and abs(drift(row["samples"])[1]) > MIN_TAU
    ):
        found.append(
            f"the last rounds are {abs(row['drift']):.0%} {'faster' if row['drift'] > 0 else 'slower'} than the first"
        )
    clock = row["clock"]
    if clock and clock["low_mhz"] < MIN_CLOCK_RATIO * clock["high_mhz"]:
        found.append(f"the clock was between {clock['low_mhz']:,.0f} and {clock['high_mhz']:,.0f} MHz")
    if throttled:
        found.append(f"the CPU was throttled {throttled} times, for it is too hot")
    peer = row["peer"]
    if peer and peer["median"] / row["median"] * row["of_roofline"] > MAX_SHARE:
        found.append("the peer is above the roofline: it was measured wrongly, or did less work")
    if others := disturbed(row["others"]):
        found.append(others)
    return found


def compare(new: BenchResult, old: BenchResult) -> list[Compared]:
    """Compares the rows that have the same label."""
    before = {row["label"]: row for row in old["rows"]}
    return [_compared(row, before[row["label"]]) for row in new["rows"] if row["label"] in before]


def unlike(new: BenchResult, old: BenchResult) -> list[str]:
    """Notes on differences of model, device, machine and disturbance, which make a comparison doubtful."""
    was, now = dict(old), dict(new)
    found = [
        f"the older result has a different {name}: {was[name]}, not {now[name]}"
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
        found.append(f"the older result is from a different machine: {old['machine']['cpu']}")
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

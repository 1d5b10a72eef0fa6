"""A whole run of `tandem bench`: roofline limits, rounds of each workload (alternating with a peer's) and profiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from tandem import __version__
from tandem.bench.machine import machine_facts
from tandem.bench.peers.peer import LlamaCpp
from tandem.bench.peers.worker import SETTLE, alternating
from tandem.bench.profile import profile
from tandem.bench.result import SCHEMA, BenchResult, Limits
from tandem.bench.roofline import computes_on_cpu, impossible, measure_limits, raised
from tandem.bench.rounds import ROUNDS, Bench, Measured, Round, Workload
from tandem.bench.rows import MIN_ROUNDS, launches, make_row
from tandem.bench.sensors import Reading, Sensors
from tandem.devices.device import Device
from tandem.model.model import Model

MAX_RETRIES = 3  # measurements of the limits before a result counts as above them


def run(
    model: Model,
    device: Device,
    workloads: Sequence[Workload],
    *,
    name: str,
    command: str,
    rounds: int = ROUNDS,
    kv: str = "f16",
    profiled: bool = False,
    peer: Callable[[], LlamaCpp] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> BenchResult:
    """Runs all workloads. `peer` opens the peer, after the limits of the device are measured."""
    machine, sensors = machine_facts(), Sensors(gpu=not computes_on_cpu(device))
    tell("measuring the limits")
    weights_bytes = model.nbytes(device.weight_layout)
    limits = measure_limits(device, weights_bytes)
    tell("loading")
    bench, other = Bench(model, device, workloads, kv), peer() if peer else None
    try:
        taken = []
        for workload in workloads:
            taken.append(take(bench, workload, rounds, sensors, other))
            limits = checked(limits, taken[-1][0], device, weights_bytes)
            tell(f"{workload.label}: {taken[-1][0].tokens_per_s:,.1f} tokens/s")
    finally:
        if other:
            other.close()
    limits = raised(limits, device, weights_bytes)
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "command": command,
        "model": name,
        "weights_bytes": weights_bytes,
        "device": device.describe(),
        "kv": kv,
        "threads": getattr(device, "threads", None),
        "rounds": rounds,
        "machine": machine,
        "limits": limits,
        "rows": [
            make_row(measured, readings, sensors, limits, theirs) for measured, readings, theirs in taken
        ],
        "profiles": {w.label: launches(profile(bench, w)) for w in workloads} if profiled else {},
        "peer": other.about if other else None,
        "comparison": None,
        "images": [],
        "notes": [
            *sensors.notes,
            *(
                [f"fewer than {MIN_ROUNDS} rounds: the intervals are too narrow"]
                if rounds < MIN_ROUNDS
                else []
            ),
        ],
    }


def checked(limits: Limits, measured: Measured, device: Device, nbytes: int) -> Limits:
    """Measures the limits again if a result exceeds them, for other processes may have slowed the first measurement."""
    rates = measured.gb_per_s * 1e9, measured.tflop_per_s * 1e12
    for _ in range(MAX_RETRIES):
        if impossible(*rates, limits):
            limits = raised(limits, device, nbytes)
    return limits


def take(
    bench: Bench, workload: Workload, rounds: int, sensors: Sensors, peer: LlamaCpp | None = None
) -> tuple[Measured, list[Reading], list[float]]:
    """Our rounds, the sensor readings of each, and the seconds of the peer's rounds."""

    def ours(i: int) -> tuple[Round, Reading]:
        if peer:
            time.sleep(SETTLE)
        return sensors.during(lambda: bench.round(workload))

    if peer:
        peer.prepare(workload)
    bench.warm_up(workload)
    found, theirs = list[tuple[Round, Reading]](), list[float]()
    for i in range(rounds):
        if peer:
            both = alternating(i, ours, lambda _: peer.round())
            found.append(both[0])
            theirs.append(both[1])
        else:
            found.append(ours(i))
    return bench.measured(workload, [each for each, _ in found]), [reading for _, reading in found], theirs

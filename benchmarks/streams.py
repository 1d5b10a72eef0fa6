"""What products read, told by their time alone: launches of one shape in a row, of which none waits for the one before.

A launch between barriers takes longer than its bytes: cores run empty at its end and fill again after it. In a row
without barriers only the bytes are left, so that time x bandwidth can be set beside what the null device counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tandem.bench.profile import step_written, value_name
from tandem.bench.runs import Bench, Workload
from tandem.devices.vulkan.device import VulkanDevice
from tandem.program.program import Launch, Program

STREAMED = Workload("decode", 1, 1, 160)
WARM_UP = 0.3  # seconds: a GPU that waited runs slower
REPEATS = 15
LEAST_BYTES = 4e9  # of a row, so that its beginning and end do not count, and no cache has what comes again


def streams(bench: Bench) -> list[dict[str, Any]]:
    """Of each product of a step for one token: microseconds of a launch in such a row, the median of some rows."""
    program, step = bench.engine.program, next(iter(bench.steps(STREAMED)))
    shapes: dict[tuple[str, str], list[Launch]] = {}
    for launch in program.launches:
        if launch.kernel.name.startswith("matmul"):
            shapes.setdefault((launch.kernel.name, value_name(launch)), []).append(launch)
    with step_written(bench, STREAMED, step) as turn:
        turn.recording.replay()
        return [
            {"kernel": kernel, "name": name, "us": _row_seconds(bench, launches) * 1e6}
            for (kernel, name), launches in shapes.items()
        ]


def _row_seconds(bench: Bench, launches: Sequence[Launch]) -> float:
    """Of a launch. What the row writes is not used: all of it may write the same place at the same time."""
    device, whole = bench.engine.device, bench.engine.program
    assert isinstance(device, VulkanDevice)
    nbytes = sum(launch.cost({"tokens": 1, "rows": 1, "work": 1}).bytes for launch in launches)
    row = [replace(launch, barrier=False) for launch in launches] * max(1, round(LEAST_BYTES / nbytes))
    recording = device.record(Program(row, whole.max_counts, whole.arena_bytes))
    seconds, begun = list[float](), time.perf_counter()
    with recording.watched():
        while len(seconds) < REPEATS or time.perf_counter() - begun < WARM_UP:
            recording.replay()
            begin, end = recording.times()
            seconds.append(end - begin)
    return float(np.median(seconds[-REPEATS:])) / len(row)

"""Times matmul launches of one shape in a row without barriers, to check the bytes that they declare.

A launch between barriers takes longer than its bytes need: the GPU drains at its end and fills again after it. Without
barriers only the bytes count, so that time x bandwidth can be compared with the declared bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tandem.bench.profile import step_written, value_name
from tandem.bench.rounds import Bench, Workload
from tandem.devices.vulkan.device import VulkanDevice
from tandem.program.program import Launch, Program

STREAMED = Workload("decode", 1, 1, 160)
ROUNDS = 5  # over all shapes, alternating: an idle or disturbed GPU is slow for a while
SECONDS = 0.1  # of a shape, in each
MIN_BYTES = 4e9  # of a row: its start and end become negligible, and nothing stays in a cache


def streams(bench: Bench) -> list[dict[str, Any]]:
    """Microseconds of a launch in such a row, for each matmul of a step for one token: the minimum of many rows."""
    program, step = bench.engine.program, next(iter(bench.steps(STREAMED)))
    shapes: dict[tuple[str, str], list[Launch]] = {}
    for launch in program.launches:
        if launch.kernel.name.startswith("matmul"):
            shapes.setdefault((launch.kernel.name, value_name(launch)), []).append(launch)
    with step_written(bench, STREAMED, step) as step_slot:
        step_slot.recording.replay()
        rows = [_Row(bench, launches) for launches in shapes.values()]
        best = np.min([[row.seconds() for row in rows] for _ in range(ROUNDS)], axis=0)
    return [
        {"kernel": kernel, "name": name, "us": float(seconds) * 1e6}
        for (kernel, name), seconds in zip(shapes, best, strict=True)
    ]


class _Row:
    """Launches without barriers. Their outputs are not used, so all may write to the same place at the same time."""

    def __init__(self, bench: Bench, launches: Sequence[Launch]) -> None:
        device, whole = bench.engine.device, bench.engine.program
        assert isinstance(device, VulkanDevice)
        nbytes = sum(launch.cost({"tokens": 1, "rows": 1, "work": 1}).bytes for launch in launches)
        row = [replace(launch, barrier=False) for launch in launches] * max(1, round(MIN_BYTES / nbytes))
        self.recording = device.record(Program(row, whole.max_counts, whole.arena_bytes))
        self.count = len(row)

    def seconds(self) -> float:
        """Of a launch."""
        best, begun = math.inf, time.perf_counter()
        with self.recording.timed():
            while best == math.inf or time.perf_counter() - begun < SECONDS:
                self.recording.replay()
                begin, end = self.recording.times()
                best = min(best, end - begin)
        return best / self.count

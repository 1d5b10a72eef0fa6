"""A round of a comparison, and the time to the first byte that a command prints."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from tandem.bench.machine import busy_seconds
from tandem.bench.peers.worker import WorkerTiming

HERE = Path(__file__).parent


class Pair(NamedTuple):
    """A round: both sides, one right after the other, and the read bandwidth just before."""

    ours: WorkerTiming
    peer: WorkerTiming
    read_gb_per_s: float = 0.0

    @property
    def others(self) -> float:
        return max(self.ours.others, self.peer.others)


def first_output(command: list[str]) -> WorkerTiming:
    """Seconds from the start of a process to the first byte it prints. Python may keep its compiled modules."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    busy, before, started = busy_seconds(), os.times(), time.perf_counter()
    out, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdout=out, stderr=nowhere, env=environment) as process:
        assert process.stdout
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}")
    after = os.times()
    own = after.children_user + after.children_system - before.children_user - before.children_system
    capacity = (time.perf_counter() - started) * (os.cpu_count() or 1)
    return WorkerTiming(seconds, max(0.0, busy_seconds() - busy - own) / capacity, 0.0)

"""Sensor readings during a measurement: energy, clocks, throttling, and processor time of other processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tandem.bench.machine import SYS, busy_seconds

EVERY = 0.1  # seconds between samples of clocks and power
T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """The sensors during one round."""

    seconds: float
    joules: float | None  # None: no sensor
    clocks: list[float]  # MHz of the fastest core at each sample; empty: no sensor
    throttled: int  # throttling events
    others: float  # share of the machine's processor time that other processes took


class Sensors:
    """Sensors of the CPU (RAPL, cpufreq) or of an AMD GPU (amdgpu's hwmon). `notes`: sensors that cannot be read."""

    def __init__(self, gpu: bool = False, root: Path = SYS) -> None:
        self.notes: list[str] = []
        self._energy: list[Path] = []  # microjoules, counted up
        self._power: list[Path] = []  # microwatts
        self._throttles: list[Path] = []
        if gpu:
            monitor = "class/drm/card*/device/hwmon/hwmon*"
            power = sorted(root.glob(f"{monitor}/power1_average")) or sorted(
                root.glob(f"{monitor}/power1_input")
            )
            self._power = self._readable(power[:1], "the GPU's power")
            self._clocks, self._mhz = sorted(root.glob(f"{monitor}/freq1_input"))[:1], 1e-6
        else:
            packages = sorted(root.glob("class/powercap/intel-rapl:[0-9]*/energy_uj"))
            self._energy = self._readable([p for p in packages if p.parent.name.count(":") == 1], "RAPL")
            cores = [root / f"devices/system/cpu/cpu{i}" for i in os.sched_getaffinity(0)]
            self._clocks, self._mhz = _there(core / "cpufreq/scaling_cur_freq" for core in cores), 1e-3
            self._throttles = _there(core / "thermal_throttle/core_throttle_count" for core in cores)
        self.energy_source = "RAPL package" if self._energy else "amdgpu" if self._power else ""
        self.clock_source = ("amdgpu" if gpu else "cpufreq") if self._clocks else ""

    def _readable(self, files: list[Path], name: str) -> list[Path]:
        try:
            for file in files:
                file.read_text()
        except PermissionError:
            self.notes.append(f"{name} is only readable by root: run as root to measure energy")
        except OSError:
            pass
        else:
            return files
        return []

    def during(self, run: Callable[[], T]) -> tuple[T, Reading]:
        """The result of `run`, and the reading during it."""
        watts, clocks, done = list[float](), list[float](), threading.Event()

        def sample() -> None:
            watts.append(sum(map(_number, self._power)) / 1e6)
            clocks.append(max(map(_number, self._clocks), default=0.0) * self._mhz)

        def keep_sampling() -> None:
            while not done.wait(EVERY):
                sample()

        before, throttled = [_number(file) for file in self._energy], sum(map(_number, self._throttles))
        busy, own, begun = busy_seconds(), time.process_time(), time.perf_counter()
        sampler = threading.Thread(target=keep_sampling)
        if self._power or self._clocks:
            sampler.start()
        try:
            result = run()
            seconds = time.perf_counter() - begun
        finally:
            done.set()
            if sampler.ident:
                sampler.join()
        sample()  # a short round may have no other sample
        others = busy_seconds() - busy - (time.process_time() - own)
        joules = sum(watts) / len(watts) * seconds if self._power else None
        if self._energy:
            joules = (
                sum(_counted(file, since) for file, since in zip(self._energy, before, strict=True)) / 1e6
            )
        return result, Reading(
            seconds,
            joules,
            clocks if self._clocks else [],
            int(sum(map(_number, self._throttles)) - throttled),
            # Counted in hundredths of a second.
            min(1.0, max(0.0, others) / (seconds * (os.cpu_count() or 1))),
        )


def _there(files: Iterable[Path]) -> list[Path]:
    return [file for file in files if file.exists()]


def _number(file: Path) -> float:
    """The value of a sensor; 0 if it has disappeared."""
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return 0.0


def _counted(counter: Path, since: float) -> float:
    """The increase of a counter that wraps around to 0."""
    more = _number(counter) - since
    return more if more >= 0 else more + _number(counter.with_name("max_energy_range_uj"))

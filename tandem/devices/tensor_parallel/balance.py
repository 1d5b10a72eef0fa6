"""Divides the columns of each matmul by measured times, reviews the division every few steps, and switches it off
where it does not pay.

Each bucket of tokens has its own Balance. The first steps of a bucket run on the main device alone, as the baseline;
then each device is timed with a part of each matmul.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tandem.devices.tensor_parallel.cost import MIN_GAIN, Division, divide, gain
from tandem.devices.tensor_parallel.cut import Gemm

BASELINE_STEPS = 3  # baseline steps on the main device alone
REBALANCE_STEPS = 8  # partitioned steps between two reviews of the division
TOO_LONG = 2  # a step this many times the baseline triggers a review at once
REFRESH = 64  # steps between two baseline steps
RETRY = 256  # steps after which a division that did not pay is tried again
MIN_REBALANCE_GAIN = 0.03  # minimum gain, as a fraction of a matmul's time, for a new division
MAX_PARTITIONS = 32  # partitions are multiples of 1/MAX_PARTITIONS of a matmul, so that few are recorded

# Whether each worker may compute a matmul. The first is the main device, which may compute all.
Eligible = tuple[bool, ...]
Shape = tuple[Any, ...]  # a matmul's shape, and its Eligible
Cuts = dict[Shape, tuple[int, ...]]  # units of each worker
INFINITE = float("inf")
Measure = Callable[[Gemm, int, int], float]  # (matmul, worker, units) -> seconds


@dataclass
class LinearCost:
    """Seconds of a partition: a constant, and a cost per unit."""

    fixed: float
    per_unit: float

    def __call__(self, units: float) -> float:
        return self.fixed + self.per_unit * units

    def observe(self, units: int, seconds: float) -> None:
        """Makes the line pass through a measurement. The constant is at most half of it, so that one slow first run
        does not stay in the constant for ever."""
        self.fixed = min(self.fixed, seconds / 2)
        self.per_unit = (seconds - self.fixed) / units


def fit(few: int, few_seconds: float, many: int, many_seconds: float) -> LinearCost:
    if few == many:
        return LinearCost(0.0, many_seconds / many)
    each = max((many_seconds - few_seconds) / (many - few), 0.1 * many_seconds / many)
    return LinearCost(max(0.0, many_seconds - each * many), each)


class RecentTimes(list[float]):
    """Recent times; their median is robust against other load."""

    def take(self) -> float | None:
        """Returns the median since the last call, and clears the times; None: no times."""
        value = median(self) if self else None
        self.clear()
        return value


class Balance:
    """The division of one bucket. `overlaps_steps`: the main device runs launches of another step while accelerators
    work."""

    def __init__(self, gemms: Sequence[tuple[Gemm, Eligible]], *, overlaps_steps: bool = False) -> None:
        self.shapes: dict[Shape, list[Gemm]] = {}
        for gemm, eligible in gemms:
            if any(eligible[1:]):
                self.shapes.setdefault((gemm.shape, eligible), []).append(gemm)
        self.overlaps_steps = overlaps_steps
        self.lines: dict[Shape, list[LinearCost]] = {}
        self.cuts: Cuts = {}
        self.on: bool | None = None  # None: not measured yet
        # Baseline: seconds per token on the main device.
        self._alone: deque[float] = deque(maxlen=BASELINE_STEPS)
        self.steps = 0  # steps since `on` changed
        self._rest = 0.0  # seconds per step in launches that are not partitioned
        self._times: dict[tuple[Shape, int], RecentTimes] = {}
        self._step, self._others = RecentTimes(), RecentTimes()
        self._gain_too_small = False  # the last review found too little gain; another division may gain more
        self.reviews = 0

    # ---- deciding

    def next(self) -> str:
        """Kind of the next step: `off` or `alone` (main device; `alone` is timed), `measure`, or `together`."""
        self.steps += 1
        if self.on is False:
            if self.steps < RETRY:
                return "off"
            self.on = None
            self._alone.clear()
        if len(self._alone) < BASELINE_STEPS or self.steps % REFRESH == 0:
            return "alone"
        return "together" if self.on else "measure"

    def division(self, gemm: Gemm, eligible: Eligible) -> tuple[int, ...]:
        return self.cuts.get((gemm.shape, eligible)) or whole(gemm, eligible)

    @property
    def alone(self) -> float:
        """Baseline: seconds per token on the main device."""
        return median(self._alone)

    def measure(self, seconds: Measure, tokens: int) -> None:
        """Times each device with all and with half of a matmul of each shape, and decides whether to partition."""
        for shape, gemms in self.shapes.items():
            gemm = gemms[0]
            half = max(1, gemm.units // 2)
            self.lines[shape] = [
                fit(half, seconds(gemm, worker, half), gemm.units, seconds(gemm, worker, gemm.units))
                if may
                else LinearCost(INFINITE, INFINITE)
                for worker, may in enumerate(shape[1])
            ]
        self._switch(self._expected(tokens) >= MIN_GAIN)

    def _expected(self, tokens: int) -> float:
        """Computes a new division; returns the expected gain as a fraction of a step."""
        saved = 0.0
        for shape, gemms in self.shapes.items():
            division = self._best(shape)
            self.cuts[shape] = division.units
            saved += len(gemms) * (self.lines[shape][0](gemms[0].units) - division.seconds)
        return saved / (self.alone * tokens)

    def _best(self, shape: Shape) -> Division:
        gemm, lines = self.shapes[shape][0], self.lines[shape]
        units, overlapped = gemm.units, self._overlapped_seconds(gemm)
        grain = -(-units // MAX_PARTITIONS)

        def worker(i: int) -> Callable[[int], float]:
            extra = overlapped if i == 0 else 0.0
            return lambda n: lines[i](min(n * grain, units)) + extra

        division = divide(-(-units // grain), [worker(i) for i in range(len(lines))])
        counts, left = [], units
        for n in division.units:
            counts.append(min(n * grain, left))
            left -= counts[-1]
        return Division(tuple(counts), max(division.seconds, overlapped) - overlapped)

    def _overlapped_seconds(self, gemm: Gemm) -> float:
        """Returns the seconds of the other step's launches that the main device runs during this matmul."""
        total = sum(each.units for gemms in self.shapes.values() for each in gemms)
        return self._rest * gemm.units / total if self.overlaps_steps else 0.0

    def _switch(self, on: bool) -> None:
        if on != self.on:
            self.steps = 0
        self.on, self._gain_too_small = on, False
        for times in [*self._times.values(), self._step, self._others]:
            times.clear()

    # ---- observing

    def observe(self, gemm: Gemm, eligible: Eligible, worker: int, units: int, seconds: float) -> None:
        if (gemm.shape, eligible) in self.cuts:
            self._times.setdefault(((gemm.shape, eligible), worker), RecentTimes()).append(seconds / units)

    def observe_step(self, tokens: int, seconds: float, rest: float, together: bool) -> None:
        """`rest`: seconds in launches that are not partitioned."""
        if not together:
            self._alone.append(seconds / tokens)
            return
        self._step.append(seconds / tokens)
        self._others.append(rest)
        if len(self._step) >= REBALANCE_STEPS or seconds / tokens > TOO_LONG * self.alone:
            self._review(tokens)

    def _review(self, tokens: int) -> None:
        self.reviews += 1
        took, self._rest = self._step.take() or 0.0, self._others.take() or 0.0
        for (shape, worker), times in self._times.items():
            each, units = times.take(), self.cuts[shape][worker]
            if each is not None and units:
                self.lines[shape][worker].observe(units, each * units)
        before = dict(self.cuts)
        expected = self._expected(tokens)
        changed = any(self._differs(shape, before[shape]) for shape in self.shapes)
        if not changed:
            self.cuts = before
        too_small, was_too_small = gain(self.alone, took) < MIN_GAIN, self._gain_too_small
        self._switch(expected >= MIN_GAIN and not (too_small and (was_too_small or not changed)))
        self._gain_too_small = too_small

    def _differs(self, shape: Shape, before: tuple[int, ...]) -> bool:
        """Whether the new division should be faster by more than MIN_REBALANCE_GAIN."""
        overlapped = [self._overlapped_seconds(self.shapes[shape][0]), *[0.0] * (len(self.lines[shape]) - 1)]

        def slowest(units: tuple[int, ...]) -> float:
            workers = zip(self.lines[shape], units, overlapped, strict=True)
            return max(line(n) + extra for line, n, extra in workers if n)

        return slowest(self.cuts[shape]) < (1 - MIN_REBALANCE_GAIN) * slowest(before)


def whole(gemm: Gemm, eligible: Eligible) -> tuple[int, ...]:
    """Gives all of a matmul to the main device."""
    return (gemm.units, *[0] * (len(eligible) - 1))


class Fixed:
    """A division by fractions that the user chose."""

    on, reviews = True, 0

    def __init__(self, fractions: Sequence[float]) -> None:
        self.fractions = fractions
        self.cuts: Cuts = {}
        self.steps, self.seconds, self.rest = 0, 0.0, 0.0  # totals; `rest`: launches that are not partitioned

    def division(self, gemm: Gemm, eligible: Eligible) -> tuple[int, ...]:
        """Returns the units of each worker. The main device computes the parts of workers that may not."""
        key = gemm.shape, eligible
        if key not in self.cuts:
            fractions = [f if may else 0.0 for f, may in zip(self.fractions, eligible, strict=True)]
            fractions[0] += sum(self.fractions) - sum(fractions)
            ends = [
                round(gemm.units * sum(fractions[: i + 1]) / sum(fractions)) for i in range(len(fractions))
            ]
            self.cuts[key] = tuple(end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True))
        return self.cuts[key]

    def next(self) -> str:
        return "together"

    def measure(self, seconds: Measure, tokens: int) -> None: ...

    def observe(self, gemm: Gemm, eligible: Eligible, worker: int, units: int, seconds: float) -> None: ...

    def observe_step(self, tokens: int, seconds: float, rest: float, together: bool) -> None:
        self.steps, self.seconds, self.rest = self.steps + 1, self.seconds + seconds, self.rest + rest

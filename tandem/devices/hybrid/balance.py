"""How the columns of each matmul are divided: by measured times, reviewed every few steps, off where it does not pay.

Steps of about as many tokens (a bucket) are alike. The first few of a bucket run on the main device alone, which tells
what there is to gain; then each device is timed with some of each matmul.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tandem.devices.hybrid.cost import WORTH, Division, divide, gain
from tandem.devices.hybrid.cut import Gemm

ALONE = 3  # steps of the main device alone before others help
REVIEW = 8  # steps with several devices after which their shares are computed again
TOO_LONG = 2  # times as long as alone: then at once
REFRESH = 64  # steps after which the main device is timed alone again
RETRY = 256  # steps after which devices that did not pay are timed again
STEADY = 0.03  # of a matmul's time: less than this to gain is not worth other shares
FINEST = 32  # shares are multiples of this part of a matmul, so that few are ever recorded

Takers = tuple[bool, ...]  # which workers may compute a matmul; the main device, the first, may all
Shape = tuple[Any, ...]  # of a matmul, and its takers
Cuts = dict[Shape, tuple[int, ...]]  # units of each worker
NEVER = float("inf")
Measure = Callable[[Gemm, int, int], float]  # seconds of so many units of a matmul on one of the workers


@dataclass
class Line:
    """Seconds of a share: so much for any, and so much for each unit."""

    any: float
    each: float

    def __call__(self, units: float) -> float:
        return self.any + self.each * units

    def observe(self, units: int, seconds: float) -> None:
        """The line goes through what was seen. Most of a share is for its units: a first time that other work made long
        would else stay for ever."""
        self.any = min(self.any, seconds / 2)
        self.each = (seconds - self.any) / units


def fit(few: int, few_seconds: float, many: int, many_seconds: float) -> Line:
    if few == many:
        return Line(0.0, many_seconds / many)
    each = max((many_seconds - few_seconds) / (many - few), 0.1 * many_seconds / many)
    return Line(max(0.0, many_seconds - each * many), each)


class Seen(list[float]):
    """Times; what else a machine does makes some of them long, so the median counts."""

    def take(self) -> float | None:
        """The median since the last time, if there was anything."""
        found = median(self) if self else None
        self.clear()
        return found


class Balance:
    """Of one bucket. `beside`: the main device has the rest of another step to do while others have their shares."""

    def __init__(self, gemms: Sequence[tuple[Gemm, Takers]], *, beside: bool = False) -> None:
        self.shapes: dict[Shape, list[Gemm]] = {}
        for gemm, takers in gemms:
            if any(takers[1:]):
                self.shapes.setdefault((gemm.shape, takers), []).append(gemm)
        self.beside = beside
        self.lines: dict[Shape, list[Line]] = {}
        self.cuts: Cuts = {}
        self.on: bool | None = None  # None: not known yet
        self._alone: deque[float] = deque(maxlen=ALONE)  # seconds a token on the main device
        self.steps = 0  # since the last change of `on`, or since the main device ran alone
        self._rest = 0.0  # seconds a step of what is not divided
        self._seen: dict[tuple[Shape, int], Seen] = {}
        self._step, self._others = Seen(), Seen()
        self._poor = False  # the last review found too little gained; with other shares there may be more
        self.reviews = 0

    # ---- what a step is to do

    def next(self) -> str:
        """`off` (the main device alone), `alone` (so too, and it is timed), `measure` (then decide), or `together`."""
        self.steps += 1
        if self.on is False:
            if self.steps < RETRY:
                return "off"
            self.on = None
            self._alone.clear()
        if len(self._alone) < ALONE or self.steps % REFRESH == 0:
            return "alone"
        return "together" if self.on else "measure"

    def division(self, gemm: Gemm, takers: Takers) -> tuple[int, ...]:
        return self.cuts.get((gemm.shape, takers)) or whole(gemm, takers)

    @property
    def alone(self) -> float:
        """Seconds a token on the main device."""
        return median(self._alone)

    def measure(self, seconds: Measure, tokens: int) -> None:
        """Times each device with all and with half of a matmul of each shape, and decides."""
        for shape, gemms in self.shapes.items():
            gemm = gemms[0]
            half = max(1, gemm.units // 2)
            self.lines[shape] = [
                fit(half, seconds(gemm, worker, half), gemm.units, seconds(gemm, worker, gemm.units))
                if taker
                else Line(NEVER, NEVER)
                for worker, taker in enumerate(shape[1])
            ]
        self._make_step_slot(self._expected(tokens) >= WORTH)

    def _expected(self, tokens: int) -> float:
        """Divides anew; the part of a step that this should gain."""
        saved = 0.0
        for shape, gemms in self.shapes.items():
            found = self._best(shape)
            self.cuts[shape] = found.units
            saved += len(gemms) * (self.lines[shape][0](gemms[0].units) - found.seconds)
        return saved / (self.alone * tokens)

    def _best(self, shape: Shape) -> Division:
        gemm, lines = self.shapes[shape][0], self.lines[shape]
        units, aside = gemm.units, self._aside(gemm)
        grain = -(-units // FINEST)

        def worker(i: int) -> Callable[[int], float]:
            extra = aside if i == 0 else 0.0
            return lambda n: lines[i](min(n * grain, units)) + extra

        found = divide(-(-units // grain), [worker(i) for i in range(len(lines))])
        counts, left = [], units
        for n in found.units:
            counts.append(min(n * grain, left))
            left -= counts[-1]
        return Division(tuple(counts), max(found.seconds, aside) - aside)

    def _aside(self, gemm: Gemm) -> float:
        """Seconds of the other step's rest that fall to the time of a matmul."""
        total = sum(each.units for gemms in self.shapes.values() for each in gemms)
        return self._rest * gemm.units / total if self.beside else 0.0

    def _make_step_slot(self, on: bool) -> None:
        if on != self.on:
            self.steps = 0
        self.on, self._poor = on, False
        for seen in [*self._seen.values(), self._step, self._others]:
            seen.clear()

    # ---- what it took

    def observe(self, gemm: Gemm, takers: Takers, worker: int, units: int, seconds: float) -> None:
        if (gemm.shape, takers) in self.cuts:
            self._seen.setdefault(((gemm.shape, takers), worker), Seen()).append(seconds / units)

    def observe_step(self, tokens: int, seconds: float, rest: float, together: bool) -> None:
        """`rest`: seconds of what is not divided."""
        if not together:
            self._alone.append(seconds / tokens)
            return
        self._step.append(seconds / tokens)
        self._others.append(rest)
        if len(self._step) >= REVIEW or seconds / tokens > TOO_LONG * self.alone:
            self._review(tokens)

    def _review(self, tokens: int) -> None:
        self.reviews += 1
        took, self._rest = self._step.take() or 0.0, self._others.take() or 0.0
        for (shape, worker), seen in self._seen.items():
            each, units = seen.take(), self.cuts[shape][worker]
            if each is not None and units:
                self.lines[shape][worker].observe(units, each * units)
        before = dict(self.cuts)
        expected = self._expected(tokens)
        changed = any(self._differs(shape, before[shape]) for shape in self.shapes)
        if not changed:
            self.cuts = before
        poor, before_poor = gain(self.alone, took) < WORTH, self._poor
        self._make_step_slot(expected >= WORTH and not (poor and (before_poor or not changed)))
        self._poor = poor

    def _differs(self, shape: Shape, before: tuple[int, ...]) -> bool:
        """Whether the new shares should be faster by enough."""

        aside = [self._aside(self.shapes[shape][0]), *[0.0] * (len(self.lines[shape]) - 1)]

        def slowest(units: tuple[int, ...]) -> float:
            workers = zip(self.lines[shape], units, aside, strict=True)
            return max(line(n) + extra for line, n, extra in workers if n)

        return slowest(self.cuts[shape]) < (1 - STEADY) * slowest(before)


def whole(gemm: Gemm, takers: Takers) -> tuple[int, ...]:
    """All of a matmul on the main device."""
    return (gemm.units, *[0] * (len(takers) - 1))


class Fixed:
    """Shares that somebody has chosen."""

    on, reviews = True, 0

    def __init__(self, shares: Sequence[float]) -> None:
        self.shares = shares
        self.cuts: Cuts = {}
        self.steps, self.seconds, self.rest = 0, 0.0, 0.0  # of all steps; the rest is what was not divided

    def division(self, gemm: Gemm, takers: Takers) -> tuple[int, ...]:
        """The main device does what others may not."""
        key = gemm.shape, takers
        if key not in self.cuts:
            shares = [share if taker else 0.0 for share, taker in zip(self.shares, takers, strict=True)]
            shares[0] += sum(self.shares) - sum(shares)
            ends = [round(gemm.units * sum(shares[: i + 1]) / sum(shares)) for i in range(len(shares))]
            self.cuts[key] = tuple(end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True))
        return self.cuts[key]

    def next(self) -> str:
        return "together"

    def measure(self, seconds: Measure, tokens: int) -> None: ...

    def observe(self, gemm: Gemm, takers: Takers, worker: int, units: int, seconds: float) -> None: ...

    def observe_step(self, tokens: int, seconds: float, rest: float, together: bool) -> None:
        self.steps, self.seconds, self.rest = self.steps + 1, self.seconds + seconds, self.rest + rest

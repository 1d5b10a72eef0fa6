"""What a launch takes on a device, and how the columns of a matmul are best divided between several.

A share takes `dispatch + max(operations / rate, bytes / bandwidth)`. Devices that share a memory share its bandwidth:
all shares together take no less than their bytes at that rate. The sum decides where a launch runs, and can be shown.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from tandem.kernels.kernel import Cost, Counts
from tandem.program.program import Launch, Program

WORTH = 0.05  # of a step's time: what must be gained for several devices to be used
ROUNDS = 40  # of a bisection, after which the time is exact enough
Seconds = Callable[[int], float]  # of so many units, where there are any


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, and what a launch costs it beside that."""

    ops: float
    bandwidth: float
    dispatch: float = 0.0
    weights: float = (
        1.0  # bytes that weights take there, for one of the main device's: int8 from 4 bits is about 1.8
    )

    def seconds(self, cost: Cost) -> float:
        return self.dispatch + max(cost.ops / self.ops, cost.bytes / self.bandwidth)


class Division(NamedTuple):
    units: tuple[int, ...]  # of each worker
    seconds: float


def divide(
    units: int, workers: Sequence[Seconds], at_least: Callable[[Sequence[int]], float] = lambda shares: 0.0
) -> Division:
    """So that the slowest share takes the least time; the first worker may be alone, others only help. `at_least`: the
    seconds that these shares take together however fast each is."""
    whole = (units, *[0] * (len(workers) - 1))
    best = Division(whole, max(workers[0](units), at_least(whole)))
    others = range(1, len(workers))
    teams = [team for size in others for team in combinations(others, size)]
    for team in [(0, *team) for team in teams] + teams:
        counts, seconds = _among(units, [workers[i] for i in team])
        found = dict(zip(team, counts, strict=True))
        shares = tuple(found.get(i, 0) for i in range(len(workers)))
        seconds = max(seconds, at_least(shares))
        if seconds < best.seconds:
            best = Division(shares, seconds)
    return best


def _among(units: int, workers: Sequence[Seconds]) -> tuple[list[int], float]:
    """Shares of all these workers, or of fewer where a dispatch alone would take longer."""

    def within(seconds: float) -> list[int]:
        return [bisect_right(range(1, units + 1), seconds, key=worker) for worker in workers]

    low, high = 0.0, min(worker(units) for worker in workers)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(within(middle)) >= units else (middle, high)
    counts = within(high)
    for i in reversed(
        range(len(counts))
    ):  # what is too much comes from the last: the first has its inputs at hand
        counts[i] -= min(counts[i], sum(counts) - units)
    return counts, max((worker(n) for worker, n in zip(workers, counts, strict=True) if n), default=0.0)


def gain(alone: float, together: float) -> float:
    """The part of a time that is saved."""
    return 1 - together / alone if alone else 0.0


# ---- a whole step, by rates that were measured or published


class Placed(NamedTuple):
    launch: Launch
    shares: tuple[float, ...]  # of each device, adding up to 1
    alone: float  # seconds on the first device
    seconds: float


@dataclass(frozen=True)
class Sum:
    """A step's launches over several devices."""

    launches: list[Placed]

    @property
    def alone(self) -> float:
        return sum(placed.alone for placed in self.launches)

    @property
    def together(self) -> float:
        return sum(placed.seconds for placed in self.launches)

    @property
    def pays(self) -> bool:
        return gain(self.alone, self.together) >= WORTH


def place_columns(
    program: Program, counts: Counts, devices: Sequence[Rates], shared: float, keys: int, parts: int = 64
) -> Sum:
    """Matmuls of the step's tokens are divided by columns, in `parts`; the rest runs on the first device. `shared`:
    bytes a second of the memory that all of them read. `keys`: that a token looks at, where no window ends before."""
    return Sum([_placed(launch, counts, devices, shared, keys, parts) for launch in program.launches])


def is_divisible(launch: Launch) -> bool:
    """A matmul of all tokens; the head has only the sampled ones, and little to divide."""
    return launch.kernel.name.startswith("matmul_") and not launch.scalars["count"]


def launch_cost(launch: Launch, counts: Counts, keys: int) -> Cost:
    """Of attention, too, whose declaration does not know how far tokens look back."""
    cost, s = launch.cost(counts), launch.scalars
    if launch.kernel.name != "attention":
        return cost
    seen = min(keys, s["window"] or keys)
    columns, element = s["q_heads"] * s["head_dim"], (2, 4, 1)[int(s["kv"])]
    keys_and_values = 2 * seen * s["kv_heads"] * s["head_dim"] * element
    return Cost(cost.bytes + keys_and_values, 4.0 * counts["tokens"] * seen * columns)


def _placed(
    launch: Launch, counts: Counts, devices: Sequence[Rates], shared: float, keys: int, parts: int
) -> Placed:
    whole = launch_cost(launch, counts, keys)
    alone = devices[0].seconds(whole)
    if not is_divisible(launch):
        return Placed(launch, (1.0, *[0.0] * (len(devices) - 1)), alone, alone)
    extents = launch.kernel.extents(launch.scalars, counts)

    def nbytes(device: Rates, n: int) -> float:
        """Every device reads all of the activations."""
        own = extents["weights"] * device.weights + extents["out"]
        return extents["x"] + own * n / parts if n else 0.0

    def worker(device: Rates) -> Seconds:
        return lambda n: device.seconds(Cost(nbytes(device, n), whole.ops * n / parts))

    def together(shares: Sequence[int]) -> float:
        return sum(nbytes(device, n) for device, n in zip(devices, shares, strict=True)) / shared

    found = divide(parts, [worker(device) for device in devices], together)
    return Placed(launch, tuple(n / parts for n in found.units), alone, found.seconds)


def place_attention(
    program: Program, counts: Counts, devices: Sequence[Rates], shared: float, keys: int
) -> Sum:
    """Attention on the second device and the rest on the first, one after the other: what goes over (queries, keys and
    values) and what comes back pass through memory once more each way."""
    first, second = devices[:2]
    placed = []
    for launch in program.launches:
        cost = launch_cost(launch, counts, keys)
        alone = seconds = first.seconds(cost)
        elsewhere = launch.kernel.name == "attention"
        if elsewhere:
            extents = launch.kernel.extents(launch.scalars, counts)
            crossing = 2 * (extents["q"] + extents["out"])
            seconds = second.seconds(cost) + crossing / shared + first.dispatch
        placed.append(Placed(launch, (float(not elsewhere), float(elsewhere)), alone, seconds))
    return Sum(placed)

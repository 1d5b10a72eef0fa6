"""The cost of a launch on a device, and the best division of a matmul's columns between devices.

A partition takes `dispatch + max(operations / rate, bytes / bandwidth)`. Devices with a common memory share its
bandwidth: all partitions together take at least their bytes at that rate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from tandem.kernels.kernel import Cost, Counts
from tandem.program.program import Launch, Program

MIN_GAIN = 0.05  # minimum gain, as a fraction of a step's time, for partitioning
ROUNDS = 40  # bisection steps
Seconds = Callable[[int], float]  # units (1 or more) -> seconds


@dataclass(frozen=True)
class Rates:
    """Peak rates of a device, and its overhead per launch."""

    ops: float
    bandwidth: float
    dispatch: float = 0.0
    weights: float = 1.0  # weight bytes there per byte on the main device: int8 from 4 bits is about 1.8

    def seconds(self, cost: Cost) -> float:
        return self.dispatch + max(cost.ops / self.ops, cost.bytes / self.bandwidth)


class Division(NamedTuple):
    units: tuple[int, ...]  # units of each worker
    seconds: float


def divide(
    units: int, workers: Sequence[Seconds], at_least: Callable[[Sequence[int]], float] = lambda _: 0.0
) -> Division:
    """Minimises the time of the slowest partition. The first worker may work alone; the others only help.
    `at_least`: a lower bound on the seconds of all partitions together."""
    whole = (units, *[0] * (len(workers) - 1))
    best = Division(whole, max(workers[0](units), at_least(whole)))
    others = range(1, len(workers))
    subsets = [subset for size in others for subset in combinations(others, size)]
    for subset in [(0, *subset) for subset in subsets] + subsets:
        counts, seconds = _among(units, [workers[i] for i in subset])
        by_worker = dict(zip(subset, counts, strict=True))
        divided = tuple(by_worker.get(i, 0) for i in range(len(workers)))
        seconds = max(seconds, at_least(divided))
        if seconds < best.seconds:
            best = Division(divided, seconds)
    return best


def _among(units: int, workers: Sequence[Seconds]) -> tuple[list[int], float]:
    """Divides among all these workers, or among fewer where a dispatch alone would take longer."""

    def within(seconds: float) -> list[int]:
        return [bisect_right(range(1, units + 1), seconds, key=worker) for worker in workers]

    low, high = 0.0, min(worker(units) for worker in workers)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(within(middle)) >= units else (middle, high)
    counts = within(high)
    # The excess comes off the last worker: the first has its inputs at hand.
    for i in reversed(range(len(counts))):
        counts[i] -= min(counts[i], sum(counts) - units)
    return counts, max((worker(n) for worker, n in zip(workers, counts, strict=True) if n), default=0.0)


def gain(alone: float, together: float) -> float:
    """Returns the fraction of time saved."""
    return 1 - together / alone if alone else 0.0


# ---- a whole step, from measured or published rates


class DividedLaunch(NamedTuple):
    launch: Launch
    fractions: tuple[float, ...]  # fraction of each device; they add up to 1
    alone: float  # seconds on the first device
    seconds: float


@dataclass(frozen=True)
class StepCost:
    """A step's launches placed on several devices."""

    launches: list[DividedLaunch]

    @property
    def alone(self) -> float:
        return sum(placed.alone for placed in self.launches)

    @property
    def together(self) -> float:
        return sum(placed.seconds for placed in self.launches)

    @property
    def pays(self) -> bool:
        return gain(self.alone, self.together) >= MIN_GAIN


def place_columns(
    program: Program, counts: Counts, devices: Sequence[Rates], shared: float, keys: int, parts: int = 64
) -> StepCost:
    """Divides matmuls of all tokens by columns, in `parts`; the rest runs on the first device. `shared`: bandwidth of
    the common memory in bytes/s. `keys`: KV positions that a token attends to, unless a window ends sooner."""
    return StepCost([_placed(launch, counts, devices, shared, keys, parts) for launch in program.launches])


def is_divisible(launch: Launch) -> bool:
    """Whether a launch is a matmul of all tokens; the output head computes rows of logits only and is not divided."""
    return launch.kernel.name.startswith("matmul_") and not launch.scalars["count"]


def launch_cost(launch: Launch, counts: Counts, keys: int) -> Cost:
    """Returns the cost of a launch; for attention with the number of `keys`, which its kernel does not declare."""
    cost, s = launch.cost(counts), launch.scalars
    if launch.kernel.name != "attention":
        return cost
    seen = min(keys, s["window"] or keys)
    columns, element = s["q_heads"] * s["head_dim"], (2, 4, 1)[int(s["kv"])]
    keys_and_values = 2 * seen * s["kv_heads"] * s["head_dim"] * element
    return Cost(cost.bytes + keys_and_values, 4.0 * counts["tokens"] * seen * columns)


def _placed(
    launch: Launch, counts: Counts, devices: Sequence[Rates], shared: float, keys: int, parts: int
) -> DividedLaunch:
    whole = launch_cost(launch, counts, keys)
    alone = devices[0].seconds(whole)
    if not is_divisible(launch):
        return DividedLaunch(launch, (1.0, *[0.0] * (len(devices) - 1)), alone, alone)
    extents = launch.kernel.extents(launch.scalars, counts)
    # Extents are of whole q8 tiles, costs of the tokens in them.
    used = (whole.bytes - extents["weights"]) / (extents["x"] + extents["out"])
    x, out = used * extents["x"], used * extents["out"]

    def nbytes(device: Rates, n: int) -> float:
        """Every device reads all of the activations."""
        return x + (extents["weights"] * device.weights + out) * n / parts if n else 0.0

    def worker(device: Rates) -> Seconds:
        return lambda n: device.seconds(Cost(nbytes(device, n), whole.ops * n / parts))

    def together(units: Sequence[int]) -> float:
        return sum(nbytes(device, n) for device, n in zip(devices, units, strict=True)) / shared

    division = divide(parts, [worker(device) for device in devices], together)
    return DividedLaunch(launch, tuple(n / parts for n in division.units), alone, division.seconds)


def place_attention(
    program: Program, counts: Counts, devices: Sequence[Rates], shared: float, keys: int
) -> StepCost:
    """Places attention on the second device, the rest on the first, in sequence. Queries, keys, values and outputs pass
    through memory once more each way."""
    first, second = devices[:2]
    placed = []
    for launch in program.launches:
        cost = launch_cost(launch, counts, keys)
        alone = seconds = first.seconds(cost)
        on_second = launch.kernel.name == "attention"
        if on_second:
            extents = launch.kernel.extents(launch.scalars, counts)
            crossing = 2 * (extents["q"] + extents["out"])
            seconds = second.seconds(cost) + crossing / shared + first.dispatch
        placed.append(DividedLaunch(launch, (float(not on_second), float(on_second)), alone, seconds))
    return StepCost(placed)

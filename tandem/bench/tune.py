"""Finds the fastest of the choices for each kernel and shape of a model on a device (docs/TUNING.md).

A choice is first compared with the rule's own results, then timed: some rounds of all of them in turn, then the best
against the rule alone. It is taken if those rounds, which had no part in finding it, show it to be faster by more than
they differ among each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.bench import tuning_cases as cases
from tandem.bench.kernel_checks import (
    INTEGER_ERROR,
    MATRIX_ERROR,
    AnyDevice,
    check_case,
    check_product,
    prepare,
)
from tandem.bench.statistics import median_interval, ratio_of_medians
from tandem.bench.trials import Bed, Space
from tandem.bench.tuning_cases import Shape
from tandem.devices.choices import NOTHING, Choice, shape_of
from tandem.devices.cpu import tuned as cpu
from tandem.devices.cpu.device import CPUDevice
from tandem.devices.vulkan import tuned as vulkan
from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.grids import has_matrix_units
from tandem.errors import DeviceError, DeviceLostError
from tandem.kernels.kernel import Array, Case, Counts
from tandem.kernels.layouts import Q8_BLOCK, q8_unpack
from tandem.program.program import Program

MARGIN = 0.03  # by which a choice must be faster
SLOWER = 0.02  # by which it may be slower at one of several sizes that share a choice
SCREENING, ROUNDS = 3, 9
RUN_SECONDS = {"gpu": 4e-3, "cpu": 20e-3}  # of a round of one choice, at least
MOST_LAUNCHES = 200
SLOW = 0.3  # seconds of a launch: not tuned
WARM_UP = 1.0  # a GPU that was idle runs slower for a while
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MOST_ROWS = 64  # that are sampled in a step
QUICK_SIZES, QUICK_SHAPES = (1, 8), 4
CPU_SIZES, CPU_SEQUENCES = (1, 16, 128), (1, 8)
Note = Callable[[str], None]


@dataclass
class Task:
    """One thing to choose for: a shape, at one size or at several that share the choice."""

    kernel: str
    shape: str
    size: str
    key: str  # what the choice is filed under
    spots: list[tuple[Bed, Counts]]  # what is timed
    candidates: list[Choice]
    check: Callable[[Choice], None] | None  # against NumPy, where bits may differ; None: they may not
    bound: float = 0.0  # of the difference from the rule's results, of their own size
    launches: list[int] = field(default_factory=list)
    _rule: list[dict[str, Array]] = field(default_factory=list)

    def right(self, choice: Choice) -> bool:
        """Whether a choice gives the rule's bits or, where it may differ, what NumPy does within the kernel's error."""
        self._rule = self._rule or [bed.results(counts) for bed, counts in self.spots]
        try:
            found = [bed.results(counts, choice) for bed, counts in self.spots]
            pairs = [
                (got[name], want[name]) for got, want in zip(found, self._rule, strict=True) for name in want
            ]
            if all(got.tobytes() == want.tobytes() for got, want in pairs):
                return True
            if self.check is None or any(difference(*pair) > self.bound for pair in pairs):
                return False
            self.check(choice)
        except DeviceLostError:
            raise
        except (AssertionError, DeviceError):  # wrong, or refused by the driver
            return False
        return True

    def seconds(self, choice: Choice) -> list[float]:
        """Of a launch, at each spot."""
        return [
            bed.seconds(counts, n, choice) for (bed, counts), n in zip(self.spots, self.launches, strict=True)
        ]


@dataclass(frozen=True)
class Finding:
    kernel: str
    shape: str
    size: str
    key: str
    before: float  # seconds of a launch by the rule: the geometric mean where there are several sizes
    after: float  # and with the choice
    choice: Choice  # what is chosen; nothing: the rule
    tried: int
    wrong: list[Choice]  # candidates whose results were not those of the rule

    @property
    def gain(self) -> float:
        return self.before / self.after - 1


def difference(got: Array, want: Array) -> float:
    """The largest difference, of the size of `want`; a quant may be the neighbouring one."""
    if want.dtype == Q8_BLOCK:
        got, want = (q8_unpack(a, 16 * len(a)) for a in (got, want))
        blocks = np.abs(want).reshape(len(want), -1, 32).max(axis=2, keepdims=True)
        room = np.repeat(blocks * np.float32(1.5 / 127), 32, axis=2).reshape(want.shape)
    elif want.dtype == np.float32:
        room = np.zeros((), np.float32)
    else:
        return 0.0 if got.tobytes() == want.tobytes() else np.inf
    there = np.isfinite(want)
    if not np.array_equal(there, np.isfinite(got)):
        return np.inf
    size = max(float(np.sqrt(np.mean(np.square(want, where=there, out=np.zeros_like(want))))), 1e-9)
    off = np.maximum(np.abs(np.subtract(got, want, where=there, out=np.zeros_like(want))) - room, 0)
    return float(off.max(initial=0.0)) / size


def choose(task: Task, run_seconds: float, rounds: int = ROUNDS) -> Finding:
    """The best of the right choices, or the rule."""
    once = [bed.seconds(counts, 2) for bed, counts in task.spots]
    task.launches = [min(MOST_LAUNCHES, 1 + int(run_seconds / t)) for t in once]
    right = [choice for choice in task.candidates if task.right(choice)]
    wrong = [choice for choice in task.candidates if choice not in right]
    rule = _rounds(task, [NOTHING, *right], SCREENING)
    best = min(range(1 + len(right)), key=lambda i: float(np.median(rule[i])))
    chosen: Choice = NOTHING
    before, after = rule[0], rule[0]
    if best:
        ours: list[float] = []
        theirs: list[float] = []
        spots: list[list[list[float]]] = [[], []]
        for i in range(rounds):
            pair = [(right[best - 1], ours, spots[0]), (NOTHING, theirs, spots[1])]
            for choice, costs, each in pair if i % 2 else pair[::-1]:
                each.append(task.seconds(choice))
                costs.append(_mean(each[-1]))
        before = theirs
        worst = float((np.median(spots[0], axis=0) / np.median(spots[1], axis=0)).max())
        faster = ratio_of_medians(ours, theirs).value <= 1 - MARGIN and worst <= 1 + SLOWER
        if faster and median_interval(ours)[1] < median_interval(theirs)[0]:
            chosen, after = right[best - 1], ours
        else:
            after = theirs
    return Finding(
        task.kernel, task.shape, task.size, task.key, float(np.median(before)), float(np.median(after)), chosen,
        len(task.candidates), wrong,
    )  # fmt: skip


def _rounds(task: Task, choices: Sequence[Choice], rounds: int) -> list[list[float]]:
    """Of each choice, in turn: what slows the machine for a while slows all."""
    found: list[list[float]] = [[] for _ in choices]
    for _ in range(rounds):
        for costs, choice in zip(found, choices, strict=True):
            costs.append(_mean(task.seconds(choice)))
    return found


def _mean(seconds: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(np.maximum(seconds, 1e-9)))))


# ---- what there is to choose


def tune(
    device: AnyDevice, program: Program, *, context: int, quick: bool = False, limit: float = np.inf,
    note: Note = lambda _: None,
) -> Iterator[Finding]:  # fmt: skip
    """Findings for the launches of a Program as they come, until `limit` seconds are over."""
    begun, gpu = time.perf_counter(), isinstance(device, VulkanDevice)
    real = isinstance(device, VulkanDevice) and device.capabilities.kind != "software"
    space = Space(device)
    if gpu:
        prepare(device)
    warm = False
    for task in tasks(space, program, context, quick):
        if time.perf_counter() - begun > limit:
            note("out of time: the rest stays as it is")
            return
        if not task.candidates or max(bed.seconds(c, 1) for bed, c in task.spots) > SLOW:
            continue
        while not warm and real and time.perf_counter() - begun < (0.3 if quick else WARM_UP):
            task.spots[0][0].seconds(task.spots[0][1], MOST_LAUNCHES // 4)
        warm = True
        yield choose(task, RUN_SECONDS["gpu" if real else "cpu"] / (2 if quick else 1), ROUNDS)


def tasks(space: Space, program: Program, context: int, quick: bool) -> Iterator[Task]:
    device, rng = space.device, np.random.default_rng(0)
    kinds = ("matmul",) if quick else cpu.TUNED if isinstance(device, CPUDevice) else vulkan.TUNED
    found = cases.shapes(program, kinds)
    for shape in found[:QUICK_SHAPES] if quick else found:
        space.clear()
        if isinstance(device, VulkanDevice):
            yield from _vulkan_tasks(space, device, shape, context, quick, rng)
        else:
            yield _cpu_task(space, shape, context, quick, rng)


def _vulkan_tasks(
    space: Space, device: VulkanDevice, shape: Shape, context: int, quick: bool, rng: np.random.Generator
) -> Iterator[Task]:
    most = MOST_ROWS if shape.count == "rows" else SIZES[-1]
    sizes = [size for size in (QUICK_SIZES if quick else SIZES) if size <= most]
    if shape.kind == "attention":
        yield from _attention_tasks(space, device, shape, context, rng)
        return
    if shape.kind == "norm":
        bed = Bed(space, shape.kernel, cases.normed(shape, most, rng), "weight")
    else:
        bed = Bed(space, shape.kernel, cases.product(shape, max(sizes), space.most // 2, rng), "weights")
    half = has_matrix_units(device.capabilities)
    for size in sizes:
        counts = shape.counts(size)
        yield Task(
            shape.kernel.name, _described(shape), f"{size} {shape.count if size > 1 else shape.count[:-1]}",
            shape_of(shape.kind, shape.launch.scalars, size), [(bed, counts)],
            vulkan.candidates(shape.kernel.name, bed.case.scalars, counts, device.capabilities),
            _check(device, shape, size, half and size > 1), 2 * (MATRIX_ERROR if half else INTEGER_ERROR),
        )  # fmt: skip


def _check(device: AnyDevice, shape: Shape, size: int, half: bool) -> Callable[[Choice], None]:
    def check(choice: Choice) -> None:
        rng = np.random.default_rng(size)
        with device.choices.trying(choice):
            if shape.kind == "norm":
                check_case(device, shape.kernel, cases.normed(shape, size, rng))
            else:
                case = cases.small_product(shape, size, rng)
                check_product(device, shape.kernel, case, MATRIX_ERROR if half else INTEGER_ERROR)

    return check


def _attention_tasks(
    space: Space, device: VulkanDevice, shape: Shape, context: int, rng: np.random.Generator
) -> Iterator[Task]:
    sizes = [
        (n, [cases.answering(shape, n, keys, rng) for keys in cases.depths(n, context)]) for n in (1, 8, 64)
    ]
    for size, timed in [*sizes, (SIZES[-1], [cases.prompted(shape, SIZES[-1], rng)])]:
        space.clear()
        beds = [Bed(space, shape.kernel, case, "cache") for case in timed]
        counts = timed[0].counts
        single = counts["work"] == counts["tokens"]

        def check(choice: Choice, single: bool = single, size: int = size) -> None:
            some = np.random.default_rng(1)
            small = (
                cases.answering(shape, min(size, 4), 333, some) if single else cases.prompted(shape, 70, some)
            )
            with device.choices.trying(choice):
                check_case(device, shape.kernel, small)

        yield Task(
            shape.kernel.name, _described(shape), f"{size} sequence{'s' * (size > 1)}" if single else f"{size} tokens",
            shape_of(shape.kind, shape.launch.scalars, counts["tokens"], counts["work"]),
            [(bed, counts) for bed in beds],
            vulkan.candidates(shape.kernel.name, beds[-1].case.scalars, counts, device.capabilities),
            check, 2 * (MATRIX_ERROR if device.capabilities.fragments else INTEGER_ERROR),
        )  # fmt: skip


def _cpu_task(space: Space, shape: Shape, context: int, quick: bool, rng: np.random.Generator) -> Task:
    """One choice for all sizes: a recording has one, and a request's bits must not depend on its company."""
    if shape.kind == "attention":
        keys = min(context, 1024)
        timed: list[Case] = [cases.answering(shape, n, keys, rng) for n in CPU_SEQUENCES]
        timed.append(cases.prompted(shape, CPU_SIZES[-1], rng))
        spots = [(Bed(space, shape.kernel, case, "cache"), case.counts) for case in timed]
    else:
        sizes = CPU_SIZES[:2] if quick or shape.count == "rows" else CPU_SIZES
        if shape.kind == "norm":
            bed = Bed(space, shape.kernel, cases.normed(shape, max(sizes), rng), "weight")
        else:
            bed = Bed(space, shape.kernel, cases.product(shape, max(sizes), space.most // 2, rng), "weights")
        spots = [(bed, shape.counts(size)) for size in sizes]
    return Task(
        shape.kernel.name, _described(shape), "all", shape_of(shape.kind, shape.launch.scalars), spots,
        cpu.candidates(shape.kernel.name, shape.launch.scalars), None,
    )  # fmt: skip


def _described(shape: Shape) -> str:
    s = shape.launch.scalars
    if shape.kind == "attention":
        seen = f", window {int(s['window'])}" if s["window"] else ""
        return f"{int(s['q_heads'])} on {int(s['kv_heads'])} heads of {int(s['head_dim'])}{seen}"
    if shape.kind == "norm":
        return f"{int(s['dim'])}"
    return f"{int(s['rows'])} x {int(s['columns'])}" + (" with GLU" if s["epilogue"] else "")

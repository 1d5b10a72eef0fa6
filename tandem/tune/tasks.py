"""The tasks of `tandem tune`: one for each kernel and shape of a Program, with candidates and a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np

from tandem.bench.kernel_checks import INTEGER_ERROR, MATRIX_ERROR, check_case, check_matmul
from tandem.devices.cpu import tuned as cpu
from tandem.devices.cpu.device import CPUDevice
from tandem.devices.tuned_choices import Choice, shape_of
from tandem.devices.vulkan import tuned as vulkan
from tandem.devices.vulkan.device import VulkanDevice
from tandem.errors import DeviceError, DeviceLostError, DoesNotFitError
from tandem.kernels.abi import Q8_BLOCK, Q8_TILE
from tandem.kernels.kernel import Array, Case, Counts
from tandem.kernels.matmul_dispatch import has_coopmat
from tandem.kernels.q8_tiles import q8_unpack
from tandem.program.program import Program
from tandem.tune import cases
from tandem.tune.cases import Shape
from tandem.tune.trials import KernelTrial, ThreadsTrial, Trial, TrialMemory

Sizes = tuple[tuple[int, ...], ...]
# Tokens of a step, by the buckets that GPUs record. Those in one group share a choice.
SIZES: Sizes = ((1,), (2,), (4,), (8,), (16,), (32,), (64,), (128, 256, 512))
# Decode batch sizes. Larger ones are not tuned: a trial cannot hold as many keys as they may have.
SEQUENCES = ((1,), (2, 4))
PROMPT = 512
MAX_ROWS = 64  # rows of logits of a step
QUICK_SIZES: Sizes = ((1,), (8,))
QUICK_SHAPES = 4
CPU_SIZES, CPU_SEQUENCES, CPU_KEYS = (1, 16, 128), (1, 8), 1024
Check = Callable[[Choice], None]


@dataclass
class Task:
    """A choice to make: for a kernel and shape, at one size or at several that share the choice."""

    kernel: str
    shape: str
    size: str
    keys: list[str]  # under which the choice is saved
    each: int  # equal launches in a step
    timed: Sequence[tuple[Trial, Counts]]  # one for each size
    candidates: list[Choice]
    check: Check | None = None  # against NumPy, if bits may differ; None: they must not
    bound: float = 0.0  # of the difference from the default's results, relative to their RMS
    launches: list[int] = field(default_factory=list)  # of a round, for each size
    _default: list[dict[str, Array]] = field(default_factory=list)

    def is_correct(self, choice: Choice) -> bool:
        """Whether a choice gives the default's bits or, if bits may differ, NumPy's within the kernel's error."""
        self._default = self._default or [trial.results(counts) for trial, counts in self.timed]
        try:
            found = [trial.results(counts, choice) for trial, counts in self.timed]
            pairs = [(got[n], want[n]) for got, want in zip(found, self._default, strict=True) for n in want]
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
        """Seconds of a launch, for each size."""
        sizes = zip(self.timed, self.launches, strict=True)
        return [trial.seconds(counts, n, choice) for (trial, counts), n in sizes]

    def done(self) -> None:
        for trial, _ in self.timed:
            trial.free()


def difference(got: Array, want: Array) -> float:
    """The maximum difference relative to the RMS of `want`; quants may be off by one."""
    room = np.zeros((), np.float32)
    if want.dtype == Q8_BLOCK:
        got, want = (q8_unpack(a, Q8_TILE * len(a)) for a in (got, want))
        blocks = np.abs(want).reshape(len(want), -1, 32).max(axis=2, keepdims=True)
        room = np.repeat(blocks * np.float32(1.5 / 127), 32, axis=2).reshape(want.shape)
    elif want.dtype != np.float32:
        return 0.0 if got.tobytes() == want.tobytes() else np.inf
    there = np.isfinite(want)
    if not np.array_equal(there, np.isfinite(got)):
        return np.inf
    want, got = (np.where(there, a, np.float32(0)) for a in (want, got))
    size = max(float(np.sqrt(np.mean(np.square(want)))), 1e-9)
    return float(np.maximum(np.abs(got - want) - room, 0).max(initial=0.0)) / size


def tasks(space: TrialMemory, program: Program, context: int, quick: bool) -> Iterator[Task]:
    """The tasks, those with the most bytes in a step of one token first. `quick`: only a few of them."""
    device, rng = space.device, np.random.default_rng(0)
    kinds = ("matmul",) if quick else cpu.TUNED if isinstance(device, CPUDevice) else vulkan.TUNED
    found = cases.shapes(program, kinds)
    for shape in found[:QUICK_SHAPES] if quick else found:
        space.clear()
        try:
            if isinstance(device, CPUDevice):
                yield _cpu_task(space, shape, context, quick, rng)
            elif shape.kind == "attention":
                yield from _vulkan_attention(space, device, shape, context, rng)
            else:
                yield from _vulkan_rows(space, device, shape, quick, rng)
        except DoesNotFitError:
            continue  # the default stays


def _vulkan_rows(
    space: TrialMemory, device: VulkanDevice, shape: Shape, quick: bool, rng: np.random.Generator
) -> Iterator[Task]:
    """Matmuls and norms: a choice for each number of tokens, or for a group of them."""
    most = MAX_ROWS if shape.count == "rows" else SIZES[-1][-1]
    groups = [sizes for sizes in (QUICK_SIZES if quick else SIZES) if sizes[-1] <= most]
    trial = _kernel_trial(space, shape, groups[-1][-1], rng)
    half = device.capabilities.register_coopmat or has_coopmat(device.capabilities)
    for sizes in groups:
        bound = MATRIX_ERROR if half and sizes[-1] > 1 else INTEGER_ERROR
        yield Task(
            shape.kernel.name,
            described(shape),
            _many(sizes, shape.count[:-1]),
            [shape_of(shape.kind, shape.launch.scalars, size) for size in sizes],
            shape.launches,
            [(trial, shape.counts(size)) for size in sizes],
            vulkan.candidates(
                shape.kernel.name, trial.case.scalars, shape.counts(sizes[-1]), device.capabilities
            ),
            _check(device, shape, sizes[-1], bound),
            2 * bound,
        )


def _many(sizes: Sequence[int], what: str) -> str:
    return f"{', '.join(map(str, sizes))} {what}{'s' * (sizes[-1] > 1)}"


def _check(device: VulkanDevice, shape: Shape, size: int, bound: float) -> Check:
    def check(choice: Choice) -> None:
        rng = np.random.default_rng(size)
        with device.choices.trying(choice):
            if shape.kind == "norm":
                check_case(device, shape.kernel, cases.norm_case(shape, size, rng))
            else:
                check_matmul(device, shape.kernel, cases.small_matmul(shape, size, rng), bound)

    return check


def _vulkan_attention(
    space: TrialMemory, device: VulkanDevice, shape: Shape, context: int, rng: np.random.Generator
) -> Iterator[Task]:
    """Attention: a choice for each of some decode batch sizes, at two depths, and one for prefill."""
    half = device.capabilities.register_coopmat or has_coopmat(device.capabilities)
    bound = MATRIX_ERROR if half else INTEGER_ERROR
    for sizes in (*SEQUENCES, ()):
        space.clear()
        if sizes:
            timed = [
                cases.decode_attention(shape, n, keys, rng)
                for n in sizes
                for keys in cases.depths(n, context)
            ]
        else:
            timed = [cases.prefill_attention(shape, PROMPT, rng)]
        counts = [case.counts for case in timed]
        keys = [shape_of(shape.kind, shape.launch.scalars, c["tokens"], c["work"]) for c in counts]
        yield Task(
            shape.kernel.name,
            described(shape),
            _many(sizes, "sequence") if sizes else f"{PROMPT} tokens",
            list(dict.fromkeys(keys)),
            shape.launches,
            [(KernelTrial(space, shape.kernel, case, "cache"), case.counts) for case in timed],
            vulkan.candidates(shape.kernel.name, timed[-1].scalars, counts[-1], device.capabilities),
            _check_attention(device, shape, min(sizes[-1], 4) if sizes else 0),
            2 * bound,
        )


def _check_attention(device: VulkanDevice, shape: Shape, sequences: int) -> Check:
    def check(choice: Choice) -> None:
        rng = np.random.default_rng(sequences)
        small = (
            cases.decode_attention(shape, sequences, 333, rng)
            if sequences
            else cases.prefill_attention(shape, 70, rng)
        )
        with device.choices.trying(choice):
            check_case(device, shape.kernel, small)

    return check


def _cpu_task(space: TrialMemory, shape: Shape, context: int, quick: bool, rng: np.random.Generator) -> Task:
    """One choice for all sizes, because a request's bits must not depend on the batch."""
    timed: Sequence[tuple[Trial, Counts]]
    if shape.kind == "attention":
        attended: list[Case] = [
            cases.decode_attention(shape, n, min(context, CPU_KEYS), rng) for n in CPU_SEQUENCES
        ]
        attended.append(cases.prefill_attention(shape, CPU_SIZES[-1], rng))
        timed = [(KernelTrial(space, shape.kernel, case, "cache"), case.counts) for case in attended]
    else:
        sizes = CPU_SIZES[:2] if quick or shape.count == "rows" else CPU_SIZES
        trial = _kernel_trial(space, shape, max(sizes), rng)
        timed = [(trial, shape.counts(size)) for size in sizes]
    return Task(
        shape.kernel.name,
        described(shape),
        "all",
        [shape_of(shape.kind, shape.launch.scalars)],
        shape.launches,
        timed,
        cpu.candidates(shape.launch.scalars),
    )


def _kernel_trial(space: TrialMemory, shape: Shape, size: int, rng: np.random.Generator) -> KernelTrial:
    if shape.kind == "norm":
        return KernelTrial(space, shape.kernel, cases.norm_case(shape, size, rng), "weight")
    return KernelTrial(
        space, shape.kernel, cases.matmul_case(shape, size, space.max_array_bytes, rng), "weights"
    )


@contextmanager
def thread_task(program: Program, threads: int) -> Iterator[Task | None]:
    """The number of threads for the largest matmul on the CPU; None: there is no choice."""
    candidates = cpu.candidate_threads(threads)
    found = [shape for shape in cases.shapes(program, ("matmul",)) if shape.count == "tokens"]
    if not candidates or not found:
        yield None
        return
    sizes, trials = CPU_SIZES, {}
    with ExitStack() as closing:
        for n in (threads, *(choice["threads"] for choice in candidates)):
            device = CPUDevice(n)
            closing.callback(device.close)
            trials[n] = _kernel_trial(TrialMemory(device), found[0], max(sizes), np.random.default_rng(0))
        timed = [(ThreadsTrial(trials, threads), found[0].counts(size)) for size in sizes]
        yield Task("threads", described(found[0]), "all", [cpu.DEVICE], 1, timed, candidates)


def described(shape: Shape) -> str:
    s = shape.launch.scalars
    if shape.kind == "attention":
        seen = f", window {int(s['window'])}" if s["window"] else ""
        return f"{int(s['q_heads'])} on {int(s['kv_heads'])} heads of {int(s['head_dim'])}{seen}"
    if shape.kind == "norm":
        return f"{int(s['dim'])}"
    return f"{int(s['rows'])} x {int(s['columns'])}" + (" with GLU" if s["epilogue"] else "")

"""Finds the fastest choice for each kernel and shape of a model on a device (docs/TUNING.md).

All candidates are timed in alternating rounds. The results of the fastest are compared with those of the default; if
they are correct, it is timed against the default in new rounds. It is chosen if these show that it is faster by more
than the noise.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tandem.bench.kernel_checks import AnyDevice, prepare
from tandem.bench.machine import disturbed
from tandem.bench.sensors import Sensors
from tandem.bench.statistics import median_interval
from tandem.devices.cpu import tuned as cpu
from tandem.devices.cpu.device import CPUDevice
from tandem.devices.tuned_choices import NOTHING, Choice, read_choices, write_choices
from tandem.devices.vulkan import tuned as vulkan
from tandem.devices.vulkan.device import VulkanDevice
from tandem.errors import DeviceError, DeviceLostError
from tandem.kernels.kernel import Counts
from tandem.program.program import Program
from tandem.tune.tasks import Task, tasks, thread_task
from tandem.tune.trials import Trial, TrialMemory, is_gpu

MIN_GAIN = 0.03  # relative gain that a choice must have
MAX_LOSS = 0.02  # relative loss that is allowed at one of several sizes that share a choice
SCREENING, ROUNDS = 3, 9  # rounds of all candidates, and of the best against the default
GPU_SECONDS, CPU_SECONDS = 4e-3, 20e-3  # minimum of a round of one choice
MAX_LAUNCHES = 256
MAX_LAUNCH_SECONDS = 0.3  # slower launches, and larger sizes of them, are not tuned
WARM_UP, QUICK_WARM_UP = 1.0, 0.3  # seconds: a GPU that was idle runs slower for a while
LIMIT, QUICK_LIMIT = 140.0, 3.0  # seconds of a whole run


@dataclass(frozen=True)
class TuningResult:
    kernel: str
    shape: str
    size: str
    keys: list[str]
    launches: int  # equal launches in a step
    before: float  # seconds of a launch with the default: the geometric mean of several sizes
    after: float  # seconds with the choice
    choice: Choice  # empty: the default
    tried: int  # number of candidates
    wrong: list[Choice]  # candidates with wrong results, or refused by the driver

    @property
    def gain(self) -> float:
        return self.before / self.after - 1


def tune(
    device: AnyDevice,
    program: Program,
    *,
    context: int,
    quick: bool = False,
    limit: float | None = None,
    threads: bool = False,
) -> Iterator[TuningResult]:
    """Yields a finding for each task of a Program until `limit` seconds are over; the rest keeps its defaults.
    `threads`: also tunes the number of CPU threads."""
    seconds = (GPU_SECONDS if is_gpu(device) else CPU_SECONDS) / (2 if quick else 1)
    space, slow = TrialMemory(device, quick=quick), set[str]()
    if isinstance(device, VulkanDevice):
        prepare(device)
    begun = time.perf_counter()
    until = begun + (limit or (QUICK_LIMIT if quick else LIMIT))
    warm = begun + (QUICK_WARM_UP if quick else WARM_UP) if is_gpu(device) else begun
    for i, task in enumerate(tasks(space, program, context, quick)):
        if i and time.perf_counter() > until:  # the first task always runs, however long its set-up took
            break
        name = f"{task.kernel} {task.shape}"
        if not task.candidates or name in slow:
            continue
        if any(_is_slow(trial, counts) for trial, counts in task.timed):
            slow.add(name)
            continue
        while time.perf_counter() < warm:
            task.timed[0][0].seconds(task.timed[0][1], MAX_LAUNCHES // 4)
        yield choose(task, seconds, until)
    if threads and isinstance(device, CPUDevice):
        with thread_task(program, device.threads) as threads_task:
            if threads_task and time.perf_counter() < until:
                yield _undisturbed(threads_task, seconds, until)


def _undisturbed(task: Task, seconds: float, until: float) -> TuningResult:
    """The number of threads; the default if other processes took part of the machine, for fewer are as fast then."""
    finding, seen = Sensors().during(lambda: choose(task, seconds, until))
    return replace(finding, after=finding.before, choice=NOTHING) if disturbed(seen.others) else finding


def _is_slow(trial: Trial, counts: Counts) -> bool:
    """Times a second run too, since the first may include compiling."""
    return trial.seconds(counts, 1) > MAX_LAUNCH_SECONDS and trial.seconds(counts, 1) > MAX_LAUNCH_SECONDS


def choose(task: Task, run_seconds: float, until: float = np.inf) -> TuningResult:
    """The fastest correct choice, or the default. Candidates after the time `until` are skipped."""
    once = [trial.seconds(counts, 2) for trial, counts in task.timed]
    task.launches = [min(MAX_LAUNCHES, 1 + int(run_seconds / max(t, 1e-7))) for t in once]
    runs: list[Choice] = []
    wrong: list[Choice] = []
    for choice in task.candidates:
        if time.perf_counter() < until:
            (runs if _runs(task, choice) else wrong).append(choice)
    tried, screened = len(runs) + len(wrong), _rounds(task, [NOTHING, *runs], SCREENING)
    costs = [float(np.median(_costs(rounds))) for rounds in screened]
    best = NOTHING
    for i in np.argsort(costs[1:]):  # fastest first, so that usually only one is checked
        if costs[1 + i] > (1 - MIN_GAIN / 2) * costs[0]:
            break
        if task.is_correct(runs[i]):
            best = runs[i]
            break
        wrong.append(runs[i])
    before = after = screened[0]
    if best:
        before, after = _rounds(task, [NOTHING, best], ROUNDS)
        if not _is_faster(after, before):
            best, after = NOTHING, before
    task.done()
    return TuningResult(
        task.kernel,
        task.shape,
        task.size,
        task.keys,
        task.each,
        float(np.median(_costs(before))),
        float(np.median(_costs(after))),
        best,
        tried,
        wrong,
    )


def _runs(task: Task, choice: Choice) -> bool:
    """Runs a choice once, so that it is compiled before it is timed. False: the driver refuses it."""
    try:
        task.seconds(choice)
    except DeviceLostError:
        raise
    except DeviceError:
        return False
    return True


Rounds = list[list[float]]  # [round][size]: seconds of a launch


def _rounds(task: Task, choices: Sequence[Choice], rounds: int) -> list[Rounds]:
    """Alternating rounds of each choice, forwards and backwards: what slows the machine for a while slows all."""
    found: list[Rounds] = [[] for _ in choices]
    for i in range(rounds):
        order = range(len(choices))
        for j in order if i % 2 else reversed(order):
            found[j].append(task.seconds(choices[j]))
    return found


def _costs(rounds: Rounds) -> list[float]:
    return [float(np.exp(np.mean(np.log(np.maximum(seconds, 1e-9))))) for seconds in rounds]


def _is_faster(ours: Rounds, theirs: Rounds) -> bool:
    """Whether ours is faster by MIN_GAIN with separate intervals, and no size is slower than MAX_LOSS allows."""
    costs, their_costs = _costs(ours), _costs(theirs)
    apart = median_interval(costs)[1] < median_interval(their_costs)[0]
    worst = float((np.median(ours, axis=0) / np.median(theirs, axis=0)).max())
    return bool(
        apart and np.median(costs) <= (1 - MIN_GAIN) * np.median(their_costs) and worst <= 1 + MAX_LOSS
    )


def tuned_file(device: AnyDevice, folder: Path) -> Path:
    if isinstance(device, VulkanDevice):
        return vulkan.tuned_file(folder, device.capabilities)
    return cpu.tuned_file(folder, device.threads)


def keep(device: AnyDevice, findings: Iterable[TuningResult], folder: Path) -> Path:
    """Saves the findings in the device's file, replacing older ones for the same shapes."""
    file = tuned_file(device, folder)
    choices = read_choices(file)
    for finding in findings:
        for key in finding.keys:
            choices.by_shape.pop(key, None)
            if finding.choice:
                choices.by_shape[key] = finding.choice
    write_choices(file, choices, {"device": device.describe()})
    return file

"""Finds the fastest of the choices for each kernel and shape of a model on a device (docs/TUNING.md).

Choices are timed in turn, some rounds of all. The fastest is compared with the rule's own results, and if it is right,
timed against the rule alone. It is taken if those rounds, which had no part in finding it, show it to be faster by more
than they differ among each other.
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
from tandem.devices.choices import NOTHING, Choice, read_choices, write_choices
from tandem.devices.cpu import tuned as cpu
from tandem.devices.cpu.device import CPUDevice
from tandem.devices.vulkan import tuned as vulkan
from tandem.devices.vulkan.device import VulkanDevice
from tandem.errors import DeviceError, DeviceLostError
from tandem.kernels.kernel import Counts
from tandem.program.program import Program
from tandem.tune.tasks import Task, tasks, thread_task
from tandem.tune.trials import Space, Trial, is_gpu

MARGIN = 0.03  # by which a choice must be faster
SLOWER = 0.02  # by which it may be slower at one of several sizes that share a choice
SCREENING, ROUNDS = 3, 9
GPU_SECONDS, CPU_SECONDS = 4e-3, 20e-3  # of a round of one choice, at least
MOST_LAUNCHES = 256
SLOW = 0.3  # seconds of a launch: not tuned, nor what is larger
WARM_UP, QUICK_WARM_UP = 1.0, 0.3  # seconds: a GPU that was idle runs slower for a while
LIMIT, QUICK_LIMIT = 140.0, 3.0  # seconds, for all


@dataclass(frozen=True)
class Finding:
    kernel: str
    shape: str
    size: str
    keys: list[str]
    launches: int  # of a step that are alike
    before: float  # seconds of a launch by the rule: the geometric mean where there are several sizes
    after: float  # and with the choice
    choice: Choice  # what is chosen; nothing: the rule
    tried: int
    wrong: list[Choice]  # seemed faster, but their results are not the rule's; or the driver refuses them

    @property
    def gain(self) -> float:
        return self.before / self.after - 1


def tune(
    device: AnyDevice, program: Program, *, context: int, quick: bool = False, limit: float | None = None,
    threads: bool = False,
) -> Iterator[Finding]:  # fmt: skip
    """Findings for the launches of a Program as they come, until `limit` seconds are over; what comes after stays as it
    is. `threads`: also how many the CPU should have."""
    seconds = (GPU_SECONDS if is_gpu(device) else CPU_SECONDS) / (2 if quick else 1)
    space, slow = Space(device, quick=quick), set[str]()
    if isinstance(device, VulkanDevice):
        prepare(device)
    begun = time.perf_counter()
    until = begun + (limit or (QUICK_LIMIT if quick else LIMIT))
    warm = begun + (QUICK_WARM_UP if quick else WARM_UP) if is_gpu(device) else begun
    for i, task in enumerate(tasks(space, program, context, quick)):
        if i and time.perf_counter() > until:  # the first is looked at, however long it took to make
            break
        name = f"{task.kernel} {task.shape}"
        if not task.candidates or name in slow:
            continue
        if any(_is_slow(trial, counts) for trial, counts in task.spots):
            slow.add(name)
            continue
        while time.perf_counter() < warm:
            task.spots[0][0].seconds(task.spots[0][1], MOST_LAUNCHES // 4)
        yield choose(task, seconds, until)
    if threads and isinstance(device, CPUDevice):
        with thread_task(program, device.threads) as team:
            if team and time.perf_counter() < until:
                yield _undisturbed(team, seconds, until)


def _undisturbed(team: Task, seconds: float, until: float) -> Finding:
    """How many threads; the rule's where others had part of the machine: fewer are as fast then, and only then."""
    finding, seen = Sensors().during(lambda: choose(team, seconds, until))
    return replace(finding, after=finding.before, choice=NOTHING) if disturbed(seen.others) else finding


def _is_slow(trial: Trial, counts: Counts) -> bool:
    """The first run does not tell: it may be compiled then."""
    return trial.seconds(counts, 1) > SLOW and trial.seconds(counts, 1) > SLOW


def choose(task: Task, run_seconds: float, until: float = np.inf) -> Finding:
    """The fastest of the right choices, or the rule. Candidates that come up after `until` are not looked at."""
    once = [trial.seconds(counts, 2) for trial, counts in task.spots]
    task.launches = [min(MOST_LAUNCHES, 1 + int(run_seconds / max(t, 1e-7))) for t in once]
    runs: list[Choice] = []
    wrong: list[Choice] = []
    for choice in task.candidates:
        if time.perf_counter() < until:
            (runs if _runs(task, choice) else wrong).append(choice)
    tried, screened = len(runs) + len(wrong), _rounds(task, [NOTHING, *runs], SCREENING)
    costs = [float(np.median(_costs(rounds))) for rounds in screened]
    best = NOTHING
    for i in np.argsort(costs[1:]):  # fastest first: mostly one is to be compared
        if costs[1 + i] > (1 - MARGIN / 2) * costs[0]:
            break
        if task.right(runs[i]):
            best = runs[i]
            break
        wrong.append(runs[i])
    before = after = screened[0]
    if best:
        before, after = _rounds(task, [NOTHING, best], ROUNDS)
        if not _is_faster(after, before):
            best, after = NOTHING, before
    task.done()
    return Finding(
        task.kernel, task.shape, task.size, task.keys, task.each, float(np.median(_costs(before))),
        float(np.median(_costs(after))), best, tried, wrong,
    )  # fmt: skip


def _runs(task: Task, choice: Choice) -> bool:
    """Once, so that it is compiled before it is timed; False: the driver refuses it."""
    try:
        task.seconds(choice)
    except DeviceLostError:
        raise
    except DeviceError:
        return False
    return True


Rounds = list[list[float]]  # [round][spot]: seconds of a launch


def _rounds(task: Task, choices: Sequence[Choice], rounds: int) -> list[Rounds]:
    """Of each choice, in turn, forwards and backwards: what slows the machine for a while slows all."""
    found: list[Rounds] = [[] for _ in choices]
    for i in range(rounds):
        order = range(len(choices))
        for j in order if i % 2 else reversed(order):
            found[j].append(task.seconds(choices[j]))
    return found


def _costs(rounds: Rounds) -> list[float]:
    return [float(np.exp(np.mean(np.log(np.maximum(seconds, 1e-9))))) for seconds in rounds]


def _is_faster(ours: Rounds, theirs: Rounds) -> bool:
    """By more than the margin, surely, and not at the cost of one of the sizes."""
    costs, their_costs = _costs(ours), _costs(theirs)
    apart = median_interval(costs)[1] < median_interval(their_costs)[0]
    worst = float((np.median(ours, axis=0) / np.median(theirs, axis=0)).max())
    return bool(apart and np.median(costs) <= (1 - MARGIN) * np.median(their_costs) and worst <= 1 + SLOWER)


def tuned_file(device: AnyDevice, folder: Path) -> Path:
    if isinstance(device, VulkanDevice):
        return vulkan.tuned_file(folder, device.capabilities)
    return cpu.tuned_file(folder, device.threads)


def keep(device: AnyDevice, findings: Iterable[Finding], folder: Path) -> Path:
    """Adds the findings to those of the device's file, in place of older ones for the same shapes."""
    file = tuned_file(device, folder)
    choices = read_choices(file)
    for finding in findings:
        for key in finding.keys:
            choices.found.pop(key, None)
            if finding.choice:
                choices.found[key] = finding.choice
    write_choices(file, choices, {"device": device.describe()})
    return file

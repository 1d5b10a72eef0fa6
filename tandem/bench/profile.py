"""The time of each launch of a step. Launches are timed alone, so their sum exceeds the time of the step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from tandem.bench.rounds import Bench, Workload
from tandem.bench.step_cost import Step, added, step_costs
from tandem.engine.engine import Engine, StepSlot
from tandem.engine.params import SamplingParams
from tandem.engine.sequence import Chunk
from tandem.kernels.kernel import Cost
from tandem.kernels.states import NO_STATE
from tandem.program.program import Launch, Program

REPEATS = 5


@dataclass(frozen=True)
class Group:
    """Launches of one kernel that do the same in each layer."""

    kernel: str
    name: str  # of the value, without the layer
    launches: int
    seconds: float  # of all of them
    cost: Cost

    @property
    def gb_per_s(self) -> float:
        return self.cost.bytes / max(self.seconds, 1e-9) / 1e9

    @property
    def top_per_s(self) -> float:
        return self.cost.ops / max(self.seconds, 1e-9) / 1e12


def profile(bench: Bench, workload: Workload) -> list[Group]:
    """Groups of launches of the first step of a round of `workload`, the longest first."""
    step = next(iter(bench.steps(workload)))
    program, seconds = program_of(bench.engine, step), launch_seconds(bench, workload, step)
    found: dict[tuple[str, str], list[tuple[float, Cost]]] = {}
    for launch, time, cost in zip(program.launches, seconds, step_costs(program, step), strict=True):
        found.setdefault((launch.kernel.name, value_name(launch)), []).append((time, cost))
    groups = [
        Group(kernel, name, len(each), sum(s for s, _ in each), added(cost for _, cost in each))
        for (kernel, name), each in found.items()
    ]
    return sorted(groups, key=lambda group: -group.seconds)


def program_of(engine: Engine, step: Step) -> Program:
    """The launches that the engine's device runs in such a step: a GPU fuses some."""
    counts = {"tokens": sum(count for _, count in step), "rows": len(step), "work": len(step)}
    return engine.device.step_program(engine.program, counts, all(count == 1 for _, count in step))


def value_name(launch: Launch) -> str:
    """The name of the value that a launch writes, without its layer."""
    return re.sub(r"\bblk\.\d+\.|\.\d+$", "", launch.name)


def launch_seconds(bench: Bench, workload: Workload, step: Step) -> list[float]:
    """Seconds of each launch of a step's Program, run alone. The engine must be idle."""
    with step_written(bench, workload, step) as step_slot:
        step_slot.recording.replay()
        times = [step_slot.recording.replay_timed() for _ in range(REPEATS)]
        return [float(s) for s in np.median(times, axis=0)]


@contextmanager
def step_written(bench: Bench, workload: Workload, step: Step) -> Iterator[StepSlot]:
    """A step slot whose StepInputs hold that step, to run all of it or parts."""
    engine = bench.engine
    chunks: list[Chunk] = []
    try:
        for slot, (begin, count) in enumerate(step):
            sequence = bench.sequence(workload, SamplingParams(temperature=0))
            sequence.state.table_row = slot
            chunks.append(chunk := Chunk(sequence, begin, count, True))
            engine.cache.reserve(sequence.kv.tables, begin + count)
            if engine.cache.states and engine.cache.reserve_state(sequence.kv.states):
                sequence.kv.states.source = sequence.kv.states.own if begin else NO_STATE
                engine.scheduler.place_states(chunk)
        step_slot = engine.step_slots[0]
        step_slot.batch.write(chunks)
        yield step_slot
    finally:
        for chunk in chunks:
            engine.cache.free(chunk.sequence.kv.tables)
            engine.cache.free_states(chunk.sequence.kv.states)

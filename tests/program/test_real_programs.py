"""The validator accepts every real Program, and every barrier of one is needed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import ProgramError
from tandem.program.fuse import PASSES
from tandem.program.program import Launch, Program, Tensor
from tandem.program.validate import validate
from tests.program.programs import GOLDENS, PASS_SETS, REAL, build, formats_of, golden, real_config

pytestmark = pytest.mark.fast


@cache
def real(name: str, mixed: bool, passes: tuple[str, ...]) -> Program:
    config = real_config(name)
    return build(config, formats_of(config, mixed), passes)


@pytest.mark.parametrize("passes", PASS_SETS.values(), ids=PASS_SETS)
def test_every_golden_model_passes(passes: tuple[str, ...]) -> None:
    assert len(GOLDENS) >= 15
    for name in GOLDENS:
        validate(golden(name, passes))
        if "27b" not in name:  # 62 layers of the same
            validate(golden(name, passes, tokens=1, rows=1))


@pytest.mark.parametrize("passes", PASS_SETS.values(), ids=PASS_SETS)
@pytest.mark.parametrize("name", REAL)
def test_published_models_pass(name: str, passes: tuple[str, ...]) -> None:
    validate(real(name, True, passes))
    if passes in (PASSES, ()):
        validate(real(name, False, passes))


@given(name=st.sampled_from(sorted(REAL)), mixed=st.booleans(), fused=st.booleans(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_no_barrier_can_be_left_out(name: str, mixed: bool, fused: bool, data: st.DataObject) -> None:
    program = real(name, mixed, PASSES if fused else ())
    barriers = [i for i, launch in enumerate(program.launches) if launch.barrier]
    rejects_without_barrier(program, data.draw(st.sampled_from(barriers)))


@pytest.mark.parametrize("passes", [PASSES, ()], ids=["all passes", "no pass"])
def test_no_barrier_of_a_small_model_can_be_left_out(passes: tuple[str, ...]) -> None:
    """The same for every barrier there is."""
    for name in ("llama", "qwen2", "gemma2", "gemma3-pattern-array"):
        program = golden(name, passes)
        for i, launch in enumerate(program.launches):
            if launch.barrier:
                rejects_without_barrier(program, i)


def rejects_without_barrier(program: Program, index: int) -> None:
    program.launches[index].barrier = False
    try:
        with pytest.raises(ProgramError, match=f"launch {index} .*without a barrier"):
            validate(program)
    finally:
        program.launches[index].barrier = True


@pytest.mark.parametrize("passes", PASS_SETS.values(), ids=PASS_SETS)
def test_barriers_suffice_by_counting_bytes(passes: tuple[str, ...]) -> None:
    """Without the rules of hazards.py: between two barriers no byte is written by one launch and touched by another."""
    for name in ("llama", "qwen3", "gemma2", "gemma3-pattern3"):
        program = golden(name, passes, tokens=3, rows=2)
        for section in sections(program.launches):
            users = {arena: np.zeros(size, np.int32) for arena, size in program.arena_bytes.items()}
            writers = {arena: np.zeros(size, np.int32) for arena, size in program.arena_bytes.items()}
            for launch in section:
                count(users, launch.touched("r") + launch.touched("w"))
                count(writers, launch.touched("w"))
            for arena, written in writers.items():
                assert not ((written > 0) & (users[arena] > 1)).any(), f"{section} collide in {arena}"


def sections(launches: Iterable[Launch]) -> list[list[Launch]]:
    """Launches that may run at the same time."""
    found: list[list[Launch]] = []
    for launch in launches:
        if launch.barrier or not found:
            found.append([])
        found[-1].append(launch)
    return found


def count(bytes_of: dict[str, np.ndarray], tensors: list[Tensor]) -> None:
    """Adds 1 to each byte that a launch touches; a view touches its columns of each row."""
    for arena in bytes_of:
        touched = np.zeros(len(bytes_of[arena]), bool)
        for tensor in tensors:
            if tensor.arena == arena:
                region = touched[tensor.start : tensor.start + tensor.nbytes]
                if tensor.base:
                    columns = 4 * ((tensor.nbytes // 4 - 1) % tensor.stride + 1)
                    region[np.arange(tensor.nbytes) % (4 * tensor.stride) < columns] = True
                else:
                    region[:] = True
        bytes_of[arena] += touched


def test_costs_count_the_weights_once() -> None:
    """A decode step of a published model reads its weights, and little else."""
    program = real("Gemma 3 27B", False, PASSES)
    counts = {"tokens": 1, "rows": 1, "work": 1}
    costs = [launch.cost(counts) for launch in program.launches]
    assert len(costs) == len(program.launches)
    weights = program.arena_bytes["weights"]
    assert 0.99 * weights < sum(cost.bytes for cost in costs) < 1.02 * weights
    assert 2 * 27.0e9 < sum(cost.ops for cost in costs) < 2 * 27.5e9  # 2 per parameter


def test_the_text_of_a_program_shows_every_launch() -> None:
    program = golden("gemma3-pattern3")
    lines = program.text().splitlines()
    assert len(lines) == len(program.launches) + 2
    assert f"{len(program.launches)} launches" in lines[-1]
    assert all(launch.name in line for launch, line in zip(program.launches, lines[1:-1], strict=True))

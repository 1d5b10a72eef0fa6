"""The memory plan: live tensors never share bytes, dead ones do, and a plan that is wrong is rejected."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import ProgramError
from tandem.program.hazards import place_barriers
from tandem.program.plan_memory import lifetimes, plan_memory
from tandem.program.program import Launch, Program, Tensor
from tandem.program.validate import validate
from tandem.program.weight_plan import ALIGNMENT
from tests.program.programs import GOLDENS, PASS_SETS, activation, copy, golden

pytestmark = pytest.mark.fast


@st.composite
def launches(draw: st.DrawFn) -> list[Launch]:
    """Each launch reads one or two tensors that earlier ones wrote (or a view of one) and writes a new one, or,
    now and then, one that is already there."""
    made = [copy(None, activation("t0", -1, draw(st.integers(1, 300))), n=1)]
    written = [made[0].touched("w")[0]]
    for i in range(1, draw(st.integers(2, 25))):
        x, y = draw(st.sampled_from(written)), draw(st.none() | st.sampled_from(written))
        if draw(st.booleans()) and x.base is None and x.nbytes > 8:
            x = Tensor(f"{x.name} view", "activations", "f32", x.nbytes - 4, x.stride, 4, x)
        again = [t for t in written if t is not x.root and t is not y]
        if again and draw(st.integers(0, 5)) == 0:
            out = draw(st.sampled_from(again))
        else:
            out = activation(f"t{i}", -1, draw(st.integers(1, 300)))
            written.append(out)
        made.append(copy(x, out, y=y, n=1))
    return made


def planned(made: list[Launch]) -> Program:
    size = plan_memory(made)
    place_barriers(made)
    return Program(made, {"tokens": 1, "rows": 1, "work": 1}, {"activations": size})


def pairs_alive_together(made: list[Launch]) -> list[tuple[Tensor, Tensor]]:
    lives = lifetimes(made)
    return [
        (a, b) for a in lives for b in lives
        if a is not b and lives[a][0] <= lives[b][0] <= lives[a][1]
    ]  # fmt: skip


@given(launches())
@settings(max_examples=100, deadline=None)
def test_live_tensors_never_share_bytes(made: list[Launch]) -> None:
    program = planned(made)
    validate(program)
    for a, b in pairs_alive_together(made):
        assert a.start + a.nbytes <= b.start or b.start + b.nbytes <= a.start
    tensors = lifetimes(made)
    assert all(t.start % ALIGNMENT == 0 for t in tensors)
    assert program.arena_bytes["activations"] <= sum(t.nbytes + ALIGNMENT for t in tensors)


@given(launches(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_plan_that_aliases_live_tensors_is_rejected(made: list[Launch], data: st.DataObject) -> None:
    program = planned(made)
    lives = lifetimes(made)
    harmful = [(a, b) for a, b in pairs_alive_together(made) if needed_from(a, made[lives[b][0] :])]
    if harmful:
        a, b = data.draw(st.sampled_from(harmful))
        b.offset, b.nbytes = a.offset, max(a.nbytes, b.nbytes)
        program.arena_bytes["activations"] += b.nbytes
        for launch in made:
            launch.barrier = True
        with pytest.raises(ProgramError, match=r"written over|share bytes"):
            validate(program)


def needed_from(tensor: Tensor, rest: list[Launch]) -> bool:
    """Whether the first of these launches touches the tensor, or the first that touches it reads it."""
    touching = [launch for launch in rest if tensor in roots(launch, "r") + roots(launch, "w")]
    return bool(touching) and (touching[0] is rest[0] or tensor in roots(touching[0], "r"))


def roots(launch: Launch, access: str) -> list[Tensor]:
    return [tensor.root for tensor in launch.touched(access)]


@given(launches())
@settings(max_examples=50, deadline=None)
def test_barriers_of_any_program_are_needed(made: list[Launch]) -> None:
    program = planned(made)
    for launch in made:
        if launch.barrier:
            launch.barrier = False
            with pytest.raises(ProgramError, match="without a barrier"):
                validate(program)
            launch.barrier = True


@pytest.mark.parametrize("passes", PASS_SETS.values(), ids=PASS_SETS)
def test_live_tensors_of_real_programs_never_share_bytes(passes: tuple[str, ...]) -> None:
    for name in GOLDENS:
        if "27b" not in name:
            for a, b in pairs_alive_together(golden(name, passes).launches):
                assert a.start + a.nbytes <= b.start or b.start + b.nbytes <= a.start


def test_layers_reuse_the_memory_of_earlier_ones() -> None:
    """Twelve layers need no more activation memory than four."""
    few, many = (golden(name).arena_bytes["activations"] for name in ("gemma3-pattern3", "gemma3-pattern6"))
    assert many <= 2 * few

"""Any mix of requests, token budgets and preemptions gives each request the tokens that it would get alone."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine import scheduler
from tandem.engine.engine import Engine
from tandem.engine.params import SamplingParams
from tandem.engine.scheduler import INITIAL_TOKENS, MAX_SLOWDOWN, RECHECK_STEPS, PrefillBudget
from tandem.engine.sequence import Sequence
from tandem.errors import QueueFullError
from tandem.kernels.abi import KV_BLOCK
from tests.engine.simulation import VOCAB, SimulatedEngine, expected

pytestmark = pytest.mark.fast

CONTEXT = 6 * KV_BLOCK
WINDOWS = [(0,), (7,), (0, 20), (16, 33), (0, 5, 40)]


def blocks_for_one(windows: tuple[int, ...], tokens: int) -> list[int]:
    """As many as plan_kv gives to one sequence."""
    full = -(-CONTEXT // KV_BLOCK)
    return [min(full, (window + tokens) // KV_BLOCK + 2) if window else full for window in windows]


def make(
    windows: tuple[int, ...] = (0,),
    *,
    batch: int = 4,
    tokens: int = 32,
    spare: int = 1000,
    step_slots: int = 2,
    draft_tokens: int = 0,
) -> SimulatedEngine:
    blocks = tuple(n + spare for n in blocks_for_one(windows, tokens))
    return SimulatedEngine(
        windows=windows,
        blocks=blocks,
        context=CONTEXT,
        batch=batch,
        tokens=tokens,
        step_slots=step_slots,
        draft_tokens=draft_tokens,
    )


def submit(engine: Engine, prompt: list[int], count: int) -> Sequence:
    return engine.submit(prompt, SamplingParams(max_tokens=count))


def prompts(sizes: list[int]) -> list[list[int]]:
    return [[(7 * i + 13 * j) % VOCAB for j in range(size)] for i, size in enumerate(sizes)]


def ids(sequence: Sequence) -> list[int]:
    return [sampled.id for sampled in sequence.generated]


@given(
    windows=st.sampled_from(WINDOWS),
    requests=st.lists(st.tuples(st.integers(1, 80), st.integers(1, 15)), min_size=1, max_size=8),
    batch=st.integers(1, 5),
    tokens=st.integers(1, 40),
    spare=st.integers(0, 12),
    step_slots=st.integers(1, 2),
)
@settings(max_examples=150, deadline=None)
def test_tokens_do_not_depend_on_the_batch(
    windows: tuple[int, ...],
    requests: list[tuple[int, int]],
    batch: int,
    tokens: int,
    spare: int,
    step_slots: int,
) -> None:
    engine = make(windows, batch=batch, tokens=tokens, spare=spare, step_slots=step_slots)
    all_prompts = prompts([size for size, _ in requests])
    sequences = [
        submit(engine, prompt, count) for prompt, (_, count) in zip(all_prompts, requests, strict=True)
    ]
    engine.run(*sequences)
    for sequence, prompt, (_, count) in zip(sequences, all_prompts, requests, strict=True):
        assert ids(sequence) == expected(prompt, count, windows)
        assert sequence.finish_reason == "length"
    engine.check_idle()


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_requests_come_and_go_at_any_time(data: st.DataObject) -> None:
    windows = data.draw(st.sampled_from(WINDOWS))
    engine = make(windows, batch=3, tokens=data.draw(st.integers(1, 40)), spare=data.draw(st.integers(0, 10)))
    alive: list[tuple[Sequence, list[int], int]] = []
    for i in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["submit", "step", "step", "cancel"])):
            case "submit":
                prompt, count = (
                    prompts([data.draw(st.integers(1, 70))] * (i + 1))[i],
                    data.draw(st.integers(1, 12)),
                )
                alive.append((submit(engine, prompt, count), prompt, count))
            case "cancel" if alive:
                sequence, *_ = alive.pop(data.draw(st.integers(0, len(alive) - 1)))
                engine.cancel(sequence)
                assert sequence.finish_reason in ("cancelled", "length")
                assert all(not table.blocks for table in sequence.kv.tables)
            case _:
                engine.step()
    engine.run(*(sequence for sequence, *_ in alive))
    for sequence, prompt, count in alive:
        assert ids(sequence) == expected(prompt, count, windows)
    engine.check_idle()


def test_the_token_budget_chunks_prompts_and_not_decodes() -> None:
    engine = make(tokens=32)
    short = submit(engine, prompts([4])[0], 10)
    engine.step()
    long = submit(engine, prompts([80])[0], 3)
    shown = []
    while long.finish_reason is None:
        shown.append((short in (got := engine.step()), long in got))
    assert shown[0] == (True, False)  # was in flight
    assert shown[1:4] == [(True, False), (True, False), (True, True)]  # 31 and 31 of 80 tokens, then the rest


def test_requests_beyond_the_batch_wait_in_the_queue() -> None:
    engine = make(batch=2)
    sequences = [submit(engine, prompt, 3) for prompt in prompts([5] * 5)]
    engine.step()
    assert [len(s.generated) for s in sequences] == [1, 1, 0, 0, 0]
    engine.run(*sequences)
    assert all(len(s.generated) == 3 for s in sequences)
    engine.check_idle()


def test_without_blocks_the_newest_request_is_preempted_and_recomputed() -> None:
    size = CONTEXT // 2 - 8
    engine = make(spare=0, tokens=CONTEXT)  # room for one context
    first, second = (submit(engine, prompt, size) for prompt in prompts([size, size]))
    engine.step()
    assert len(first.generated) == len(second.generated) == 1
    while second.state.table_row >= 0:
        engine.step()
    assert first.finish_reason is None and second.state.computed == 0 and len(second.generated) > 1
    engine.run(first, second)
    for sequence in (first, second):
        assert ids(sequence) == expected(sequence.request.prompt, size, (0,))
    engine.check_idle()


def test_cancel_frees_everything() -> None:
    engine = make((0, 20), batch=2)
    running, other, waiting = (submit(engine, prompt, 50) for prompt in prompts([40, 10, 10]))
    engine.step()
    for sequence in (waiting, running, other):
        engine.cancel(sequence)
        engine.cancel(sequence)  # twice does no harm
        assert sequence.finish_reason == "cancelled"
    assert engine.step() == []
    engine.check_idle()


def test_the_context_ends_the_output() -> None:
    engine = make()
    sequence = submit(engine, prompts([CONTEXT - 3])[0], 50)
    engine.run(sequence)
    assert (len(sequence.generated), sequence.finish_reason) == (3, "length")
    engine.check_idle()


def test_a_stop_token_ends_the_output() -> None:
    prompt = prompts([9])[0]
    tokens = expected(prompt, 10, (0,))
    for ignore, count, reason in ((False, tokens.index(tokens[4]) + 1, "stop"), (True, 10, "length")):
        engine = make()
        params = SamplingParams(max_tokens=10, ignore_eos=ignore)
        sequence = engine.submit(prompt, params, frozenset([tokens[4]]))
        engine.run(sequence)
        assert (ids(sequence), sequence.finish_reason) == (tokens[:count], reason)


def test_urgent_requests_go_first_and_preempt_others() -> None:
    engine = make(batch=2)
    usual = [submit(engine, prompt, 20) for prompt in prompts([5, 6, 7])]
    engine.step()
    urgent = engine.submit([1, 2, 3], SamplingParams(max_tokens=3, priority=-1))
    while urgent.finish_reason is None:
        engine.step()
    assert usual[0].state.table_row >= 0 and usual[1].state.table_row < 0, "the youngest makes room"
    engine.run(*usual)
    for sequence in usual:
        assert ids(sequence) == expected(sequence.request.prompt, 20, (0,))
    engine.check_idle()


def test_urgent_requests_do_not_wait_for_others_to_compute_a_shared_prefix() -> None:
    """A less urgent request may have to wait itself: here it gets two tokens per step, after the others."""
    engine = make(batch=8, tokens=8)
    answering = [submit(engine, [900 + i], 4 * KV_BLOCK) for i in range(6)]
    for _ in range(3):
        engine.step()
    [prompt] = prompts([4 * KV_BLOCK])
    usual = engine.submit(prompt, SamplingParams(max_tokens=2, priority=5))
    engine.step()
    urgent = engine.submit(prompt, SamplingParams(max_tokens=2, priority=-5))
    engine.step()
    assert urgent.state.table_row >= 0 and usual.state.computed < 2 * KV_BLOCK
    while urgent.finish_reason is None:
        engine.step()
    assert usual.finish_reason is None
    engine.run(*answering, usual)
    for sequence in (urgent, usual):
        assert ids(sequence) == expected(prompt, 2, (0,))
    engine.check_idle()


def test_a_request_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(batch=1)
    sequences = [
        engine.submit([1, 2], SamplingParams(max_tokens=90, timeout=timeout))
        for timeout in (3600, 1800, None)
    ]
    engine.step()
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + 3600))
    engine.run(*sequences)
    assert [sequence.finish_reason for sequence in sequences] == ["timeout", "timeout", "length"]
    assert 1 <= len(sequences[0].generated) < 90 and not sequences[1].generated
    engine.check_idle()


def test_a_full_queue_refuses() -> None:
    engine = make(batch=1)
    engine.scheduler.queue = 2
    first = submit(engine, [1], 3)
    engine.step()
    waiting = [submit(engine, [2], 3) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests are waiting already: try again later"):
        submit(engine, [3], 3)
    engine.run(first, *waiting)
    engine.check_idle()


def test_a_cancelled_request_is_gone_within_two_steps() -> None:
    engine = make(batch=2)
    gone, stays = (submit(engine, prompt, 50) for prompt in prompts([40, 10]))
    for _ in range(5):
        engine.step()
    engine.cancel(gone)
    known = len(gone.generated)
    for _ in range(2):
        assert gone not in engine.step()
    assert (
        all(not table.blocks for table in gone.kv.tables)
        and not gone.state.in_flight_tokens
        and len(gone.generated) == known
    )
    assert all(flight.chunks[0].sequence is stays for flight in engine._in_flight)


def test_a_step_that_nobody_waited_for_is_not_measured() -> None:
    """It ended with the last request, and is read when the next one comes."""
    engine, measured = make(), list[float]()
    engine.on_step = lambda chunks, seconds: measured.append(seconds)
    gone = submit(engine, [1, 2, 3], 50)
    engine.step()
    engine.cancel(gone)
    assert engine._in_flight
    engine.run(submit(engine, [4], 3))
    assert len(measured) == 1 + 3


def test_decodes_go_on_during_a_long_prefill() -> None:
    """The prefill budget limits a chunk so that no step takes much longer than a decode step."""
    engine = make(tokens=64, batch=3)
    engine.scheduler.prefill_budget = SimpleNamespace(
        tokens=lambda prompts, others: 10 * prompts, observe=lambda *step: None
    )  # type: ignore[assignment]
    answering = submit(engine, [1, 2], 50)
    engine.step()
    submit(engine, prompts([80])[0], 3)
    engine.step()
    counts = [sorted(chunk.count for chunk in flight.chunks) for flight in engine._in_flight]
    assert counts[-1] == [1, 10] and answering in engine.step()


MORE = MAX_SLOWDOWN - 1  # that a prompt may add to a step


def test_an_out_of_band_forward_fits_in_a_step() -> None:
    engine = make(tokens=32)
    engine.scheduler.prefill_budget = SimpleNamespace(  # type: ignore[assignment]
        tokens=lambda prompts, others: 1000, observe=lambda *step: None
    )
    submit(engine, [1], 50)
    engine.step()
    assert engine.scheduler.max_out_of_band_tokens() == 32


def test_the_prefill_budget_learns_step_times() -> None:
    budget = PrefillBudget()
    assert budget.tokens(2, 4) == 2 * INITIAL_TOKENS
    budget.observe(100, 0, 0.2)  # alone: 2 ms a token
    for _ in range(100):
        budget.observe(0, 4, 0.020)
        budget.observe(0, 64, 0.200)
    assert budget.tokens(1, 4) == int(10 * MORE) and budget.tokens(4, 4) == 2 * int(10 * MORE)
    assert budget.tokens(1, 64) == int(100 * MORE) and budget.tokens(1, 20) == budget.tokens(1, 4), (
        "as far as is known"
    )

    def read(extra: float, times: int) -> None:
        for i in range(times):
            budget.observe(*((10, 4, 0.020 + extra) if i % 2 else (0, 4, 0.020)))

    read(10 * 0.0001, 200)
    steady = budget.tokens(1, 4)
    assert 0.95 <= steady / (200 * MORE) <= 1.0
    read(60.0, 2)  # the machine slept
    assert budget.tokens(1, 4) > steady / 2
    for i in range(100):
        read(10 * 0.0001 + 0.005 * (i % 2), 2)
    assert budget.tokens(1, 4) < steady / 2, "who cannot be sure keeps a distance"
    read(9.0, 200)
    assert budget.tokens(1, 4) == 1, "a prompt always gets on"
    for _ in range(RECHECK_STEPS):
        budget.observe(1, 4, 0.1)
    assert [budget.tokens(1, 4) for _ in range(2)] == [0, 1], "it looks how fast steps are without"


def test_the_prefill_budget_ignores_a_delayed_step() -> None:
    """The step in which a long prompt arrives is one: tokenizing uses the same cores."""
    budget = PrefillBudget()
    for _ in range(20):
        budget.observe(0, 4, 0.020)
    for off in (-0.0001, 0.0001) * 10:
        budget.observe(50, 4, 0.030 + off)
        budget.observe(0, 4, 0.020)
    allowed = budget.tokens(1, 4)
    budget.observe(0, 4, 0.050)
    assert budget.tokens(1, 4) == allowed, "without a prompt: nobody is used to longer ones"
    budget.observe(50, 4, 0.100)
    assert 0.75 * allowed < budget.tokens(1, 4) < allowed, "with one: its tokens have hardly become dearer"


def test_the_prefill_budget_shrinks_when_decode_steps_become_longer() -> None:
    """Outputs grow meanwhile: the bound refers to decode steps before the prompt came."""
    budget = PrefillBudget()
    for _ in range(100):
        budget.observe(0, 4, 0.020)
    for quiet in (0.020, 0.025):
        for _ in range(40):
            for _ in range(RECHECK_STEPS):
                budget.observe(10, 4, quiet + 10 * 0.0001)
            assert budget.tokens(1, 4) == 0
            budget.observe(0, 4, quiet)
        room = MAX_SLOWDOWN * 0.020 - quiet
        assert 0.9 * room <= 0.0001 * budget.tokens(1, 4) <= 1.01 * room
    budget.observe(0, 4, 0.025)  # without a prompt that had to wait for it: there is none
    budget.observe(10, 4, 0.026)
    assert 0.9 <= 0.0001 * budget.tokens(1, 4) / ((MAX_SLOWDOWN - 1) * 0.025) <= 1.01

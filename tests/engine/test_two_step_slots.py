"""Two steps in flight: drafts of preempted sequences, and steps that fail to start."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from tandem.engine.params import SamplingParams
from tandem.kernels.abi import KV_BLOCK
from tests.engine import simulation
from tests.engine.simulation import SimulatedEngine, expected

pytestmark = pytest.mark.fast


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("seed", range(40))
def test_a_draft_of_a_preempted_sequence_is_ignored(seed: int) -> None:
    rng = random.Random(seed)
    windows = rng.choice([(0,), (7,), (0, 20), (16, 33)])
    tokens = rng.choice([8, 16, 40, 60])
    full = 128 // KV_BLOCK
    one = [min(full, (window + tokens) // KV_BLOCK + 2) if window else full for window in windows]
    blocks = tuple(count + rng.randint(0, 4) for count in one)
    engine = SimulatedEngine(
        windows=windows, blocks=blocks, context=128, batch=3, tokens=tokens, step_slots=2, draft_tokens=9
    )
    sequences = []
    for _ in range(60):
        if rng.random() < 0.25:
            prompt = [rng.choice([1, 4, 6, 5, 2]) for _ in range(rng.randint(1, 60))]
            params = SamplingParams(max_tokens=rng.randint(1, 60), priority=rng.randint(0, 1))
            sequences.append(engine.submit(prompt, params))
        engine.step()
    engine.run(*sequences)
    for sequence in sequences:
        ids = [sampled.id for sampled in sequence.generated]
        assert ids == expected(sequence.request.prompt, len(ids), windows, True)


@pytest.mark.parametrize("seed", range(20))
def test_a_step_that_does_not_start_leaves_no_trace(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, real = random.Random(seed), simulation.SimulatedRecording.start

    def start(self: simulation.SimulatedRecording) -> None:
        if rng.random() < 0.1:
            raise Interrupt
        real(self)

    monkeypatch.setattr(simulation.SimulatedRecording, "start", start)
    engine = SimulatedEngine(
        windows=(0,), blocks=(60,), context=128, batch=4, tokens=40, step_slots=2, draft_tokens=0
    )
    sequences, steps = [], 0
    while steps < 80 or any(sequence.finish_reason is None for sequence in sequences):
        if steps < 80 and rng.random() < 0.2:
            prompt = [rng.randint(0, 900) for _ in range(rng.randint(1, 60))]
            sequences.append(engine.submit(prompt, SamplingParams(max_tokens=rng.randint(1, 40))))
        steps += 1
        with suppress(Interrupt):
            engine.step()
    for sequence in sequences:
        ids = [sampled.id for sampled in sequence.generated]
        assert ids == expected(sequence.request.prompt, len(ids), (0,), False)

"""The host time of a step, and that steps in flight change no token."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tandem.bench.host_overhead import measure_host_overhead
from tandem.devices.cpu.device import CPUDevice
from tandem.engine.params import SamplingParams
from tests.engine.test_batch_invariance import Request, requests
from tests.engine.tiny_models import opened, write_model

MOST_US = {1: 60.0, 64: 1200.0}  # microseconds of the host by number of sequences, caches warm
LOOP_US = 700.0  # of `loop` on the machine that these are of


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("steady") / "tiny.gguf", "Q4_0", "gemma3")


def loop() -> float:
    """Microseconds that Python takes for something that is always the same."""
    begun = time.thread_time()
    sum([i * i for i in range(20_000)])
    return (time.thread_time() - begun) * 1e6


@pytest.mark.parametrize("batch", MOST_US)
def test_host_time_of_a_step(path: Path, batch: int) -> None:
    """The best of some tries: others may use this core. A slower machine may take longer by as much."""
    with opened(path, threads=1, batch=64) as engine:
        best = min(measure_host_overhead(engine, batch=batch, steps=50).host_us for _ in range(4))
    slower = max(1.0, min(loop() for _ in range(20)) / LOOP_US)
    print(f"{batch} sequences: {best:.0f} us of the host a step; the machine is {slower:.2f} times slower")
    assert best < MOST_US[batch] * slower


def tokens(path: Path, wanted: list[Request]) -> list[list[int]]:
    with opened(path, threads=1) as engine:
        sequences = [engine.submit(prompt, params, frozenset(range(0, 320, 16))) for prompt, params in wanted]
        while any(sequence.finish_reason is None for sequence in sequences):
            engine.step()
        return [[sampled.id for sampled in sequence.generated] for sequence in sequences]


def test_two_steps_in_flight_change_no_token(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some stop early, so that a token too many is dropped; some have penalties, so that they wait for theirs."""
    wanted = requests(24) + [
        (prompt, SamplingParams(max_tokens=9, repeat_penalty=1.3, temperature=0.7, seed=i))
        for i, (prompt, _) in enumerate(requests(8))
    ]
    one_at_a_time = tokens(path, wanted)
    assert len({len(one) for one in one_at_a_time}) > 5
    monkeypatch.setattr(CPUDevice, "step_slots", 2)
    assert tokens(path, wanted) == one_at_a_time

"""What the engine itself costs a step, and that steps in flight change no token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.bench.steady import steady
from tandem.devices.cpu.device import CPUDevice
from tandem.engine.params import SamplingParams
from tests.engine.test_batch_invariance import Request, requests
from tests.engine.tiny_models import opened, write_model

MOST_US = {1: 60.0, 64: 1200.0}  # of the host at so many sequences, caches warm


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("steady") / "tiny.gguf", "Q4_0", "gemma3")


@pytest.mark.parametrize("batch", MOST_US)
def test_the_hosts_part_of_a_step(path: Path, batch: int) -> None:
    """The best of some tries: others may use this core."""
    with opened(path, threads=1, batch=64) as engine:
        best = min(steady(engine, batch=batch, steps=50).host_us for _ in range(4))
    print(f"{batch} sequences: {best:.0f} us of the host a step")
    assert best < MOST_US[batch]


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
    monkeypatch.setattr(CPUDevice, "turns", 2)
    assert tokens(path, wanted) == one_at_a_time

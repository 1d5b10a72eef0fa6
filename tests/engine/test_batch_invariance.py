"""A request gets the same tokens from the same logits, bit for bit, whatever the batch and the number of threads:
alone, in a ragged batch of 32, with any chunking of its prompt, in every fast format.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tandem import native
from tandem.engine.params import SamplingParams
from tandem.kernels.abi import KV_BLOCK
from tests.engine.tiny_models import VOCAB, WINDOW, WatchedEngine, opened, write_model
from tests.packages import model_path

FORMATS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K"]
FORMATS += ["IQ4_NL", "IQ4_XS", "MXFP4", "F16", "BF16", "F32"]
Request = tuple[list[int], SamplingParams]
Answer = tuple[list[int], list[bytes]]


def requests(count: int = 32) -> list[Request]:
    """Prompts of 1 to 70 tokens; one in three is greedy, the rest are sampled, so that a wrong bit changes tokens."""
    rng = np.random.default_rng(5)
    made: list[Request] = []
    for i in range(count):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 70)).tolist()
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 12)), temperature=float(i % 3), seed=i, top_k=40
        )
        made.append((prompt, params))
    made[count // 2] = (
        rng.integers(0, VOCAB, 70).tolist(),
        SamplingParams(max_tokens=12, temperature=1.0, seed=3),
    )
    return made


def limit_step(engine: WatchedEngine, tokens: int) -> None:
    engine.scheduler.limits = replace(engine.scheduler.limits, tokens=tokens)


def alone(engine: WatchedEngine, wanted: list[Request]) -> list[Answer]:
    return [engine.run(request)[0] for request in wanted]


def check(path: Path, others: int = 32, **options: bool) -> None:
    wanted = requests(others)
    longest = wanted[others // 2]
    with opened(path, threads=2, **options) as engine:
        expected = alone(engine, wanted)
        assert len({token for ids, _ in expected for token in ids}) > 20, "too dull a model to show anything"
        for tokens in (256, 100, 37):
            limit_step(engine, tokens)
            assert engine.run(*wanted) == expected
        for tokens in (1, 5, 16, 33):
            limit_step(engine, tokens)
            assert engine.run(longest) == [expected[others // 2]]
    with opened(path, threads=1, **options) as engine:
        limit_step(engine, 64)
        assert engine.run(*wanted) == expected
        assert engine.run(longest) == [expected[others // 2]]


@pytest.mark.parametrize("format", FORMATS)
def test_every_fast_format(format: str, tmp_path: Path) -> None:
    check(write_model(tmp_path / "tiny.gguf", format))


def test_windows_shorter_than_the_prompt(tmp_path: Path) -> None:
    assert max(len(prompt) for prompt, _ in requests()) > 2 * WINDOW
    path = write_model(tmp_path / "tiny.gguf", "Q4_0", "gemma3")
    check(path)
    check(path, others=8, kv="f32")
    check(path, others=8, kv="q8")


@pytest.mark.parametrize("isa", ["avx2", "plain"])
@pytest.mark.parametrize("format", ["Q4_1", "Q6_K", "F16"])
def test_other_instruction_sets(
    format: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native.load().tandem_isa_supported(isa.encode()):
        pytest.skip(f"this CPU has no {isa}")
    monkeypatch.setattr(native, "best_isa", lambda: isa)
    check(write_model(tmp_path / "tiny.gguf", format), others=6)


def test_a_real_model() -> None:
    """Few steps of SmolLM2: 9 heads on 3, rows that are no multiple of 256, a vocabulary of 49,152."""
    wanted = [(prompt[:40], replace(params, max_tokens=4)) for prompt, params in requests(8)]
    with opened(model_path("smollm2"), context=64, batch=8) as engine:
        limit_step(engine, 24)
        together = engine.run(*wanted)
        limit_step(engine, 64)
        assert [engine.run(wanted[i])[0] for i in (0, 4)] == [together[0], together[4]]
    with opened(model_path("smollm2"), context=64, batch=8, threads=1) as engine:
        assert engine.run(wanted[4]) == [together[4]]


def test_a_full_cache_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that were preempted and recomputed get the same tokens."""
    path = write_model(tmp_path / "tiny.gguf", "Q4_0")
    wanted = requests(12)
    with opened(path) as engine:
        expected = alone(engine, wanted)
        taken = engine.cache.new_tables()
        [free] = engine.cache.free_blocks
        assert engine.cache.reserve(taken, (free - 10) * KV_BLOCK)  # leaves 160 tokens to 12 requests
        release, released = engine.cache.free, []
        monkeypatch.setattr(engine.cache, "free", lambda tables: (released.append(tables), release(tables)))
        assert engine.run(*wanted) == expected
        assert len(released) > len(wanted), "no request was preempted"


def test_forced_logits_are_those_of_generation(tmp_path: Path) -> None:
    """`logits` computes every row of a text at once, and yet the bits that generation sees token by token."""
    prompt, params = requests()[16]
    with opened(write_model(tmp_path / "tiny.gguf", "Q4_K")) as engine:
        [(ids, seen)] = engine.run((prompt, params))
        forced = engine.logits(prompt + ids)
        assert [row.tobytes() for row in forced[len(prompt) - 1 : -1]] == seen

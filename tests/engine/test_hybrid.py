"""Models with recurrent layers: a request's logits have the same bits however its prompt is cut, in any batch, from a
checkpoint or afresh, preempted or not, and with any number of threads.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem import LLM
from tandem.engine.params import SamplingParams
from tandem.errors import UnsupportedModelError
from tandem.kernels.abi import KV_BLOCK
from tests.engine.test_batch_invariance import limit_step
from tests.engine.tiny_models import WatchedEngine, opened

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
Request = tuple[list[int], SamplingParams]


def requests(count: int) -> list[Request]:
    rng = np.random.default_rng(3)
    texts = rng.integers(0, 260, (count, 90)).tolist()
    lengths = rng.integers(1, 90, count).tolist()
    return [
        (text[:length], SamplingParams(max_tokens=8, temperature=float(i % 2), seed=i))
        for i, (text, length) in enumerate(zip(texts, lengths, strict=True))
    ]


def computed(engine: WatchedEngine) -> int:
    return engine.scheduler.prompt_tokens - engine.scheduler.cached_prompt_tokens


@pytest.mark.parametrize("name", ["qwen35", "qwen3next"])
def test_any_cut_and_batch_gives_the_same_bits(name: str) -> None:
    path, wanted = GOLDENS / f"{name}.gguf", requests(8)
    with opened(path, threads=2, prefix_caching=False) as engine:
        expected = [engine.run(request)[0] for request in wanted]
        for tokens in (256, 37, 16, 5, 1):
            limit_step(engine, tokens)
            assert engine.run(*wanted) == expected
    with opened(path, threads=1) as engine:
        for tokens in (256, 33):  # with the prefix cache: the second time from checkpoints
            limit_step(engine, tokens)
            assert engine.run(*wanted) == expected


def test_a_request_from_a_checkpoint_has_the_bits_of_one_afresh() -> None:
    rng = np.random.default_rng(4)
    prompt = rng.integers(0, 260, 150).tolist()
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    with opened(GOLDENS / "qwen35.gguf", prefix_caching=False) as engine:
        afresh = engine.run((prompt, greedy))[0]
        longer = [*prompt, *afresh[0], 7, 8, 9]
        other = [*prompt[:100], *longer[:30]]
        expected = [afresh, engine.run((longer, greedy))[0], engine.run((other, greedy))[0]]
    with opened(GOLDENS / "qwen35.gguf") as engine:
        costs = []
        for text, answer in zip((prompt, longer, other), expected, strict=True):
            before = computed(engine)
            assert engine.run((text, greedy))[0] == answer
            costs.append(computed(engine) - before)
        assert engine.run((prompt, greedy))[0] == afresh
        assert costs[0] == 150 and costs[1] <= 3 + 2 * KV_BLOCK, costs
        stats = engine.stats().states
        assert stats and stats.cached > 2 and stats.used == 0 and stats.slot_bytes > 0


def test_preempted_requests_have_the_same_bits() -> None:
    wanted = [(prompt, SamplingParams(max_tokens=60, ignore_eos=True, seed=1)) for prompt, _ in requests(6)]
    with opened(GOLDENS / "qwen35.gguf", prefix_caching=False) as engine:
        expected = [engine.run(request)[0] for request in wanted]
    with opened(GOLDENS / "qwen35.gguf", batch=4, kv_memory=66_000) as engine:
        assert engine.run(*wanted) == expected
        assert engine.scheduler.preemptions, "there was room for all"


def test_a_saved_conversation_has_its_state(tmp_path: Path) -> None:
    path, text = GOLDENS / "qwen35.gguf", "the " * 60
    with LLM(path, context=256, device="cpu", threads=1) as llm:
        first = llm.generate(text, max_tokens=8, temperature=0)
        blocks = (len(llm.tokenize(text)) - 1) // KV_BLOCK
        assert llm.save(text, tmp_path / "state") == blocks * KV_BLOCK > 90
    with LLM(path, context=256, device="cpu", threads=1) as llm:
        llm.restore(tmp_path / "state")
        again = llm.generate(text, max_tokens=8, temperature=0)
        assert again.text == first.text and llm.stats().cached_prompt_tokens > 0


def test_speculation_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="recurrent layers"):
        LLM(GOLDENS / "qwen35.gguf", context=128, device="cpu", prompt_lookup=True)

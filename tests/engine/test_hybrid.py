"""Models with recurrent layers: a request's logits have the same bits however its prompt is cut, in any batch, from a
checkpoint or afresh, preempted or not, and with any number of threads.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tandem import LLM
from tandem.engine.params import SamplingParams
from tandem.engine.sequence import Sequence
from tandem.engine.speculation_cost import WINDOW
from tandem.kernels.abi import KV_BLOCK
from tandem.model.model import Model
from tests.engine.simulation import FixedCost
from tests.engine.test_batch_invariance import limit_step
from tests.engine.tiny_models import WatchedEngine, opened

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
FAMILIES = ["qwen35", "lfm2", "mamba2", "falcon-h1"]  # each kind of state, with and without keys and values
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


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3next", "lfm2moe", "granitehybrid-moe", "nemotron_h_moe"])
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


@pytest.mark.parametrize("name", ["lfm2moe", "granitehybrid-moe", "nemotron_h_moe", "falcon-h1-normed"])
def test_any_cut_gives_the_same_bits_with_weights_of_8_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations between kernels are then int8 tiles."""
    matrices = Model.matrices

    def of_8_bits(model: Model) -> dict[str, tuple[str, int, int]]:
        found = matrices(model)
        return {key: each if "gate_inp" in key else ("q8_0", *each[1:]) for key, each in found.items()}

    monkeypatch.setattr(Model, "matrices", of_8_bits)
    wanted = requests(5)
    with opened(GOLDENS / f"{name}.gguf", prefix_caching=False) as engine:
        expected = [engine.run(request)[0] for request in wanted]
        for tokens in (37, 1):
            limit_step(engine, tokens)
            assert engine.run(*wanted) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_a_request_from_a_checkpoint_has_the_bits_of_one_afresh(name: str) -> None:
    rng = np.random.default_rng(4)
    prompt = rng.integers(0, 260, 150).tolist()
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    with opened(GOLDENS / f"{name}.gguf", prefix_caching=False) as engine:
        afresh = engine.run((prompt, greedy))[0]
        longer = [*prompt, *afresh[0], 7, 8, 9]
        other = [*prompt[:100], *longer[:30]]
        expected = [afresh, engine.run((longer, greedy))[0], engine.run((other, greedy))[0]]
    with opened(GOLDENS / f"{name}.gguf") as engine:
        costs = []
        for text, answer in zip((prompt, longer, other), expected, strict=True):
            before = computed(engine)
            assert engine.run((text, greedy))[0] == answer
            costs.append(computed(engine) - before)
        assert engine.run((prompt, greedy))[0] == afresh
        assert costs[0] == 150 and costs[1] <= 3 + 2 * KV_BLOCK, costs
        stats = engine.stats().states
        assert stats and stats.cached > 2 and stats.used == 0 and stats.slot_bytes > 0


# Memory for the keys and values of one context. Mamba-2 alone has none.
@pytest.mark.parametrize(("name", "kv_memory"), [("qwen35", 66_000), ("lfm2", 16_500), ("falcon-h1", 66_000)])
def test_preempted_requests_have_the_same_bits(name: str, kv_memory: int) -> None:
    wanted = [(prompt, SamplingParams(max_tokens=60, ignore_eos=True, seed=1)) for prompt, _ in requests(6)]
    with opened(GOLDENS / f"{name}.gguf", prefix_caching=False) as engine:
        expected = [engine.run(request)[0] for request in wanted]
    with opened(GOLDENS / f"{name}.gguf", batch=4, kv_memory=kv_memory) as engine:
        assert engine.run(*wanted) == expected
        assert engine.scheduler.preemptions, "there was room for all"


@pytest.mark.parametrize("name", ["qwen35", "mamba2"])
def test_a_saved_conversation_has_its_state(name: str, tmp_path: Path) -> None:
    path, text = GOLDENS / f"{name}.gguf", "the " * 60
    with LLM(path, context=256, device="cpu", threads=1) as llm:
        first = llm.generate(text, max_tokens=8, temperature=0)
        blocks = (len(llm.tokenize(text)) - 1) // KV_BLOCK
        assert llm.save(text, tmp_path / "state") == blocks * KV_BLOCK > 90
    with LLM(path, context=256, device="cpu", threads=1) as llm:
        llm.restore(tmp_path / "state")
        again = llm.generate(text, max_tokens=8, temperature=0)
        assert again.text == first.text and llm.stats().cached_prompt_tokens > 0


class RandomDrafts:
    """Drafts that begin with the right tokens, and then have wrong ones."""

    cost_coefficient, acceptance_window = 0.0, WINDOW

    def __init__(self, answers: dict[tuple[int, ...], list[int]], random: Random) -> None:
        self.answers, self.random = answers, random

    def uncached(self, sequence: Sequence) -> int:
        return 0

    def forget(self, sequence: Sequence) -> None:
        pass

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        drafts = []
        for sequence, count in wanted:
            done = len(sequence.generated)
            right = self.answers[tuple(sequence.request.prompt)][done : done + count]
            cut = self.random.randint(0, len(right))
            drafts.append([*right[:cut], *(self.random.randrange(260) for _ in range(count - cut))])
        return drafts


@pytest.mark.parametrize(("name", "options"), [
    ("qwen35", {}),
    ("qwen35", {"batch": 4, "kv_memory": 66_000}),
    ("qwen35moe", {}),
    ("qwen3next", {"prefix_caching": False}),
    ("lfm2", {}),
    ("falcon-h1", {"batch": 4, "kv_memory": 66_000}),
    ("mamba2", {}),
])  # fmt: skip
def test_any_acceptance_gives_the_text_without_drafts(name: str, options: dict[str, Any]) -> None:
    """In batches, with cancelled requests, with little memory (preemption), and from checkpoints."""
    path, random = GOLDENS / f"{name}.gguf", Random(7)
    wanted = [
        (prompt, SamplingParams(max_tokens=60, ignore_eos=True, seed=i, temperature=i % 2))
        for i, (prompt, _) in enumerate(requests(6))
    ]
    with opened(path, prefix_caching=False) as engine:
        answers = {tuple(prompt): engine.run((prompt, params))[0][0] for prompt, params in wanted}
    with opened(path, proposer=RandomDrafts(answers, random), **options) as engine:
        speculator = engine.scheduler.speculator
        assert speculator and engine.cache.states
        speculator.cost_model = FixedCost(0.001)
        for _ in range(3):
            cancelled = engine.submit(*wanted[random.randrange(6)])
            sequences = [engine.submit(*request) for request in random.sample(wanted, 6)]
            for _ in range(random.randrange(3, 20)):
                engine.step()
            engine.cancel(cancelled)
            while any(sequence.finish_reason is None for sequence in sequences):
                engine.step()
            for sequence in sequences:
                prompt = tuple(sequence.request.prompt)
                assert [sampled.id for sampled in sequence.generated] == answers[prompt]
        assert 100 < speculator.accepted < speculator.drafted
        assert engine.cache.states.num_free == len(engine.cache.states.references)
        assert bool(engine.scheduler.preemptions) == ("kv_memory" in options)


def test_an_answer_with_drafts_leaves_a_checkpoint() -> None:
    """The next turn starts at the last block of the answer, and has the bits of one computed afresh."""
    prompt, _ = requests(1)[0]
    greedy = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True)
    with opened(GOLDENS / "qwen35.gguf", prefix_caching=False) as engine:
        answer = engine.run((prompt, greedy))[0][0]
        longer = [*prompt, *answer, 7, 8, 9]
        expected = engine.run((longer, SamplingParams(max_tokens=1, temperature=0.0)))
    drafts = RandomDrafts({tuple(prompt): answer}, Random(1))
    with opened(GOLDENS / "qwen35.gguf", proposer=drafts) as engine:
        assert engine.scheduler.speculator
        engine.scheduler.speculator.cost_model = FixedCost(0.001)
        first = engine.submit(prompt, greedy)
        while first.finish_reason is None:
            engine.step()
        before = computed(engine)
        assert engine.run((longer, SamplingParams(max_tokens=1, temperature=0.0))) == expected
        assert computed(engine) - before <= 4 + KV_BLOCK


def related_requests(random: Random, count: int) -> list[Request]:
    """Prompts that often begin as an earlier one, up to any token."""
    texts: list[list[int]] = [[]]
    for _ in range(count):
        start = random.choice(texts)[: random.randrange(120)]
        texts.append(start + [random.randrange(260) for _ in range(random.randrange(1, 50))])
    return [
        (text, SamplingParams(max_tokens=random.randrange(1, 24), ignore_eos=True, seed=i, temperature=i % 2))
        for i, text in enumerate(texts[1:])
    ]


@pytest.mark.parametrize("cases", [40, pytest.param(2500, marks=pytest.mark.soak)])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    ("name", "kv_memory"),
    [("qwen35", 66_000), ("lfm2", 16_500), ("mamba2", None), ("falcon-h1", 66_000)],
)
def test_random_requests_have_the_bits_of_each_alone(
    name: str, kv_memory: int | None, drafts: bool, cases: int
) -> None:
    """Steps of random sizes, random batches and arrivals, one or two threads, preemption and cancelled requests; from
    checkpoints, or with drafts of which random ones are right."""
    path, random = GOLDENS / f"{name}.gguf", Random(cases)
    wanted = related_requests(random, cases)
    with opened(path, threads=1, prefix_caching=False) as engine:
        expected = [engine.run(request)[0] for request in wanted]
    answers = {tuple(prompt): ids for (prompt, _), (ids, _) in zip(wanted, expected, strict=True)}
    proposer = RandomDrafts(answers, random) if drafts else None
    with opened(path, threads=2, batch=5, kv_memory=kv_memory, proposer=proposer) as engine:
        assert engine.cache.states
        if speculator := engine.scheduler.speculator:
            speculator.cost_model = FixedCost(0.001)
        engine.scheduler.prefill_budget = None  # it depends on time, and steps have random sizes anyway
        running, left = dict[int, Sequence](), list(range(len(wanted)))
        while left or running:
            if left and random.random() < 0.5:
                i = left.pop()
                running[i] = engine.submit(*wanted[i])
            if random.random() < 0.1:
                engine.cancel(engine.submit(*random.choice(wanted)))
            limit_step(engine, random.choice([1, 3, 16, 17, 40, 256]))
            engine.step()
            for i, sequence in [*running.items()]:
                if sequence.finish_reason is None:
                    continue
                del running[i]
                assert [sampled.id for sampled in sequence.generated] == expected[i][0]
                assert drafts or engine.seen.pop(sequence) == expected[i][1]
        states = engine.stats().states
        assert states and states.used == 0 and engine.cache.free_blocks == engine.cache.blocks
        assert sum(states.hits.values()) > cases / 10
        assert drafts is bool(speculator and speculator.accepted > cases / 10)
        assert engine.scheduler.preemptions or not kv_memory


def test_prompt_lookup_works_on_hybrids() -> None:
    with LLM(GOLDENS / "qwen35.gguf", context=256, device="cpu", threads=1) as llm:
        expected = llm.generate("the in the in the in", max_tokens=100, temperature=0).token_ids
    with LLM(GOLDENS / "qwen35.gguf", context=256, device="cpu", threads=1, prompt_lookup=True) as llm:
        speculator = llm.engine.scheduler.speculator
        assert speculator
        speculator.cost_model = FixedCost(0.001)
        assert llm.generate("the in the in the in", max_tokens=100, temperature=0).token_ids == expected
        assert speculator.drafted > 0

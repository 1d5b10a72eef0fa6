"""Speculation changes the speed of a request, and none of its tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tandem import LLM
from tandem.devices.cpu import device as cpu
from tandem.engine import engine as engine_module
from tandem.engine.draft_model import DraftModel, check_vocabularies
from tandem.engine.kv_cache import KVCache
from tandem.engine.kv_size import HEADROOM
from tandem.engine.params import SamplingParams
from tandem.engine.prompt_lookup import NgramIndex, PromptLookup
from tandem.engine.scheduler import Scheduler
from tandem.engine.sequence import Sampled, Sequence
from tandem.engine.speculation import AcceptanceRate, Speculator, best_lengths
from tandem.engine.speculation_cost import RETRY_TOKENS, WINDOW
from tandem.errors import DoesNotFitError, RequestError
from tandem.kernels.abi import KV_BLOCK
from tandem.kernels.panels import panel_layout
from tests.cli.tiny_model import write_tiny_model
from tests.engine.simulation import FixedCost, SimulatedEngine, expected
from tests.engine.test_batch_invariance import Request, requests
from tests.engine.tiny_models import opened, write_model

CONTEXT = 256
FEW = {token: 60.0 for token in (5, 6, 7)}  # biases of three tokens, so that texts repeat themselves


def test_prompt_lookup() -> None:
    index, text = NgramIndex(), [1, 2, 3, 4, 5, 6, 7, 1, 2, 9, 9]
    assert index.propose(text, 4) == []
    assert index.propose([*text, 1, 2], 3) == [9, 9, 1], "the last occurrence"
    assert index.propose([*text, 1, 2, 3], 3) == [4, 5, 6], "the longest n-gram"
    assert index.propose([*text, 1, 2, 3, 4, 5], 9) == [6, 7, 1, 2, 9, 9, 1, 2, 3]
    assert NgramIndex().propose([1], 3) == NgramIndex().propose([1, 1], 3) == []


@pytest.mark.fast
def test_the_draft_length() -> None:
    def length(rate: float, cost: float, batch_size: int, most: int) -> int:
        return best_lengths([rate], [most], FixedCost(cost), batch_size, 8)[0]

    assert length(0.9, 0.05, 1, 8) == 8
    assert length(0.9, 0.05, 1, 3) == 3
    assert length(0.5, 0.25, 1, 8) == 1
    assert length(0.2, 0.25, 1, 8) == 0
    assert length(0.9, 0.25, 64, 8) == 0, "the draft is too expensive for a large batch"
    assert length(0.9, 0.001, 64, 8) == 8
    assert best_lengths([0.9, 0.5, 0.0], [8, 8, 8], FixedCost(0.05), 3, 8) == [7, 1, 0], (
        "in order of probability"
    )


def test_rejected_drafts_stop_and_are_retried() -> None:
    speculator = Speculator(PromptLookup(), FixedCost(0.25))
    engine = SimulatedEngine(windows=(0,), blocks=(99,), context=CONTEXT, batch=1, tokens=64, draft_tokens=8)
    sequence = engine.new_sequence([1, 2, 3] * 9, SamplingParams(max_tokens=200))
    tried = []
    for _ in range(8 * RETRY_TOKENS):
        [draft] = speculator.propose([sequence], 1, 8)
        tried.append(bool(draft))
        if draft:
            speculator.learn(sequence, len(draft), 0)
    assert all(tried[:2]) and 3 < sum(tried) < 10
    assert not any(tried[10:RETRY_TOKENS]) and any(tried[RETRY_TOKENS:])
    assert sequence.acceptance and sequence.acceptance.retry_after > RETRY_TOKENS


class Drafter:
    """Proposes as many tokens as are wanted."""

    cost_coefficient, acceptance_window = 0.0, WINDOW

    def uncached(self, sequence: Sequence) -> int:
        return 0

    def forget(self, sequence: Sequence) -> None:
        pass

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [[1] * count for _, count in wanted]


def times(steps: int, rates: list[float], cost: float, sequences: int, random: Random) -> tuple[float, float]:
    """Seconds of the same number of tokens with speculation and without: a step takes 1 s with some noise, and `cost`
    more for each draft token. The acceptance rate takes each of `rates` in turn."""
    speculator, taken, made = Speculator(Drafter()), 0.0, 0
    engine = SimulatedEngine(windows=(0,), blocks=(9,), context=CONTEXT, batch=1, tokens=64, draft_tokens=8)
    running = [engine.new_sequence([1], SamplingParams(max_tokens=10**6)) for _ in range(sequences)]
    for step in range(steps):
        drafts = speculator.propose(running, sequences, 16)
        seconds = random.gauss(1.0, 0.05) + cost * sum(map(len, drafts))
        speculator.observe(sequences, sum(map(len, drafts)), seconds)
        taken, made = taken + seconds, made + sequences
        for sequence, draft in zip(running, drafts, strict=True):
            if draft:
                draws = (random.random() < rates[step * len(rates) // steps] for _ in draft)
                accepted = len(list(takewhile(bool, draws)))
                speculator.learn(sequence, len(draft), accepted)
                made += accepted
    saved = made / sequences - taken  # without speculation, a token of each would have taken 1 s
    assert abs(speculator.statistics["saved_seconds"] - saved) < 0.02 * made / sequences
    return taken, made / sequences


@pytest.mark.fast
@pytest.mark.parametrize("sequences", [1, 4, 16])
@pytest.mark.parametrize("cost", [0.02, 0.1, 0.3, 1.0])
def test_speculation_never_costs_much(cost: float, sequences: int) -> None:
    for seed, rates in enumerate(([0.0], [0.3], [0.6], [0.95, 0.0], [0.0, 0.9, 0.1])):
        with_drafts, without = times(1500, rates, cost, sequences, Random(seed))
        assert with_drafts < 1.03 * without, (cost, rates)


@pytest.mark.fast
def test_speculation_pays_if_drafts_are_accepted() -> None:
    with_drafts, without = times(1000, [0.9], 0.05, 1, Random(0))
    assert with_drafts < 0.3 * without
    with_drafts, without = times(3000, [0.0, 0.9], 0.05, 1, Random(0))
    assert with_drafts < 0.7 * without, "also after many rejected drafts"


@pytest.mark.parametrize("step_slots", [1, 2])
@pytest.mark.parametrize("windows", [(0,), (0, 20), (5, 33)])
def test_a_repeating_text_takes_fewer_steps(windows: tuple[int, ...], step_slots: int) -> None:
    prompt = [1, 4, 6, 5, 2]
    for drafts in (1, 8):
        engine = SimulatedEngine(
            windows=windows, blocks=(40,) * len(windows), context=CONTEXT, batch=2, tokens=64, step_slots=step_slots,
            draft_tokens=drafts,
        )  # fmt: skip
        sequence = engine.submit(prompt, SamplingParams(max_tokens=150))
        engine.run(sequence)
        assert [sampled.id for sampled in sequence.generated] == expected(prompt, 150, windows, repeats=True)
        engine.step()
        engine.check_idle()
        speculator = engine.scheduler.speculator
        assert speculator and 20 < speculator.accepted < speculator.drafted
        assert engine.steps < 151 - 0.8 * speculator.accepted


def tokens(path: Path, wanted: list[Request], prompt_lookup: bool) -> tuple[list[list[int]], int]:
    with opened(path, threads=1, proposer=PromptLookup() if prompt_lookup else None) as engine:
        if engine.scheduler.speculator:
            engine.scheduler.speculator.cost_model = FixedCost(0.01)
        sequences = [engine.submit(prompt, params, frozenset(range(0, 320, 16))) for prompt, params in wanted]
        while any(sequence.finish_reason is None for sequence in sequences):
            engine.step()
        accepted = engine.scheduler.speculator.accepted if engine.scheduler.speculator else 0
        return [[sampled.id for sampled in sequence.generated] for sequence in sequences], accepted


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_the_same_tokens_greedy_or_sampled(temperature: float, tmp_path: Path) -> None:
    """A sample depends only on the seed and its position, so sampled tokens are the same, too."""
    path = write_model(tmp_path / "tiny.gguf", "Q4_0")
    wanted = [
        (
            prompt,
            SamplingParams(max_tokens=100, temperature=temperature, seed=i, ignore_eos=True, logit_bias=FEW),
        )
        for i, (prompt, _) in enumerate(requests(4))
    ]
    without, _ = tokens(path, wanted, False)
    with_drafts, accepted = tokens(path, wanted, True)
    assert with_drafts == without
    assert accepted > 10, "or the test shows nothing"


def endings(path: Path, count: int, prompt_lookup: bool, first_seed: int) -> Counter[tuple[int, ...]]:
    """The number of times that each ending follows the same short prompt, which has drafts. Seeds are fixed, so that
    runs are reproducible, and different, so that samples are independent."""
    found: Counter[tuple[int, ...]] = Counter()
    with opened(path, threads=1, batch=64, proposer=PromptLookup() if prompt_lookup else None) as engine:
        if engine.scheduler.speculator:
            engine.scheduler.speculator.cost_model = FixedCost(0.001)
        params = SamplingParams(max_tokens=4, temperature=3.0, ignore_eos=True, logit_bias=FEW)
        # A few at a time: drafts need rows of logits too.
        for begin in range(first_seed, first_seed + count, 8):
            sequences = [
                engine.submit([5, 6, 7, 5, 6, 7, 5, 6], replace(params, seed=begin + i)) for i in range(8)
            ]
            while any(sequence.finish_reason is None for sequence in sequences):
                engine.step()
            found.update(tuple(sampled.id for sampled in sequence.generated[1:]) for sequence in sequences)
        assert not engine.scheduler.speculator or engine.scheduler.speculator.drafted > count / 10
    return found


def chi_square(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """The statistic of two samples of the same size, without rare endings."""
    both = [(one[key], other[key]) for key in one.keys() | other.keys() if one[key] + other[key] >= 20]
    assert 8 < len(both) <= 27, "too few endings for a statistic"
    return sum((a - b) ** 2 / (a + b) for a, b in both)


MAX_CHI_SQUARE = 54.05  # p = 0.001 with 26 degrees of freedom


@pytest.mark.parametrize("count", [1920, pytest.param(99_968, marks=pytest.mark.soak)])
def test_the_distribution_is_that_without_speculation(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "tiny.gguf", "Q4_0")
    without = endings(path, count, False, 0)
    assert chi_square(without, endings(path, count, True, count)) < MAX_CHI_SQUARE
    monkeypatch.setattr(engine_module, "accept_draft", always_accepted)
    monkeypatch.setattr(AcceptanceRate, "learn", lambda *args: None)  # or rejections would stop the drafts
    assert chi_square(without, endings(path, count, True, 2 * count)) > MAX_CHI_SQUARE, (
        "a wrong rule goes unnoticed"
    )


def always_accepted(sequence: Sequence, sampled: list[Sampled], draft: list[int]) -> int:
    """A wrong rule: accepts every draft token."""
    for token in [Sampled(id) for id in draft] or sampled[:1]:
        if sequence.finish_reason is None:
            sequence.append(token)
    return max(0, len(draft) - 1)


def test_a_draft_model(tmp_path: Path) -> None:
    """Most drafts are accepted if the model is its own draft model; the tokens are the same with any draft model."""
    path = write_model(tmp_path / "tiny.gguf", "Q4_0")
    other = write_model(tmp_path / "other.gguf", "Q8_0")
    wanted = [
        (prompt, SamplingParams(max_tokens=40, temperature=0.2 * (i % 2), seed=i))
        for i, (prompt, _) in enumerate(requests(5))
    ]
    for draft, share in ((path, 0.5), (other, 0.0)):
        with (
            opened(draft, threads=1) as small,
            opened(path, threads=1, proposer=DraftModel(small, 320)) as engine,
        ):
            speculator = engine.scheduler.speculator
            assert speculator
            speculator.cost_model = FixedCost(0.01)
            sequences = [engine.submit(prompt, params) for prompt, params in wanted]
            while any(sequence.finish_reason is None for sequence in sequences):
                engine.step()
            ids = [[sampled.id for sampled in sequence.generated] for sequence in sequences]
            assert ids == tokens_without_stops(path, wanted)
            assert speculator.accepted > share * speculator.drafted and speculator.drafted > 30
            found = speculator.statistics
            assert (
                0 < found["steps"] <= found["drafted"]
                and found["saved_seconds"] == speculator.cost_model.saved
            )
            assert small.cache.free_blocks == small.cache.blocks


def test_a_draft_model_prefills_a_text_once(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", "Q4_0")
    prompt, params = list(range(40, 90)), SamplingParams(max_tokens=60, ignore_eos=True)
    with (
        opened(path, threads=1) as small,
        opened(path, threads=1, proposer=DraftModel(small, 320)) as engine,
    ):
        write, computed = small.step_slots[0].batch.write, []
        small.step_slots[0].batch.write = lambda chunks: (
            computed.append(sum(c.count for c in chunks)),
            write(chunks),
        )  # type: ignore[method-assign, assignment, func-returns-value]
        speculator = engine.scheduler.speculator
        assert speculator
        speculator.cost_model = FixedCost(0.01)
        engine.run((prompt, params))
        assert sum(computed) < 50 + 1.4 * speculator.drafted + KV_BLOCK


def test_a_draft_model_with_texts_of_the_same_prefix(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", "Q4_0")
    with opened(path, threads=1) as small:
        draft = DraftModel(small, 320)
        texts = [small.new_sequence([*range(40, 80), i], SamplingParams(max_tokens=9)) for i in range(3)]
        assert [len(draft) for draft in draft.propose([(text, 2) for text in texts])] == [2, 2, 2]
        assert [draft.uncached(text) for text in texts] == [0, 0, 0]
        for text in texts:
            draft.forget(text)
        assert small.cache.free_blocks == small.cache.blocks


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_draft_model_with_little_memory(architecture: str, batch: int, tmp_path: Path) -> None:
    """The draft model has room for fewer sequences: some get no drafts, and none waits forever."""
    path = write_model(tmp_path / "tiny.gguf", "Q4_0", architecture)
    wanted = [(prompt, SamplingParams(max_tokens=40, ignore_eos=True)) for prompt, _ in requests(5)]
    with (
        opened(path, threads=1, batch=batch, kv_memory=2.1 * CONTEXT * 1024 * 3) as small,
        opened(path, threads=1, batch=5, proposer=DraftModel(small, 320)) as engine,
    ):
        speculator = engine.scheduler.speculator
        assert speculator
        speculator.cost_model = FixedCost(0.01)
        sequences = [engine.submit(prompt, params) for prompt, params in wanted]
        while any(sequence.finish_reason is None for sequence in sequences):
            engine.step()
        assert [[s.id for s in sequence.generated] for sequence in sequences] == tokens_without_stops(
            path, wanted
        )
        assert speculator.accepted > 10
        assert small.cache.free_blocks == small.cache.blocks and not small.scheduler.running


@pytest.mark.parametrize("step_slots", [1, 2])
def test_a_draft_model_whose_memory_paused_sequences_hold(
    step_slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts outgrow the memory while others pause, and some are preempted while their last step runs."""
    path, random = write_model(tmp_path / "tiny.gguf", "Q4_0"), Random(1)
    monkeypatch.setattr(cpu.CPUDevice, "step_slots", step_slots)
    with opened(path, threads=1) as small:
        limits = replace(small.scheduler.limits, tokens=8)
        small.cache = KVCache(small.cache.windows, (limits.blocks,))  # one context
        small.scheduler = Scheduler(limits, small.cache)
        step, steps = small.step, 0

        def counted() -> list[Sequence]:
            nonlocal steps
            steps += 1
            assert steps < 1000, "it waits forever"
            return step()

        small.step = counted  # type: ignore[method-assign]
        draft, made = DraftModel(small, 320), 0
        for _ in range(20):
            texts = [
                small.new_sequence(
                    [random.randrange(320) for _ in range(random.randrange(1, 120))], SamplingParams()
                )
                for _ in range(6)
            ]
            for _ in range(15):
                steps = 0
                chosen = [text for text in texts if random.random() < 0.6]
                made += sum(map(bool, draft.propose([(text, random.randrange(9)) for text in chosen])))
                for text in texts:
                    text.tokens += [random.randrange(320) for _ in range(random.randrange(3))]
            for text in texts:
                draft.forget(text)
            assert small.cache.free_blocks == small.cache.blocks and not small.scheduler.waiting
        assert made > 300


def test_a_draft_model_recovers_from_a_failed_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(write_model(tmp_path / "tiny.gguf", "Q4_0"), threads=1) as small:
        draft = DraftModel(small, 320)
        texts = [small.new_sequence([*range(40, 80), i], SamplingParams(max_tokens=9)) for i in range(3)]
        wanted = [(text, 3) for text in texts]
        expected = draft.propose(wanted)
        step, left = small.step, [1, 0]

        def fails() -> list[Sequence]:
            if not left.pop():
                return step()
            raise MemoryError

        monkeypatch.setattr(small, "step", fails)
        with pytest.raises(MemoryError):
            draft.propose(wanted)
        monkeypatch.setattr(small, "step", step)
        assert not small.scheduler.running and small.cache.free_blocks == small.cache.blocks
        assert draft.propose(wanted) == expected


def tokens_without_stops(path: Path, wanted: list[Request]) -> list[list[int]]:
    with opened(path, threads=1) as engine:
        return [ids for ids, _ in engine.run(*wanted)]


def test_a_draft_model_shares_the_kv_memory(tmp_path: Path) -> None:
    main = write_tiny_model(tmp_path / "main.gguf", layers=3)
    draft = write_tiny_model(tmp_path / "draft.gguf")
    one = 64 * 2 * 64 * 2  # bytes of a context of 64 in a layer: keys and values of 64 float16
    options: dict[str, Any] = {"threads": 1, "context": 64, "batch": 4, "device": "cpu", "draft": draft}
    with LLM(main, kv_memory=3 * 4 * one, **options) as llm:
        assert llm._draft
        blocks = llm.engine.cache.blocks[0], llm._draft.engine.cache.blocks[0]
        assert blocks == (3 * 64 // KV_BLOCK,) * 2, "both caches hold the same number of tokens"
    with LLM(main, **options) as llm:
        assert llm._draft
        assert llm._draft.engine.cache.blocks == llm.engine.cache.blocks == (4 * 64 // KV_BLOCK,)
    with pytest.raises(DoesNotFitError, match="allow more, or use a smaller context"):
        LLM(main, kv_memory=3 * one, **options)


def test_a_draft_model_leaves_room_for_a_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf")
    options: dict[str, Any] = {"threads": 1, "context": 4096, "batch": 1, "device": "cpu"}
    with LLM(path, **options) as llm:
        alone, kv, weights = llm.nbytes, llm.engine.program.arena_bytes["kv"], llm._model.nbytes(panel_layout)
    monkeypatch.setattr(cpu, "touched_memory", lambda: 0)
    monkeypatch.setattr(cpu, "host_memory", lambda: HEADROOM + 2 * alone + kv)
    with LLM(path, draft=path, **options) as llm:
        assert llm.engine.program.arena_bytes["kv"] == kv
    monkeypatch.setattr(cpu, "host_memory", lambda: HEADROOM + 2 * weights + 1.9 * kv)
    with pytest.raises(DoesNotFitError, match=r"its draft model .* use no draft model, or a smaller context"):
        LLM(path, draft=path, **options)
    LLM(path, **options).close()


@pytest.mark.parametrize(("main", "draft"), [(0, 6), (6, 0)])
def test_a_draft_model_with_a_padded_vocabulary(main: int, draft: int, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "main.gguf", padding=main)
    other = write_tiny_model(tmp_path / "draft.gguf", padding=draft)
    options: dict[str, Any] = {"threads": 1, "context": 128, "batch": 2, "device": "cpu"}
    with LLM(path, **options) as alone, LLM(path, draft=other, **options) as llm:
        speculator = llm.engine.scheduler.speculator
        assert speculator
        speculator.cost_model = FixedCost(0.01)
        assert (
            llm.generate("hello", max_tokens=40).token_ids == alone.generate("hello", max_tokens=40).token_ids
        )
        assert speculator.drafted > 0


def test_different_vocabularies_are_rejected() -> None:
    check_vocabularies(["a", "b", "c"], ["a", "b", "c", "<pad>"])
    check_vocabularies(["a", "b", "c", "<pad>"], ["a", "b", "c"])
    with pytest.raises(RequestError, match="another vocabulary: use one of the same family"):
        check_vocabularies(["a", "b", "c"], ["a", "x", "c"])

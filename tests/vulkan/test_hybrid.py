"""Models with recurrent layers on the Vulkan device, with two steps in flight: checkpoints, batches, preemption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tandem import LLM
from tandem.devices.vulkan.device import VulkanDevice
from tandem.engine.engine import Engine
from tandem.engine.params import SamplingParams
from tandem.kernels import delta_rule, short_conv, ssm_scan
from tandem.kernels.abi import CHUNK_INTS, CHUNK_SOURCE, KV_BLOCK
from tandem.kernels.kernel import Kernel
from tandem.kernels.states import NO_STATE
from tandem.model.model import open_model
from tests.engine.simulation import FixedCost
from tests.engine.test_hybrid import RandomDrafts
from tests.models.test_reference import GOLDENS
from tests.vulkan.harness import cases_of, run_kernel

RANDOM = np.random.default_rng(3)
PROMPTS = [RANDOM.integers(0, 260, length).tolist() for length in (90, 1, 17, 64, 33, 5)]


def load(name: str, device: str, *, prefix_caching: bool = True, **options: Any) -> LLM:
    llm = LLM(GOLDENS / f"{name}.gguf", device=device, context=256, batch=4, kv="f32", **options)
    llm.engine.scheduler.prefix_caching = prefix_caching
    return llm


def answers(llm: LLM, prompts: list[list[int]], tokens: int = 8) -> list[list[int]]:
    results = llm.generate(prompts, max_tokens=tokens, temperature=0, ignore_eos=True)
    return [list(result.token_ids) for result in results]


@pytest.mark.parametrize("name", ["qwen35moe", "qwen3next", "nemotron_h_moe"])
def test_ragged_batches_answer_as_the_cpu(lavapipe: str, name: str) -> None:
    """Chunks of prompts beside sequences that decode, then the same from checkpoints."""
    with load(name, "cpu") as cpu:
        expected = [answers(cpu, [prompt])[0] for prompt in PROMPTS]
    with load(name, lavapipe) as llm:
        for tokens in (37, 256):
            llm.engine.scheduler.limits = replace(llm.engine.scheduler.limits, tokens=tokens)
            assert answers(llm, PROMPTS) == expected
        assert llm.stats().cached_prompt_tokens > 0


def test_a_conversation_goes_on_from_checkpoints(lavapipe: str) -> None:
    prompt = PROMPTS[0]
    with load("qwen35", lavapipe, prefix_caching=False) as llm:
        [answer] = answers(llm, [prompt], 24)
        longer = [*prompt, *answer, 7, 8, 9]
        other = [*prompt[:70], *longer[:30]]
        expected = [[answer], answers(llm, [longer], 24), answers(llm, [other], 24)]
    with load("qwen35", lavapipe) as llm:
        costs = []
        for text, wanted in zip((prompt, longer, other), expected, strict=True):
            before = llm.stats()
            assert answers(llm, [text], 24) == wanted
            after = llm.stats()
            costs.append(len(text) - after.cached_prompt_tokens + before.cached_prompt_tokens)
        assert costs[0] == len(prompt) and costs[1] <= 3 + 2 * KV_BLOCK, costs
        states = llm.stats().states
        assert states and states.cached > 2 and states.used == 0


def test_preempted_requests_answer_the_same(lavapipe: str) -> None:
    prompts = PROMPTS[:4]
    with load("qwen35", lavapipe, prefix_caching=False) as llm:
        expected = answers(llm, prompts, 40)
    with load("qwen35", lavapipe, kv_memory=132_000) as llm:
        assert answers(llm, prompts, 40) == expected
        assert llm.engine.scheduler.preemptions, "there was room for all"


def test_a_saved_conversation_has_its_state(lavapipe: str, tmp_path: Path) -> None:
    """Saved on one device and restored on another."""
    text = "the " * 40
    with load("qwen35", lavapipe) as llm:
        first = llm.generate(text, max_tokens=8, temperature=0)
        assert llm.save(text, tmp_path / "state") > 60
    for device in (lavapipe, "cpu"):
        with load("qwen35", device) as llm:
            llm.restore(tmp_path / "state")
            again = llm.generate(text, max_tokens=8, temperature=0)
            assert again.text == first.text and llm.stats().cached_prompt_tokens > 0


def test_rejected_drafts_leave_no_trace_in_states(lavapipe: str) -> None:
    """The state after each draft token is stored, and that of the last accepted one is read."""
    prompts, greedy = PROMPTS[2:], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with load("qwen35", "cpu") as cpu:
        expected = answers(cpu, prompts, 24)
    texts = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
    model, device = open_model(GOLDENS / "qwen35.gguf"), VulkanDevice(lavapipe)
    engine = Engine.load(
        model, device, context=256, batch=4, kv="f32", proposer=RandomDrafts(texts, Random(5))
    )
    speculator = engine.scheduler.speculator
    assert speculator
    speculator.cost_model = FixedCost(0.001)
    sequences = [engine.submit(prompt, greedy) for prompt in prompts]
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
    assert [[sampled.id for sampled in sequence.generated] for sequence in sequences] == expected
    assert 20 < speculator.accepted < speculator.drafted
    device.close()
    model.gguf.close()


def test_layers_on_two_devices_keep_states_of_their_own(lavapipe: str) -> None:
    with load("qwen35", "cpu") as cpu:
        expected = answers(cpu, PROMPTS)
    with load("qwen35", f"{lavapipe},cpu") as llm:
        assert answers(llm, PROMPTS) == expected
        assert answers(llm, PROMPTS) == expected and llm.stats().cached_prompt_tokens > 0


@pytest.mark.parametrize(
    "kernel", [delta_rule.KERNEL, short_conv.KERNEL, ssm_scan.KERNEL], ids=lambda k: k.name
)
def test_a_cut_changes_no_bit(device: VulkanDevice, kernel: Kernel) -> None:
    """The longest case in one chunk, and in two with the state between them in a slot."""
    case = max(cases_of(kernel), key=lambda c: c.counts["tokens"] if c.counts["work"] == 2 else 0)
    tokens, sequences = case.counts["tokens"], int(case.scalars["sequences"])
    whole = run_kernel(device, kernel, case)
    first_slot = case.arrays["chunks"][CHUNK_SOURCE]
    last_slot = case.arrays["chunks"][CHUNK_INTS * sequences + tokens - 1]
    for cut in (1, 7, 16, tokens - 1):
        arrays = {name: array.copy() for name, array in case.arrays.items()}
        for begin, end, source, target in ((0, cut, first_slot, 1), (cut, tokens, 1, last_slot)):
            chunks = np.zeros_like(arrays["chunks"])
            chunks[: CHUNK_SOURCE + 1] = begin, end - begin, source
            chunks[CHUNK_INTS * sequences :] = NO_STATE
            chunks[CHUNK_INTS * sequences + end - 1] = target
            arrays["chunks"] = chunks
            arrays |= run_kernel(device, kernel, replace(case, arrays=arrays))
        assert np.array_equal(arrays["out"], whole["out"], equal_nan=True), cut
        assert (arrays["state"][last_slot] == whole["state"][last_slot]).all(), cut

"""Whole models on the Vulkan device: as near to transformers as on the CPU, whatever the memory or the barriers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tandem import LLM
from tandem.devices.vulkan.device import VulkanDevice
from tandem.engine.engine import Engine
from tandem.kernels.dispatch import Dispatch
from tandem.kernels.dispatch_table import DISPATCH_RULES
from tandem.model.model import open_model
from tests.models.test_reference import GOLDENS, NAMES, golden_prompts


@pytest.fixture(autouse=True)
def without_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests look at logits alone."""
    monkeypatch.setitem(DISPATCH_RULES, "sample", lambda scalars, counts, gpu: Dispatch(0))


def load(name: str, device: str, gpu_memory: float | None = None, kv: str = "f32") -> LLM:
    return LLM(GOLDENS / f"{name}.gguf", device=device, context=128, kv=kv, gpu_memory=gpu_memory)


@pytest.mark.parametrize("name", NAMES)
def test_equals_transformers(lavapipe: str, name: str) -> None:
    with load(name, lavapipe) as llm:
        for ids, logits in golden_prompts(name):
            assert np.abs(llm.logits(ids) - logits).max() < 1e-4


@pytest.mark.parametrize("name", ["gemma3-pattern3", "qwen3", "qwen3moe", "qwen35"])
def test_intermediates_equal_those_of_the_cpu(lavapipe: str, name: str) -> None:
    """The first value to differ says which kernel went wrong."""
    [*_, (ids, _)] = golden_prompts(name)
    with load(name, "cpu") as cpu, load(name, lavapipe) as llm:
        names = cpu.intermediates
        expected, got = cpu.capture(ids, names), llm.capture(ids, names)
    for value in names:
        if value not in ("result", "logits"):
            assert np.abs(got[value] - expected[value]).max() < 1e-4, value


@pytest.mark.parametrize("name", ["gemma3-pattern3", "qwen2"])
def test_int8_keys_and_values_are_those_of_the_cpu(lavapipe: str, name: str) -> None:
    [*_, (ids, _)] = golden_prompts(name)
    with load(name, "cpu", kv="q8") as cpu, load(name, lavapipe, kv="q8") as llm:
        difference = np.abs(llm.logits(ids) - cpu.logits(ids))
    assert difference.max() < 5e-3 and difference.mean() < 1e-4  # a quant may round the other way


def test_a_limit_that_spills_changes_no_bit(lavapipe: str) -> None:
    [*_, (ids, _)] = golden_prompts("llama")
    with load("llama", lavapipe) as llm, load("llama", lavapipe, gpu_memory=100_000) as limited:
        assert any(placed.spilled for placed in limited.device.placed)  # type: ignore[attr-defined]
        assert (llm.logits(ids) == limited.logits(ids)).all()


def test_experts_spill_before_attention_and_change_no_bit(lavapipe: str) -> None:
    """A mixture that does not fit: attention, routers, shared experts and the KV cache stay in the GPU's memory."""
    [*_, (ids, _)] = golden_prompts("qwen2moe")
    with load("qwen2moe", lavapipe) as llm:
        parts = [placed.part for placed in llm.device.placed]  # type: ignore[attr-defined]
        expected = llm.logits(ids)
    others = sum(part.nbytes for part in parts if part.use == "hot" and part.arena != "kv")
    with load("qwen2moe", lavapipe, gpu_memory=others + 50_000) as limited:  # room for the smallest KV cache
        placed = limited.device.placed  # type: ignore[attr-defined]
        assert (limited.logits(ids) == expected).all()
    assert {p.part.use for p in placed if p.spilled} == {"experts", "cold"}
    assert not any(p.spilled for p in placed if p.part.use == "hot")
    # Gate, up and down of 8 experts in 2 layers, in float32: all of them, and nothing else.
    assert sum(p.part.nbytes for p in placed if p.part.use == "experts") == 2 * 3 * 8 * 32 * 32 * 4


@pytest.mark.parametrize("name", ["gemma3-27b", "llama", "qwen3moe", "qwen35"])
def test_the_planned_barriers_are_enough(lavapipe: str, name: str) -> None:
    """As many barriers as launches change no bit. Lavapipe runs launches in order anyway; GPUs do not."""
    [*_, (ids, _)] = golden_prompts(name)
    model, device = open_model(GOLDENS / f"{name}.gguf"), VulkanDevice(lavapipe)
    # Unfused: some run side by side.
    engine = Engine.load(model, device, context=128, batch=8, kv="f32", passes=())
    planned, program = engine.logits(ids), engine.program
    assert sum(launch.barrier for launch in program.launches) < 0.9 * len(program.launches)
    full = replace(program, launches=[replace(launch, barrier=True) for launch in program.launches])
    engine.step_slots[0].recording = device.record(full)
    assert (engine.logits(ids) == planned).all()
    device.close()
    model.gguf.close()

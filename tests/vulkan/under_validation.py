"""What test_validation.py runs under the layer besides test_device.py: some cases of every kernel, and a model."""

from __future__ import annotations

import pytest

from tandem import LLM
from tandem.devices.vulkan.device import VulkanDevice
from tests.models.test_reference import GOLDENS
from tests.vulkan.harness import cases_of, run_kernel, runs
from tests.vulkan.test_kernels import KERNELS

EVERY_NTH = 7


@pytest.mark.parametrize("name", KERNELS)
def test_some_cases(device: VulkanDevice, name: str) -> None:
    for case in cases_of(KERNELS[name])[::EVERY_NTH]:
        if runs(device, KERNELS[name], case):
            run_kernel(device, KERNELS[name], case)


@pytest.mark.parametrize("gpu_memory", [None, 100_000])
def test_a_model_that_serves_several(lavapipe: str, gpu_memory: float | None) -> None:
    """Steps in flight, prompts beside answers, and memory of the host's."""
    prompts = [[5, 6, 7], [8], list(range(10, 60))]
    with LLM(GOLDENS / "gemma3-pattern3.gguf", device=lavapipe, context=128, gpu_memory=gpu_memory) as llm:
        assert [len(result.token_ids) for result in llm.generate(prompts, max_tokens=6)] == [6] * 3
        llm.engine.step_slots[0].recording.replay_timed()


def test_a_model_on_two_devices(lavapipe: str) -> None:
    """Each is used by a thread of its own."""
    for device in (f"{lavapipe},cpu", f"cpu,{lavapipe}"):
        with LLM(GOLDENS / "gemma3-pattern3.gguf", device=device, threads=1, context=128) as llm:
            assert len(llm.generate([5, 6, 7], max_tokens=6).token_ids) == 6

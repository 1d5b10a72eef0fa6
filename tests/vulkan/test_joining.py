"""Launches that do part of each other's work for single tokens: a product and the norm after it. RoPE inside attention
needs matrix units: see test_matrices.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tandem.devices.vulkan import tuned
from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.joining import SINGLE, find_joints
from tandem.kernels.matmul import product_case
from tests.vulkan import turning


@pytest.mark.parametrize("layout", ["q4_0", "q4_k", "q6_k", "q8_0"])
def test_a_norm_takes_the_sums_that_the_product_before_has_left(device: VulkanDevice, layout: str) -> None:
    for dim, options in ((32, "post q8"), (512, "q8"), (1056, "post"), (5376, "post q8")):
        turning.check_norm(device, layout, dim, options, np.random.default_rng(dim))


def test_a_norm_is_right_after_a_product_with_any_choice_of_the_tuner(device: VulkanDevice) -> None:
    gpu, product = device.capabilities, product_case("q4_0", 1, 1056, 512, 0, 0, np.random.default_rng(0))
    choices = tuned.candidates("matmul_q4_0", product.scalars, turning.ONE, gpu)
    assert choices
    for choice in choices:
        with gpu.choices.trying(choice):
            turning.check_norm(device, "q4_0", 1056, "post q8", np.random.default_rng(0))


def test_a_product_that_another_launch_reads_too_is_left_as_it_is(device: VulkanDevice) -> None:
    pair = turning.norm_pair(device, "q4_0", 32, "post q8", np.random.default_rng(0))
    recording = turning.record_pair(device, pair.launches, turning.ONE)
    assert find_joints(recording.program, device)
    launches = recording.program.launches
    assert not find_joints(replace(recording.program, launches=[*launches, launches[-1]]), device)


def test_scalars_that_are_compiled_in_are_those_of_the_launch(
    device: VulkanDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with memory of its own."""
    monkeypatch.setattr(device, "capabilities", replace(device.capabilities, kind="discrete"))
    pair = turning.norm_pair(device, "q4_0", 1056, "post q8", np.random.default_rng(0))
    joint = turning.record_pair(device, pair.launches, turning.ONE)._joints[0]
    found = joint.dispatches({**turning.ONE, SINGLE: 1}, device.capabilities)
    assert found and all(dispatch and dispatch.known for dispatch in found)
    for dim, options in ((512, "q8"), (1056, "post q8")):
        turning.check_norm(device, "q4_0", dim, options, np.random.default_rng(dim))

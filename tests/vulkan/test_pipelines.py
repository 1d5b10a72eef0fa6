"""Shaders ask only for what a device has, and are compiled once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.pipelines import SPIRV, needed_features
from tandem.errors import DeviceError


def test_a_shader_that_needs_a_feature_the_device_lacks(lavapipe: str) -> None:
    device = VulkanDevice(lavapipe)
    needy = next(path for path in sorted(SPIRV.glob("matmul_q*.spv")) if needed_features(path.read_bytes()))
    device.pipelines.capabilities = replace(device.capabilities, features=frozenset())
    with pytest.raises(DeviceError, match=f"lacks .* for {needy.stem}: update its driver"):
        device.pipelines.get(needy.stem)
    with pytest.raises(DeviceError, match="the shader nothing is not built: run `make shaders`"):
        device.pipelines.get("nothing")
    device.close()


def test_the_driver_says_that_it_compiled_nothing(lavapipe: str, tmp_path: Path) -> None:
    """By the feedback of each pipeline, which software does not give: see test_start.py for that."""
    compiled = []
    for _ in range(2):
        device = VulkanDevice(lavapipe, cache=tmp_path)
        for shader in ("quantise", "glu"):
            device.pipelines.get(shader)
        device.pipelines.save()
        compiled.append(device.pipelines.compiled)
        device.close()
    assert compiled[0] == 2 and (compiled[1] == 0 or device.capabilities.kind == "software")

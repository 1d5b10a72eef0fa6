"""The Khronos validation layer has nothing to say about our use of Vulkan, nor about handles left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LAYER = Path("/usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json")


def test_the_validation_layer_is_silent(lavapipe: str) -> None:
    if not LAYER.exists():
        pytest.skip("THE VALIDATION LAYER DOES NOT RUN: install it (Debian: vulkan-validationlayers)")
    environment = {**os.environ, "VK_INSTANCE_LAYERS": "VK_LAYER_KHRONOS_validation"}
    folder = Path(__file__).parent
    tests = [
        str(folder / "test_device.py"),
        f"{folder / 'test_faults.py'}::test_a_good_run_gives_everything_back",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", *tests, str(folder / "under_validation.py")],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown[-3000:]
    assert "Validation" not in shown and "VUID" not in shown, shown[:3000]


def test_the_layer_is_really_there(lavapipe: str) -> None:
    """A call that breaks a rule is reported: silence above means something."""
    if not LAYER.exists():
        pytest.skip("THE VALIDATION LAYER DOES NOT RUN: install it (Debian: vulkan-validationlayers)")
    script = (
        "from tandem.devices.vulkan.device import VulkanDevice\n"
        f"d = VulkanDevice({lavapipe!r})\n"
        "d.vk.create('Buffer', d.handle, size=0, usage=32)\n"
    )
    environment = {**os.environ, "VK_INSTANCE_LAYERS": "VK_LAYER_KHRONOS_validation"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert "VUID-VkBufferCreateInfo-size-00912" in done.stdout + done.stderr

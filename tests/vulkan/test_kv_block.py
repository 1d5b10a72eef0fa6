"""The shaders take KV_BLOCK from abi.py too: compiled with another value, they still agree with NumPy."""

from __future__ import annotations

import shutil
import subprocess
import warnings

import pytest

from tandem.devices.vulkan import compile_shaders
from tandem.devices.vulkan.device import VulkanDevice
from tests.ops.test_kv_block import run_with_other_blocks


def test_shaders_follow_the_size_of_a_kv_block(device: VulkanDevice) -> None:
    try:
        if not shutil.which("g++"):
            raise FileNotFoundError("g++")
        compile_shaders.driver()
    except (OSError, subprocess.CalledProcessError) as error:
        message = f"SHADERS ARE NOT COMPILED WITH OTHER KV BLOCKS: the compiler cannot be had here ({error})"
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    assert run_with_other_blocks(["tests/vulkan/test_kernels.py"], "[attention] or [rope]") == 2

"""A Vulkan device for every machine: lavapipe, installed where we may, or skipped loudly."""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator

import pytest

from tandem.devices.vulkan.device import VulkanDevice, devices
from tandem.errors import DeviceError
from tests.vulkan.harness import DEVICE, open_device


def lavapipe_is_there() -> bool:
    try:
        return any("lavapipe" in device.driver for device in devices())
    except DeviceError:
        return False


@pytest.fixture(scope="session")
def lavapipe() -> str:
    """The name of the software device, or of the one that TANDEM_TEST_DEVICE names."""
    if "lavapipe" not in DEVICE:
        return DEVICE
    if not lavapipe_is_there() and os.geteuid() == 0 and shutil.which("apt-get"):
        packages = ["libvulkan1", "mesa-vulkan-drivers", "vulkan-validationlayers"]
        for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
            subprocess.run(["apt-get", *command], capture_output=True, timeout=300)
    if not lavapipe_is_there():
        message = (
            "NO VULKAN TEST RUNS: install lavapipe (Debian: mesa-vulkan-drivers vulkan-validationlayers)"
        )
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    return DEVICE


@pytest.fixture(scope="session")
def device(lavapipe: str) -> Iterator[VulkanDevice]:
    """Lavapipe with room for any kernel's case."""
    opened = open_device(lavapipe)
    yield opened
    opened.close()

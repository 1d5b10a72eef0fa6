"""Which device is opened, and what is said when none can be."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from tandem.devices.opening import open_device
from tandem.devices.vulkan import binding
from tandem.devices.vulkan.capabilities import choose
from tandem.devices.vulkan.device import VulkanDevice
from tandem.errors import DeviceError
from tests.vulkan.machines import ALL_MAPPED, SHARED, SMALL_WINDOW, SOFTWARE

pytestmark = pytest.mark.fast
EVERY = [SMALL_WINDOW, ALL_MAPPED, SHARED, SOFTWARE]


@pytest.mark.parametrize(
    ("devices", "wanted", "chosen"),
    [
        (EVERY, "vulkan", SMALL_WINDOW),
        ([SHARED, ALL_MAPPED], "vulkan", ALL_MAPPED),
        ([SOFTWARE, SHARED], "vulkan", SHARED),
        (EVERY, "vulkan:1", ALL_MAPPED),
        (EVERY, "vulkan:3", SOFTWARE),
        (EVERY, "vulkan:LLVM", SOFTWARE),
        (EVERY, "vulkan:laptop", SHARED),
    ],
)
def test_discrete_before_integrated_and_software_only_by_name(
    devices: list[Any], wanted: str, chosen: Any
) -> None:
    assert choose(devices, wanted) is chosen


@pytest.mark.parametrize(
    ("devices", "wanted", "message"),
    [
        ([], "vulkan", "no Vulkan device: install your GPU's Vulkan driver"),
        ([], "vulkan:0", "no Vulkan device"),
        ([SOFTWARE], "vulkan", r"only software \(vulkan:3 is llvmpipe \(software\)\): name it"),
        (EVERY, "vulkan:7", "no device 'vulkan:7': vulkan:0 is old card"),
        (EVERY, "vulkan:radeon", "no device 'vulkan:radeon'"),
        (
            [replace(SHARED, features=frozenset())],
            "vulkan",
            "laptop lacks bufferDeviceAddress: update its driver",
        ),
        ([replace(SHARED, api=(1, 1, 0))], "vulkan", "laptop lacks Vulkan 1.2"),
        ([replace(SHARED, queue_family=-1)], "vulkan", "laptop lacks a compute queue"),
    ],
)
def test_what_is_wrong_and_what_to_do(devices: list[Any], wanted: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        choose(devices, wanted)


def test_without_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(binding.ffi, "dlopen", missing)
    with pytest.raises(DeviceError, match="install the package libvulkan1"):
        VulkanDevice()


def test_with_every_device_hidden() -> None:
    """A loader without drivers: an error, and no other device in its place."""
    script = "from tandem.devices.opening import open_device; open_device('vulkan')"
    environment = {**os.environ, "VK_ICD_FILENAMES": os.devnull, "VK_DRIVER_FILES": os.devnull}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode and "DeviceError" in last and "install" in last, done.stderr


def test_an_unknown_kind_of_device() -> None:
    with pytest.raises(DeviceError, match="use cpu, vulkan"):
        open_device("gpu")


def test_the_description_says_which_paths_are_taken() -> None:
    text = ALL_MAPPED.describe()
    assert text.startswith("vulkan:1 new card (discrete, 24.0 GB") and "without int8 dot product" in text

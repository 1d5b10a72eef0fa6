"""Which device is opened, and what is said when none can be."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.devices import backends
from tandem.devices.backends import open_device
from tandem.devices.vulkan import binding, device
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


class AnyGPU:
    """Stands for a VulkanDevice that opens."""

    def __init__(self, wanted: str, **_: Any) -> None:
        self.wanted, self.pipelines = wanted, SimpleNamespace(q8_sums=True)
        self.capabilities = SimpleNamespace(register_coopmat=True)


def no_gpu(wanted: str, **_: Any) -> None:
    raise DeviceError("the driver is broken: update it")


def with_gpu(monkeypatch: pytest.MonkeyPatch, opened: Any, nodes: tuple[str, ...] = (os.devnull,)) -> None:
    monkeypatch.setattr(backends, "GPU_NODES", nodes)
    monkeypatch.setattr(device, "VulkanDevice", opened)


def test_auto_takes_the_best_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for plainly: choose() then prefers a discrete one, and never takes software."""
    with_gpu(monkeypatch, AnyGPU)
    chosen: Any = open_device("auto")
    assert chosen.wanted == "vulkan"
    assert not chosen.pipelines.q8_sums, "no other device reads them"


def test_auto_with_a_broken_driver_goes_on_with_the_cpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, no_gpu)
    chosen = open_device("auto", threads=1)
    assert chosen.name == "cpu"
    assert chosen.describe().endswith("1 thread; no GPU is used: the driver is broken: update it")
    chosen.close()
    with pytest.raises(DeviceError, match="the driver is broken"):
        open_device("vulkan")


def test_auto_loads_no_vulkan_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, no_gpu, nodes=("/dev/no-such-*",))
    chosen = open_device("auto", threads=1)
    assert chosen.describe().endswith("1 thread")
    chosen.close()


def test_an_unknown_kind_of_device() -> None:
    with pytest.raises(DeviceError, match="use cpu, vulkan"):
        open_device("gpu")


def test_the_description_says_which_paths_are_taken() -> None:
    text = ALL_MAPPED.describe()
    assert text.startswith("vulkan:1 new card (discrete, 24.0 GB") and "without int8 dot product" in text

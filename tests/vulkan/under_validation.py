"""What test_validation.py runs under the layer besides test_device.py: some cases of every kernel."""

from __future__ import annotations

import pytest

from tandem.devices.vulkan.device import VulkanDevice
from tests.vulkan.harness import cases_of, run_kernel
from tests.vulkan.test_kernels import KERNELS

EVERY_NTH = 7


@pytest.mark.parametrize("name", KERNELS)
def test_some_cases(device: VulkanDevice, name: str) -> None:
    for case in cases_of(KERNELS[name])[::EVERY_NTH]:
        run_kernel(device, KERNELS[name], case)

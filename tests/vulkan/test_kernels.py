"""Every kernel with a Vulkan version against its NumPy reference on lavapipe; new ones by themselves."""

from __future__ import annotations

import pytest

from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.grids import GRIDS
from tandem.kernels import all_kernels
from tests.vulkan.harness import cases_of, check_case

KERNELS = {name: kernel for name, kernel in all_kernels().items() if name in GRIDS}


@pytest.mark.parametrize("name", KERNELS)
def test_matches_reference(device: VulkanDevice, name: str) -> None:
    for case in cases_of(KERNELS[name]):
        try:
            check_case(device, KERNELS[name], case)
        except AssertionError as error:
            raise AssertionError(f"{case.label}: {error}") from error

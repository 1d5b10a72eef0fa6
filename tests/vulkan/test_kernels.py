"""Every kernel with a Vulkan version against its NumPy reference on lavapipe; new ones by themselves."""

from __future__ import annotations

import pytest

from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.grids import GRIDS
from tandem.kernels import all_kernels
from tandem.kernels.layouts import Q8_BLOCK
from tests.vulkan.harness import cases_of, check_case, open_device, run_kernel

QUANTISING = ("norm", "glu", "quantise", "attention", "matmul_q4_0")
KERNELS = {name: kernel for name, kernel in all_kernels().items() if name in GRIDS}


@pytest.mark.parametrize("name", KERNELS)
def test_matches_reference(device: VulkanDevice, name: str) -> None:
    for case in cases_of(KERNELS[name]):
        try:
            check_case(device, KERNELS[name], case)
        except AssertionError as error:
            raise AssertionError(f"{case.label}: {error}") from error


def test_sums_that_no_other_device_reads_are_left_out(device: VulkanDevice, lavapipe: str) -> None:
    alone = open_device(lavapipe)
    alone.pipelines.q8_sums = False
    for name in QUANTISING:
        kernel = KERNELS[name]
        case = next(c for c in cases_of(kernel) if "out" in c.arrays and c.arrays["out"].dtype == Q8_BLOCK)
        out, whole = (run_kernel(d, kernel, case)["out"] for d in (alone, device))
        assert (out["q"] == whole["q"]).all() and (out["scale"] == whole["scale"]).all(), name
        assert all((out[field] == case.arrays["out"][field]).all() for field in ("sum", "low", "high")), name
    alone.close()

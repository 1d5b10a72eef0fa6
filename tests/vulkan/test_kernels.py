"""Every kernel with a Vulkan version against its NumPy reference on lavapipe; new ones by themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tandem.devices.vulkan.device import VulkanDevice
from tandem.kernels import all_kernels, expert_matmul, matmul
from tandem.kernels.abi import EPILOGUE_GELU_GLU, Q8_BLOCK
from tandem.kernels.dispatch_table import DISPATCH_RULES
from tandem.kernels.panels import LAYOUTS
from tandem.program.program import Launch, Program
from tests.vulkan.harness import cases_of, check_case, open_device, run_kernel, runs

QUANTISING = ("norm", "glu", "quantise", "attention", "matmul_q4_0")
KERNELS = {name: kernel for name, kernel in all_kernels().items() if name in DISPATCH_RULES}


@pytest.mark.parametrize("name", KERNELS)
def test_matches_reference(device: VulkanDevice, name: str) -> None:
    cases = [case for case in cases_of(KERNELS[name]) if runs(device, KERNELS[name], case)]
    if not cases:
        pytest.skip("it needs matrix units: see test_matrices.py")
    for case in cases:
        try:
            check_case(device, KERNELS[name], case)
        except AssertionError as error:
            raise AssertionError(f"{case.label}: {error}") from error


@pytest.mark.parametrize("layout", ["q4_0", "q5_1", "q8_0", "q4_k", "q6_k", "q2_k", "iq4_xs"])
def test_one_and_two_tokens_as_on_a_gpu_with_many_threads(
    device: VulkanDevice, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's blocks are then shared by many, in whole rounds or not."""
    monkeypatch.setattr(device, "capabilities", replace(device.capabilities, kind="discrete"))
    kernel, rng = matmul.BY_LAYOUT[layout], np.random.default_rng(3)
    for tokens in (1, 2):
        for rows, columns, epilogue in ((40, 4096, 0), (16, 5376, 0), (128, 2816, EPILOGUE_GELU_GLU)):
            case = matmul.make_case(layout, tokens, rows, columns, epilogue, 0, rng)
            check_case(device, kernel, case)


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.quantised])
def test_a_row_a_lane(device: VulkanDevice, layout: str) -> None:
    """As on an AMD GPU, with one part of the columns and with several; also several groups of tokens."""
    kernel, rng = matmul.BY_LAYOUT[layout], np.random.default_rng(3)
    for tokens, rows, columns, epilogue, out_q8, split_k in (
        (3, 40, 256, 0, 0, 4), (9, 100, 512, 0, 0, 1), (18, 128, 768, EPILOGUE_GELU_GLU, 1, 8), (70, 64, 256, 1, 0, 2)
    ):  # fmt: skip
        case = matmul.make_case(layout, tokens, rows, columns, epilogue, out_q8, rng, bias=not epilogue)
        with device.choices.trying({"rows": 1, "split_k": split_k}):
            check_case(device, kernel, case)


@pytest.mark.parametrize("layout", ["q4_0", "q4_k"])
def test_parts_that_share_decoded_rows(device: VulkanDevice, layout: str) -> None:
    """As on an AMD GPU from 33 tokens on. lavapipe compiles such a shader for seconds; tests/rdna3 has more formats."""
    case = matmul.make_case(layout, 46, 128, 512, EPILOGUE_GELU_GLU, 1, np.random.default_rng(3))
    with device.choices.trying({"rows": 1}):
        check_case(device, matmul.BY_LAYOUT[layout], case)


def test_sums_that_no_other_device_reads_are_left_out(device: VulkanDevice, lavapipe: str) -> None:
    alone = open_device(lavapipe)
    alone.pipelines.q8_sums = False
    for name in QUANTISING:
        kernel = KERNELS[name]
        case = next(c for c in cases_of(kernel) if "out" in c.arrays and c.arrays["out"].dtype == Q8_BLOCK)
        out, whole = (run_kernel(d, kernel, case)["out"] for d in (alone, device))
        assert (out["q"] == whole["q"]).all() and (out["scale"] == whole["scale"]).all(), name
        assert all((out[field] == case.arrays["out"][field]).all() for field in ("sum", "low", "high")), name
    kernel = expert_matmul.KERNELS[0]
    experts = Launch(kernel, {buffer.name: None for buffer in kernel.buffers}, {}, "experts")
    alone.allocate(Program([experts], {}, {}))
    assert alone.pipelines.q8_sums, "experts read them, also on a GPU that is alone"
    alone.close()

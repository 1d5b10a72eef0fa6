"""Every kernel on its cases, as machine code of RADV for a Radeon 780M, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.bench.kernel_checks import (
    INTEGER_ERROR,
    LARGER_MATMULS,
    check_kernel,
    check_matmul,
    large_matmuls,
    runs,
)
from tandem.devices.rdna3.compiler import FAMILIES
from tandem.devices.rdna3.device import EmulatedDevice
from tandem.kernels import all_kernels, matmul
from tandem.kernels.kernel import Case
from tandem.kernels.panels import LAYOUTS
from tests.rdna3.conftest import opened

SLOW = {"sample": 4}  # of whose cases each fourth runs here, and all in `make soak`
# On matrices of a shape that RDNA3 has not.
FUSED_FOR_NVIDIA = {
    "attention_rope", "attention_prefetch", "expert_matmul_tokens_f16", "expert_matmul_tokens_bf16"
}  # fmt: skip
PROMPTS = ("q4_0", "q6_k", "f16")  # formats of which prompts run here too
SEEDS = range(1, 4)
ON_GPUS = set(all_kernels())


def cases(device: EmulatedDevice, name: str) -> list[Case]:
    kernel = all_kernels()[name]
    return [case for case in kernel.cases(np.random.default_rng(1)) if runs(device, kernel, case)]


@pytest.mark.parametrize("name", sorted(ON_GPUS - FUSED_FOR_NVIDIA))
def test_kernel(device: EmulatedDevice, name: str) -> None:
    done = check_kernel(device, name, iter(cases(device, name)[:: SLOW.get(name, 1)]))
    assert done.cases and not done.failures, "\n".join(done.failures)


def test_matmuls_of_matrix_units(device: EmulatedDevice) -> None:
    cases = large_matmuls(np.random.default_rng(2))
    some = (c for c in cases if c.counts["tokens"] < (500 if c.label.startswith(PROMPTS) else 100))
    done = check_kernel(device, LARGER_MATMULS, some)
    assert done.cases and not done.failures, "\n".join(done.failures)


@pytest.mark.parametrize("layout", ["q4_0", "q4_k", "q6_k", "q2_k", "mxfp4"])
def test_matmuls_that_share_decoded_rows(wave64: EmulatedDevice, layout: str) -> None:
    """33 to 128 tokens: whole and ragged groups of four tokens, of four blocks and of 64 rows; with GLU and without."""
    rng, span = np.random.default_rng(6), LAYOUTS[layout].span
    for tokens, rows, blocks, epilogue, out_q8 in (
        (34, 80, 5, 0, 0),
        (64, 128, 8, 2, 1),
        (67, 64, 7, 1, 1),
        (127, 48, 6, 0, 0),
    ):
        columns = -(-32 * blocks // span) * span
        case = matmul.make_case(layout, tokens, rows, columns, epilogue, out_q8, rng)
        check_matmul(wave64, matmul.BY_LAYOUT[layout], case, INTEGER_ERROR)
        assert wave64.executed and wave64.executed.program.machine_code.job.shader.endswith("_shared_rows")


@pytest.mark.parametrize("family", FAMILIES[1:])
@pytest.mark.parametrize("name", ["attention", "matmul_q4_k", "norm"])
def test_rdna35(mesa: None, family: str, name: str) -> None:
    """A Radeon 890M and 8060S: the same instructions, scheduled otherwise."""
    for device in opened(64, family):
        done = check_kernel(device, name, iter(cases(device, name)[::4]))
        assert done.cases and not done.failures, "\n".join(done.failures)


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_everything_on_rdna35(mesa: None, family: str) -> None:
    for device in (each for lanes in (64, 32) for each in opened(lanes, family)):
        names = ON_GPUS - FUSED_FOR_NVIDIA
        found = [check_kernel(device, name, iter(cases(device, name))) for name in names]
        assert not [failure for done in found for failure in done.failures]


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_everything_in_another_order(
    device: EmulatedDevice, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "seed", seed)
    found = [check_kernel(device, name, iter(cases(device, name))) for name in ON_GPUS - FUSED_FOR_NVIDIA]
    found.append(check_kernel(device, LARGER_MATMULS, large_matmuls(np.random.default_rng(2))))
    assert not [failure for done in found for failure in done.failures]

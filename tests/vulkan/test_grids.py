"""Every dispatch that a GPU with matrix units would get: its shader is there, and it fits the device's limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tandem.devices.vulkan.capabilities import Capabilities, MatrixShape
from tandem.devices.vulkan.grids import GRIDS, Dispatch
from tandem.devices.vulkan.pipelines import SPIRV
from tandem.kernels import all_kernels
from tandem.kernels.kernel import Kernel
from tests.vulkan.machines import ALL_MAPPED

pytestmark = pytest.mark.fast
SHAPES = (MatrixShape(16, 16, 16, "f16", "f16", "f32"), MatrixShape(16, 8, 16, "f16", "f16", "f32"))
MATRICES = replace(ALL_MAPPED, subgroup_min=32, subgroup_max=32, matrix_shapes=SHAPES, shared_memory=48 << 10)
COUNTS = [
    {"tokens": n, "rows": min(n, 64), "work": work}
    for n in (1, 2, 8, 9, 16, 17, 32, 64, 65, 512)
    for work in (1, n)
]


def dispatches(kernel: Kernel, device: Capabilities) -> list[Dispatch]:
    found = []
    for case in kernel.cases(np.random.default_rng(0)):
        for counts in COUNTS:
            dispatch = GRIDS[kernel.name](case.scalars, counts, device)
            found += [dispatch, *([dispatch.before] if dispatch.before else [])]
    return found


@pytest.mark.parametrize("fragments", [False, True])
def test_dispatches_fit_a_gpu_with_matrix_units(fragments: bool) -> None:
    device = replace(MATRICES, fragments=fragments)
    shaders = {path.stem for path in SPIRV.glob("*.spv")}
    for kernel in all_kernels().values():
        for dispatch in dispatches(kernel, device):
            assert (dispatch.shader or kernel.name) in shaders
            assert all(
                0 < n <= most
                for n, most in zip((dispatch.x, dispatch.y, dispatch.z), device.workgroup_count, strict=True)
            )
            assert all(n >= 0 for n in dispatch.constants)
            if "fragments" in dispatch.shader or "teams" in dispatch.shader:
                queries, dim, _, shares, threads = dispatch.constants[:5]
                assert (
                    shares > 0 and threads == 32 * shares * -(-queries // 16) <= device.workgroup_invocations
                )
                assert 4 * shares * queries * dim < device.shared_memory

"""Every dispatch that a GPU with matrix units would get: its shader is there, and it fits the device's limits."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tandem.devices.vulkan.capabilities import Capabilities, MatrixShape
from tandem.devices.vulkan.grids import GRIDS, Dispatch
from tandem.devices.vulkan.pipelines import SPIRV
from tandem.kernels import all_kernels, matmul
from tandem.kernels.kernel import Kernel, Scalars
from tests.vulkan.machines import ALL_MAPPED

pytestmark = pytest.mark.fast
MEETING = 3072  # float4s of shared memory in which sums of matmul_fragments.slang meet
SHAPES = (MatrixShape(16, 16, 16, "f16", "f16", "f32"), MatrixShape(16, 8, 16, "f16", "f16", "f32"))
MATRICES = replace(ALL_MAPPED, subgroup_min=32, subgroup_max=32, matrix_shapes=SHAPES, shared_memory=48 << 10)
COUNTS = [
    {"tokens": n, "rows": min(n, 64), "work": work}
    for n in (1, 2, 8, 9, 16, 17, 32, 64, 65, 512)
    for work in (1, n)
]


def dispatches(kernel: Kernel, device: Capabilities, more: list[Scalars]) -> list[Dispatch]:
    found = []
    for scalars in [case.scalars for case in kernel.cases(np.random.default_rng(0))] + more:
        for counts in COUNTS:
            dispatch = GRIDS[kernel.name](scalars, counts, device)
            found += [dispatch, *([dispatch.before] if dispatch.before else [])]
    return found


@pytest.mark.parametrize("fragments", [False, True])
def test_dispatches_fit_a_gpu_with_matrix_units(fragments: bool) -> None:
    device = replace(MATRICES, fragments=fragments)
    shaders = {path.stem for path in SPIRV.glob("*.spv")}
    rng = np.random.default_rng(0)
    large = [matmul.product_case("q4_0", 1, 8192, 256, epilogue, 0, rng).scalars for epilogue in (0, 2)]
    for kernel in all_kernels().values():
        for dispatch in dispatches(kernel, device, large if kernel.name == "matmul_q4_0" else []):
            assert (dispatch.shader or kernel.name) in shaders
            assert all(
                0 < n <= most
                for n, most in zip((dispatch.x, dispatch.y, dispatch.z), device.workgroup_count, strict=True)
            )
            assert all(n >= 0 for n in dispatch.constants)
            if named := re.search(r"_[qx]u(\d)n(\d)$", dispatch.shader):
                pairs, tiles = map(int, named.groups())
                threads, shares = dispatch.constants
                units, each = threads // 32 // shares, 64 * pairs * tiles  # float4s of a subgroup
                assert (
                    shares // 2 * units * each <= MEETING
                    and units * each // (2 if tiles == 8 else 1) <= MEETING
                )
            if "fragments" in dispatch.shader or "teams" in dispatch.shader:
                queries, dim, _, shares, threads = dispatch.constants[:5]
                assert (
                    shares > 0 and threads == 32 * shares * -(-queries // 16) <= device.workgroup_invocations
                )
                assert 4 * shares * queries * dim < device.shared_memory


def test_subgroups_attend_together_only_where_there_are_four() -> None:
    """On matrix units, with less shared memory than four need: with fewer the kernel would wait for ever."""
    device = replace(MATRICES, fragments=True)
    scalars = {
        "q_heads": 32, "kv_heads": 16, "head_dim": 128, "q_stride": 4096, "out_stride": 4096, "table_stride": 256,
        "window": 0, "scale": 0.1, "softcap": 0.0, "kv": 0, "out_q8": 1, "sequences": 1, "blocks": 256,
    }  # fmt: skip
    counts = {"tokens": 1, "rows": 1, "work": 1}
    found = [
        GRIDS["attention"](scalars, counts, replace(device, shared_memory=kb << 10)).shader for kb in (48, 8)
    ]
    assert found == ["attention_teams_128", "attention_fragments_128"]

"""Every dispatch that a GPU with matrix units would get: its shader is there, and it fits the device's limits."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tandem.devices.tuned_choices import NOTHING
from tandem.devices.vulkan import tuned
from tandem.devices.vulkan.capabilities import Capabilities, MatrixShape
from tandem.devices.vulkan.compile_shaders import KERNELS
from tandem.devices.vulkan.shader_modules import SPIRV, shader_modules
from tandem.kernels import all_kernels, attention_rope, expert_matmul, matmul
from tandem.kernels.abi import EPILOGUE_SILU_GLU, MAX_BUFFERS, PANEL_ROWS, PART_NORM, PART_ROPE, PART_STORE
from tandem.kernels.attention_dispatch import KEY_SUBGROUPS, MAX_QUERY_FLOATS
from tandem.kernels.dispatch import CHOSEN_CONSTANT, COUNTERS, PART_SUMS_BYTES, Dispatch
from tandem.kernels.dispatch_table import DISPATCH_RULES, dispatch
from tandem.kernels.kernel import PART_SUMS_ADDRESS, SCRATCH_ADDRESS, STEP_ADDRESS, Kernel, Scalars
from tandem.kernels.matmul_dispatch import COOPMAT_REG_SUMS, QUARTERS, TILE_SUMS_BYTES, divide_tiles
from tandem.kernels.panels import CHOSEN, LAYOUT_NAMES, LAYOUTS
from tests.vulkan.machines import ALL_MAPPED, PHOENIX

pytestmark = pytest.mark.fast
SHAPES = (MatrixShape(16, 16, 16, "f16", "f16", "f32"), MatrixShape(16, 8, 16, "f16", "f16", "f32"))
MATRICES = replace(ALL_MAPPED, subgroup_min=32, subgroup_max=32, matrix_shapes=SHAPES, shared_memory=48 << 10)
COUNTS = [
    {"tokens": n, "rows": min(n, 64), "work": work}
    for n in (1, 2, 4, 8, 9, 16, 17, 32, 64, 65, 512)
    for work in (1, n)
]


def dispatches(kernel: Kernel, device: Capabilities, more: list[Scalars]) -> list[tuple[str, Dispatch]]:
    """(shader, dispatch) of each case and each count of tokens."""
    found = []
    for scalars in [case.scalars for case in kernel.cases(np.random.default_rng(0))] + more:
        for counts in COUNTS:
            each = DISPATCH_RULES[kernel.name](scalars, counts, device)
            assert each or kernel.gpu_only
            if each:
                found.append((each.shader or kernel.name, each))
            if each and each.expand:
                found.append((each.expand, dispatch(each.expand, scalars, counts, device)))
    return found


@pytest.mark.parametrize("register_coopmat", [False, True])
def test_dispatches_fit_a_gpu_with_matrix_units(register_coopmat: bool) -> None:
    device = replace(MATRICES, register_coopmat=register_coopmat)
    shaders = set(shader_modules(SPIRV))
    rng = np.random.default_rng(0)
    small = matmul.make_case("q4_0", 1, 64, 256, 0, 0, rng).scalars
    large: list[Scalars] = [
        {**small, "rows": 8192, "columns": n, "epilogue": e} for n in (256, 5376) for e in (0, 2)
    ]
    for kernel in all_kernels().values():
        for shader, each in dispatches(kernel, device, large if kernel.name == "matmul_q4_0" else []):
            assert shader in shaders
            assert all(
                0 < n <= most
                for n, most in zip((each.x, each.y, each.z), device.workgroup_count, strict=True)
            )
            assert all(n >= 0 for n in each.constants)
            if named := re.search(r"_[qx]u(\d)n(\d)$", each.shader):
                pairs, tiles = map(int, named.groups())
                threads, split_k = each.constants[:2]
                assert threads <= device.workgroup_invocations
                units, size = threads // 32 // split_k, 64 * pairs * tiles  # float4s of a subgroup
                assert split_k // 2 * units * size <= COOPMAT_REG_SUMS
                assert units * size // (2 if tiles == 8 else 1) <= COOPMAT_REG_SUMS
            if "attention_coopmat" in each.shader or "multi_subgroup" in each.shader:
                queries, dim, _, splits, threads = each.constants[:5]
                assert (
                    splits > 0 and threads == 32 * splits * -(-queries // 16) <= device.workgroup_invocations
                )
                assert 4 * splits * queries * dim < device.shared_memory


ONE = {"tokens": 1, "rows": 1, "work": 1}
ATTENTION: Scalars = {
    "q_heads": 32, "kv_heads": 16, "head_dim": 128, "q_stride": 4096, "out_stride": 4096, "table_stride": 256,
    "window": 0, "scale": 0.1, "softcap": 0.0, "kv": 0, "out_q8": 1, "sequences": 1, "blocks": 256,
}  # fmt: skip


def test_subgroups_attend_together_only_where_there_are_four() -> None:
    """On matrix units, with less shared memory than four need: with fewer the kernel would wait for ever."""
    device = replace(MATRICES, register_coopmat=True)
    found = [
        dispatch("attention", ATTENTION, ONE, replace(device, shared_memory=kb << 10)).shader
        for kb in (48, 8)
    ]
    assert found == ["attention_multi_subgroup_128", "attention_coopmat_128"]


def with_rope(attention: Scalars, rot_dim: int, device: Capabilities) -> Dispatch | None:
    parts = PART_NORM | PART_ROPE | PART_STORE
    of_rope = {"parts": parts, "rot_dim": rot_dim, "interleaved": 0, "eps": 1e-6, "positions": 4096}
    scalars = attention_rope.fused_scalars(of_rope, attention, 4096, 6144)
    return DISPATCH_RULES["attention_rope"](scalars, ONE, device)


def test_attention_is_fused_with_rope_where_it_sees_stored_keys_and_has_the_shared_memory() -> None:
    """With a window of 1 the block before the newest key, which attention would read, may have been freed."""
    device = replace(MATRICES, register_coopmat=True)
    for window, fused in ((0, True), (1, False), (2, True)):
        scalars = {**ATTENTION, "window": window}
        assert bool(with_rope(scalars, 128, device)) == fused
    for dim, group, kb in product((64, 128, 256), range(1, 9), (48, 64, 100)):
        scalars = {**ATTENTION, "head_dim": dim, "q_heads": 2 * group, "kv_heads": 2}
        device = replace(device, shared_memory=kb << 10)
        found = with_rope(scalars, dim, device)
        if found:
            queries, _, _, key_splits, threads, float2s, _ = found.constants[:7]
            results, limits = 4 * dim * (key_splits + 1) * queries, 8 * (key_splits + 2) * queries
            own = results + limits + 8 * float2s + 36 * dim + 4
            assert (
                group <= queries
                and own <= device.shared_memory
                and threads == 32 * key_splits
                and key_splits % 4 == 0
            )


def test_the_last_tiles_of_a_prompt_are_shared_by_workgroups() -> None:
    """On 132 cores: the matmuls of Gemma 3 27B; their sums fit into scratch memory, and a counter each."""
    device = replace(MATRICES, register_coopmat=True, cores=132)
    for tiles, columns, divided in (
        (168, 21504, (0, 168, 3)), (168, 4096, (0, 168, 3)), (1344, 5376, (1320, 24, 10)), (256, 5376, (256, 0, 1)),
        (10, 256, (10, 0, 1)),
    ):  # fmt: skip
        assert divide_tiles(tiles, columns, device) == divided
        assert divide_tiles(tiles, columns, replace(device, cores=0)) == (tiles, 0, 1)
    for tiles, columns in product(range(1, 600, 7), (512, 5376, 28672)):
        whole, shared, parts = divide_tiles(tiles, columns, device)
        assert whole + shared == tiles and shared <= COUNTERS and columns // parts >= 512
        assert parts == 1 or shared * parts * TILE_SUMS_BYTES <= PART_SUMS_BYTES


def test_whole_rounds_do_not_leave_a_gpu_idle() -> None:
    """Qwen 2.5 0.5B, Llama 2 7B and Gemma 3 27B: in the first two only 64 threads per panel fill whole rounds."""
    rng, device = np.random.default_rng(0), replace(MATRICES, register_coopmat=True)
    for rows, columns, threads in ((896, 4864, 512), (4096, 11008, 512), (5376, 21504, 384)):
        scalars = {
            **matmul.make_case("q4_0", 1, 32, 32, 0, 0, rng).scalars,
            "rows": rows,
            "columns": columns,
        }
        assert dispatch("matmul_q4_0", scalars, ONE, device).constants[0] == threads


@pytest.mark.parametrize(
    "subgroup_min, subgroup_max", [(8, 8), (16, 16), (32, 32), (64, 64), (8, 32), (32, 64)]
)
def test_dot_products_fit_gpus_with_any_subgroups(subgroup_min: int, subgroup_max: int) -> None:
    """With the threads of the rule and those that the tuner tries, for few columns and many."""
    small = matmul.make_case("q4_0", 1, 64, 256, 0, 0, np.random.default_rng(0)).scalars
    memory = 32 << 10 if subgroup_min == 8 else 16 << 10  # 16 KB: the minimum of Vulkan
    features = ALL_MAPPED.features | {"subgroupSizeControl"}
    shapes = [(40, 32), (64, 288), (576, 1536), (5376, 5376), (262208, 21504)]
    for kind, threads, (rows, columns), glu in product(
        ("discrete", "integrated", "software"), (256, 384, 1024), shapes, (False, True)
    ):
        device = replace(ALL_MAPPED, kind=kind, features=features, workgroup_invocations=threads, shared_memory=memory,
                         subgroup_min=subgroup_min, subgroup_max=subgroup_max)  # fmt: skip
        rows = -(-rows // 64) * 64 if glu else rows
        scalars = {**small, "rows": rows, "columns": columns, "epilogue": 2 * glu}
        for layout, tokens in product(("q4_0", "q6_k") if columns % 256 == 0 else ("q4_0",), (1, 2, 4, 8)):
            kernel, counts = f"matmul_{layout}", {"tokens": tokens, "rows": tokens, "work": tokens}
            scalars["format"] = LAYOUT_NAMES.index(layout)
            tried = tuned.candidates(kernel, scalars, counts, device) if threads == 1024 else []
            for choice in (NOTHING, *tried):
                with device.choices.trying(choice):
                    fits_dot_products(dispatch(kernel, scalars, counts, device), device, tokens, columns)


def fits_dot_products(dispatch: Dispatch, device: Capabilities, tokens: int, columns: int) -> None:
    """As Place of matmul.slang divides a workgroup: a panel has whole subgroups, whose sums fit in shared memory."""
    if dispatch.shader.endswith("_rows"):
        return fits_rows(dispatch, device)
    threads, glu, partial_sums, *row = dispatch.constants
    panels, of_lane = 4 if glu else 1, 2 if dispatch.shader.endswith("_glu") else 1
    assert (of_lane == 2) == (bool(glu) and tokens <= 2) and f"_t{tokens}" in dispatch.shader
    assert row == ([columns] if tokens <= 2 else [])
    assert 0 < threads <= device.workgroup_invocations and dispatch.x > 0
    panel_threads, sizes = threads * of_lane // panels, [8, 16, 32, 64]
    allowed = [n for n in sizes if device.subgroup_min <= n <= device.subgroup_max]
    for lanes in [dispatch.subgroup] if dispatch.subgroup else allowed:
        assert threads % lanes == panel_threads % lanes == panel_threads % PANEL_ROWS == 0
        assert panels * (panel_threads // lanes) * PANEL_ROWS * tokens <= partial_sums
    assert 4 * partial_sums + 1024 <= device.shared_memory


def fits_rows(dispatch: Dispatch, device: Capabilities) -> None:
    """matmul_rows.slang: parts of 64 threads, whole subgroups of any size, with sums of 8 tokens in shared memory, or
    four parts that share decoded rows there, of up to 48 bytes."""
    threads, tokens, *_ = dispatch.constants
    shared = dispatch.shader.endswith("_shared_rows")
    assert (
        (threads == 256 and tokens in (64, 128))
        if shared
        else (threads % 64 == 0 and tokens in (8, 16, 32, 64))
    )
    assert 0 < threads <= device.workgroup_invocations and dispatch.x > 0 and dispatch.y > 0
    assert (48 * threads if shared else 32 * threads + 1024) <= device.shared_memory


def test_an_apu_takes_a_row_a_lane_where_sequences_decode_together() -> None:
    """From 2 to 128 tokens, for every quantised format, and with GLU 1; more are for matrix units, if it has any."""
    small = matmul.make_case("q4_0", 1, 128, 256, 0, 0, np.random.default_rng(0)).scalars
    quantised = [layout for layout in LAYOUT_NAMES if LAYOUTS[layout].quantised]
    for layout, tokens, glu in product(quantised, (*range(1, 130), 512), (0, 2)):
        scalars = {**small, "format": LAYOUT_NAMES.index(layout), "epilogue": glu}
        counts = {"tokens": tokens, "rows": tokens, "work": tokens}
        found = dispatch(f"matmul_{layout}", scalars, counts, PHOENIX)
        least = 1 if glu else 2
        assert found.shader.endswith("_rows") == (least <= tokens <= 128)
        assert not (tokens <= 128 and found.expand)
        assert found.shader.endswith("_shared_rows") == (32 < tokens <= 128)
        if found.shader.endswith("_rows"):
            fits_rows(found, PHOENIX)
        without = dispatch(f"matmul_{layout}", scalars, counts, replace(PHOENIX, matrix_shapes=()))
        assert without.shader.endswith("_rows") == (tokens >= least)
        assert without.y == -(-tokens // 128)


def test_prompts_of_a_70b_are_on_matrix_units() -> None:
    """Its longest activations, 512 tokens of 28,672 columns, just fit into scratch memory; others take a row a lane."""
    small = matmul.make_case("q4_k", 1, 128, 256, 0, 0, np.random.default_rng(0)).scalars
    counts = {"tokens": 512, "rows": 1, "work": 1}
    down = dispatch("matmul_q4_k", {**small, "rows": 8192, "columns": 28672}, counts, PHOENIX)
    assert down.shader == "matmul_q4_k_many" and down.y == 2
    wider = dispatch("matmul_q4_k", {**small, "rows": 8192, "columns": 36864}, counts, PHOENIX)
    assert wider.shader == "matmul_q4_k_shared_rows" and wider.y == 4


def test_constants_are_those_of_the_shaders() -> None:
    """Dispatch rules and shaders have the same limits."""

    def first(pattern: str, module: str) -> tuple[str, ...]:
        found = re.search(pattern, (KERNELS / f"{module}.slang").read_text())
        assert found, f"{module}.slang has no {pattern}"
        return found.groups()

    assert first(r"STEP = MAX_BUFFERS - (\d+);", "common") == (str(MAX_BUFFERS - STEP_ADDRESS),)
    assert first(r"SCRATCH = (\d+);", "scratch") == (str(SCRATCH_ADDRESS),)
    assert first(r"COUNTERS = (\d+);", "scratch") == (str(COUNTERS),)
    assert first(r"PART_SUMS = (\d+);", "matmul_coopmat_reg") == (str(PART_SUMS_ADDRESS),)
    assert first(r"groupshared float4 \w+\[(\d+)\];", "matmul_coopmat_reg") == (str(COOPMAT_REG_SUMS),)
    numbers = ", ".join(f"{layout.upper()} = {i}" for i, layout in enumerate(CHOSEN))
    assert first(r"static const uint (Q5_0 = [^;]*);", "chosen_panels") == (numbers,)
    assert first(r"constant_id\((\d+)\)", "chosen_panels") == (str(CHOSEN_CONSTANT),)
    assert first(r"QUERIES x HEAD_DIM is at most (\d+)", "attention") == (str(MAX_QUERY_FLOATS),)
    assert first(
        r"static const uint \w+ = (\d+);\n    public static uint units", "attention_multi_subgroup"
    ) == (str(KEY_SUBGROUPS),)
    quarters = re.findall(r"^QUARTERS\((\w+)", (KERNELS / "matmul.slang").read_text(), re.M)
    assert tuple(quarters) == QUARTERS


@pytest.mark.parametrize(
    ("experts", "used", "tokens", "shader"),
    [
        (128, 8, 1, "t1"),
        (128, 8, 2, "t2"),
        (128, 8, 8, "t2"),
        (128, 8, 16, "qu"),
        (32, 4, 4, "t2"),
        (32, 4, 8, "qu"),
    ],
)
def test_experts_with_about_one_slot_take_a_block_a_lane(
    experts: int, used: int, tokens: int, shader: str
) -> None:
    """With more, matrix units pay; the threads of two slots are more than those of one."""
    device = replace(ALL_MAPPED, register_coopmat=True)
    scalars = {
        "format": LAYOUT_NAMES.index("q4_k"), "rows": 1536, "columns": 2048, "experts": experts, "used": used,
        "epilogue": EPILOGUE_SILU_GLU, "out_q8": 1, "x_stride": 2048, "out_stride": 768, "panels_per_item": 4,
    }  # fmt: skip
    found = expert_matmul.dispatch(scalars, {"tokens": tokens, "rows": 1, "work": tokens}, device)
    assert f"q4_k_{shader}" in found.shader and found.y == min(experts, tokens * used)

"""The kernels on matrix units, on lavapipe, which has none: their text, with matrices in software instead of the GPU's.

A real GPU must show two things that this cannot: that it spreads matrices over lanes as expected (coopmat_layout.py
asks it), and subgroups that take different numbers of steps; here all take the same number.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.devices.vulkan import compile_shaders, coopmat_layout, shader_modules, tuned
from tandem.devices.vulkan.device import VulkanDevice
from tandem.kernels import (
    attention,
    attention_dispatch,
    attention_prefetch,
    attention_rope,
    expand,
    expert_matmul,
    expert_matmul_tokens,
    matmul,
    matmul_dispatch,
)
from tandem.kernels.abi import EPILOGUE_CLAMPED_GLU, EPILOGUE_SILU_GLU, EPILOGUE_STORE
from tandem.kernels.dispatch import Dispatch, DispatchRule, Gpu
from tandem.kernels.dispatch_table import DISPATCH_RULES
from tandem.kernels.kernel import Case, Counts, Scalars
from tandem.kernels.panels import CHOSEN
from tests.vulkan import fused_pairs
from tests.vulkan.harness import check_case, check_matmul, open_device

SOFTWARE = Path(__file__).with_name("software_matrices.slang")
TYPES = {"Weights": "SoftwareA", "Tokens": "SoftwareB", "Keys": "SoftwareB", "Sums": "SoftwareC"}
LAYOUTS = ("q4_0", "q4_k", "q6_k", *CHOSEN)
FLOAT_LAYOUTS = ("f16", "bf16")
KINDS = ("matmul", "expert_matmul", "expert_matmul_tokens")
MODULES = ["attention_coopmat", "attention_multi_subgroup", "attention_rope", "matmul_coopmat_reg"]
SHARED = "attention_coopmat_common"  # what those of attention import


def in_software(text: str) -> str:
    text = text.replace("using namespace linalg;", f"__exported import {SOFTWARE.stem};")
    for name, software in TYPES.items():
        text = re.sub(rf"typealias {name} = .*", f"typealias {name} = {software};", text)
    text = text.replace("coopMatMulAdd<float, false>", "software_multiply_add")
    text = text.replace("return WaveReadLaneAt(v, lane);", "return software_of_lane(v, lane);")
    text = text.replace("[ForceUnroll]", "[loop]")  # software takes minutes to compile long code
    text = re.sub(r"\{ (take_\w+|matmul\w*)<", r"{ this_thread = thread; \1<", text)
    return re.sub(rf"^[A-Z_]+\((?!{'|'.join(LAYOUTS)}|float)\w+\)\n", "", text, flags=re.M)


def without_splits(rule: DispatchRule) -> DispatchRule:
    """The same dispatch, with one subgroup for all columns or keys of its rows: so that all take the same steps."""

    def chosen(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
        dispatch = rule(scalars, counts, gpu)
        assert dispatch
        constants = list(dispatch.constants)
        if re.search(r"_[qx]u\dn\d$", dispatch.shader):
            constants[0], constants[1] = constants[0] // constants[1], 1
        if "attention_coopmat" in dispatch.shader:
            constants[4], constants[3] = constants[4] // constants[3], 1
        return replace(dispatch, constants=tuple(constants), subgroup=0)

    return chosen


@pytest.fixture(scope="module")
def device(lavapipe: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VulkanDevice]:
    sources, shaders = (tmp_path_factory.mktemp(name) for name in ("sources", "shaders"))
    shutil.copy(SOFTWARE, sources)
    for path in compile_shaders.KERNELS.glob("*.slang"):
        text = path.read_text()
        (sources / path.name).write_text(in_software(text) if path.stem in (*MODULES, SHARED) else text)
    shutil.copytree(shader_modules.SPIRV, shaders, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_shaders, "KERNELS", sources)
        compile_shaders.compile_modules(MODULES, shaders)
        patch.setattr(shader_modules, "SPIRV", shaders)
        both = (f"{kind}_{layout}" for kind in KINDS for layout in (*LAYOUTS, *FLOAT_LAYOUTS))
        for name in ("attention", *both):
            patch.setitem(DISPATCH_RULES, name, without_splits(DISPATCH_RULES[name]))
        patch.setattr(attention_dispatch, "attention", DISPATCH_RULES["attention"])
        patch.setattr(attention_dispatch, "HEAD_LANES", 8)  # a subgroup's, here
        patch.setattr(
            coopmat_layout, "supports_shape", lambda _: True
        )  # scratch memory for shared tiles, too
        patch.setattr(coopmat_layout, "has_expected_layout", lambda *_: True)
        opened = open_device(lavapipe)
        opened.capabilities = replace(opened.capabilities, shared_memory=48 << 10)
        yield opened
        opened.close()


def matmuls() -> Iterator[Case]:
    rng = np.random.default_rng(3)
    for layout, tokens, rows, columns, epilogue in (
        ("q4_0", 3, 4112, 64, 0), ("q4_0", 4, 128, 64, 1),  # the former in two pairs of panels
        ("q4_0", 5, 40, 512, 0), ("q4_0", 12, 128, 512, 2), ("q4_0", 30, 96, 64, 0), ("q4_0", 64, 80, 96, 0),
        ("q4_0", 100, 112, 256, 0), ("q4_0", 66, 4096, 32, 0), ("q4_k", 12, 48, 256, 0), ("q6_k", 5, 128, 512, 2),
        ("q4_k", 30, 40, 256, 0), ("q6_k", 60, 40, 256, 0),
        *((layout, 12, 48, 256, 0) for layout in CHOSEN), ("iq4_xs", 5, 128, 512, 2), ("mxfp4", 3, 40, 256, 0),
        ("f16", 12, 48, 256, 0), ("bf16", 30, 128, 512, 2), ("f16", 100, 4096, 64, 0),
    ):  # fmt: skip
        yield matmul.make_case(layout, tokens, rows, columns, epilogue, 0, rng)


def test_matmuls(device: VulkanDevice) -> None:
    for case in matmuls():
        check_matmul(device, matmul.BY_LAYOUT[case.label.split()[0]], case)


def test_matmuls_of_larger_matrices(device: VulkanDevice) -> None:
    """Two pairs of panels a subgroup; weights that subgroups share, in whole stages and with a block more; and tiles
    that workgroups share: all of them, or the last."""
    rng = np.random.default_rng(4)
    for layout, tokens, rows, columns, cores, divided in (
        ("q4_0", 100, 112, 1056, 2, (0, 2, 2)),
        ("q4_k", 70, 176, 1024, 1, (2, 1, 2)),
    ):
        case = matmul.make_case(layout, tokens, rows, columns, 0, 0, rng)
        with pytest.MonkeyPatch.context() as patch, device.capabilities.choices.trying({"shared": 1}):
            patch.setattr(device, "capabilities", replace(device.capabilities, cores=cores))
            tiles = divided[0] + divided[1]
            assert matmul_dispatch.divide_tiles(tiles, columns, device.capabilities) == divided
            for _ in range(2):  # the counters are 0 again
                check_matmul(device, matmul.BY_LAYOUT[layout], case)
    for layout, tokens, rows, columns, choice in (
        ("q4_k", 7, 80, 512, {"pairs": 2}),
        ("q4_0", 100, 112, 96, {"shared": 1}),
        ("q4_k", 100, 64, 256, {"shared": 1}),
    ):
        case = matmul.make_case(layout, tokens, rows, columns, 0, 0, rng)
        with device.capabilities.choices.trying(choice):
            check_matmul(device, matmul.BY_LAYOUT[layout], case)


def test_matmuls_of_experts(device: VulkanDevice) -> None:
    """Of one tile of an expert's slots and of several; some experts have more slots than that."""
    rng, store, silu, clamped = (
        np.random.default_rng(5),
        EPILOGUE_STORE,
        EPILOGUE_SILU_GLU,
        EPILOGUE_CLAMPED_GLU,
    )
    for layout, tokens, rows, columns, experts, used, epilogue, bias in (
        ("q4_0", 6, 48, 64, 8, 2, store, True), ("q4_k", 9, 128, 256, 6, 2, silu, False),
        ("q4_k", 12, 48, 256, 4, 3, store, False), ("q6_k", 20, 64, 256, 3, 1, clamped, True),
        ("mxfp4", 60, 64, 64, 4, 2, clamped, True), ("q4_0", 100, 112, 64, 5, 3, store, True),
        ("f16", 6, 48, 64, 4, 2, store, False), ("bf16", 40, 64, 64, 3, 2, silu, True),
    ):  # fmt: skip
        args = (layout, tokens, rows, columns, experts, used, epilogue, 0, bias, rng)
        for by_token, kernels in ((False, expert_matmul.BY_LAYOUT), (True, expert_matmul_tokens.BY_LAYOUT)):
            check_matmul(device, kernels[layout], expert_matmul.make_case(*args, by_token))


def test_attention(device: VulkanDevice) -> None:
    for case in attention.KERNEL.cases(np.random.default_rng(1)):
        if "aligned" in case.label:
            check_case(device, attention.KERNEL, case)


def test_activations_are_expanded(device: VulkanDevice) -> None:
    for kernel in expand.KERNELS:
        for case in kernel.cases(np.random.default_rng(1)):
            check_case(device, kernel, case)


def test_attention_with_rope(device: VulkanDevice) -> None:
    """Launched by itself, and where it takes the place of two launches."""
    for case in attention_rope.cases(np.random.default_rng(1), (64,)):
        check_case(device, attention_rope.KERNEL, case)
        fused_pairs.check_attention(device, case)


def test_attention_with_rope_is_right_with_what_the_tuner_chooses(device: VulkanDevice) -> None:
    """It is not timed itself: what is found for attention alone holds for it too."""
    case = attention_rope.make_case(np.random.default_rng(0), "tuned", (6, 2, 64), [700])
    gpu, scalars, possible = device.capabilities, attention_rope.attention_scalars(case.scalars), {}
    for choice in tuned.candidates("attention", scalars, case.counts, gpu):
        with gpu.choices.trying(choice):
            if DISPATCH_RULES["attention_rope"](case.scalars, case.counts, gpu):
                possible[next(iter(choice))] = choice  # the farthest from the rule, of each number
    assert possible.keys() == {"workgroups", "key_splits", "rounds"}
    for choice in possible.values():
        with gpu.choices.trying(choice):
            fused_pairs.check_attention(device, case)


def test_a_prefetch_ahead_of_attention_changes_nothing(
    device: VulkanDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a single token, on a GPU with memory of its own; also where there are more keys than it reads."""
    monkeypatch.setattr(device, "capabilities", replace(device.capabilities, kind="discrete"))
    recorded: list[str] = []
    get = device.pipelines.get

    def noted(shader: str, *more: Any) -> int:
        recorded.append(shader)
        return get(shader, *more)

    monkeypatch.setattr(device.pipelines, "get", noted)
    for positions, window, max_bytes in (
        ([0], 0, 8 << 20),
        ([300], 100, 8 << 20),
        ([700], 0, 4096),
        ([5, 90], 0, 8 << 20),
    ):
        case = attention_rope.make_case(np.random.default_rng(0), "prefetch", (4, 2, 64), positions, window)
        monkeypatch.setattr(attention_dispatch, "PREFETCH_BYTES", max_bytes)
        found = fused_pairs.check_attention(device, case, after_matmul=True)
        assert recorded.count("attention_prefetch") == (len(positions) == 1)
        with monkeypatch.context() as patch:
            patch.setitem(DISPATCH_RULES, "attention_prefetch", lambda *_: None)
            plain = fused_pairs.check_attention(device, case, after_matmul=True)
        assert all((found[name].view(np.uint8) == plain[name].view(np.uint8)).all() for name in found)
        recorded.clear()
    for case in attention_prefetch.KERNEL.cases(np.random.default_rng(1)):
        check_case(device, attention_prefetch.KERNEL, case)

"""A pipeline gets the part of a module that its entry point needs, asks only for features that the device has, and is
compiled once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.shader_modules import OP_DECORATE, SPIRV, ShaderModule, shader_modules
from tandem.errors import DeviceError

MAX_FILES, MAX_BYTES = 40, 4 << 20  # of the SPIR-V that the repository keeps


@pytest.mark.fast
def test_modules_are_few_and_small() -> None:
    sizes = [path.stat().st_size for path in SPIRV.glob("*.spv")]
    assert len(sizes) <= MAX_FILES and sum(sizes) <= MAX_BYTES


@pytest.mark.fast
@pytest.mark.parametrize(
    "shader", ["attention_rope_128", "coopmat_probe", "embed_f16", "matmul_q4_k_t1_glu", "norm_2"]
)
def test_an_entry_point_gets_its_functions_and_no_others(shader: str) -> None:
    whole = shader_modules(SPIRV)[shader]
    part = ShaderModule(whole.extract(shader))
    assert part.entry_points.keys() == {shader} and part.features == whole.features
    calls = {call for function in part.functions.values() for call in function.calls}
    assert part.functions.keys() == calls | {part.entry_points[shader]}
    bodies = {id: part.words[f.begin : f.end] for id, f in part.functions.items()}
    assert bodies == {id: whole.words[f.begin : f.end] for id, f in whole.functions.items() if id in bodies}
    assert bodies.keys() < whole.functions.keys() or len(whole.entry_points) == 1


@pytest.mark.fast
def test_no_decoration_is_left_without_its_target() -> None:
    """Each target is the result of an instruction: the first or second word after the opcode."""
    for name, module in shader_modules(SPIRV).items():
        words, results, targets, at = ShaderModule(module.extract(name)).words, set(), set(), 5
        while at < len(words):
            op, end = words[at] & 0xFFFF, at + (words[at] >> 16)
            if op == OP_DECORATE:
                targets.add(words[at + 1])
            elif op > OP_DECORATE + 1 or op < OP_DECORATE:
                results |= set(words[at + 1 : min(at + 3, end)])
            at = end
        assert targets <= results, name


def test_a_shader_that_needs_a_feature_the_device_lacks(lavapipe: str) -> None:
    device = VulkanDevice(lavapipe)
    device.pipelines.capabilities = replace(device.capabilities, features=frozenset())
    with pytest.raises(DeviceError, match=r"lacks .* for matmul_q4_0_t1: update its driver"):
        device.pipelines.get("matmul_q4_0_t1")
    with pytest.raises(DeviceError, match="the shader nothing is not built: run `make shaders`"):
        device.pipelines.get("nothing")
    device.close()


def test_the_driver_says_that_it_compiled_nothing(lavapipe: str, tmp_path: Path) -> None:
    """By the feedback of each pipeline, which software does not give: see test_start.py for that."""
    compiled = []
    for _ in range(2):
        device = VulkanDevice(lavapipe, cache=tmp_path)
        for shader in ("quantise", "glu"):
            device.pipelines.get(shader)
        device.pipelines.save()
        compiled.append(device.pipelines.compiled)
        device.close()
    assert compiled[0] == 2 and (compiled[1] == 0 or device.capabilities.kind == "software")

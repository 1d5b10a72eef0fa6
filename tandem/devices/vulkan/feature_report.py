"""Reports the effect of each optional feature of a device, for `tandem inspect --device` and `tandem doctor`."""

from __future__ import annotations

from functools import cache

from tandem.devices.vulkan.capabilities import REQUIRED, Capabilities
from tandem.devices.vulkan.shader_modules import SPIRV, shader_modules
from tandem.kernels.matmul_dispatch import MAX_DOT_TOKENS_REG, MAX_ROWS_TOKENS, has_coopmat


def feature_paths(device: Capabilities) -> list[tuple[str, bool, str]]:
    """(feature, whether the device has it, its effect on the engine)."""
    few, matrices = MAX_DOT_TOKENS_REG if device.register_coopmat else MAX_ROWS_TOKENS, has_coopmat(device)
    registers = device.register_coopmat
    how = (
        "and attention, all from registers" if registers else "and prompts' attention, through shared memory"
    )
    optional = [
        ("matrix units", matrices, f"matmuls of more than {few} tokens, {how}",
         "matmuls of any number of tokens use integer dot products"),
        ("subgroup size control", device.subgroup_size_control, "subgroups of 32 where matrix units need them",
         "subgroups have the driver's size"),
        ("memory budget", device.memory_budget, "the driver says what is free", "a tenth of each heap is left free"),
        ("timestamps", bool(device.timestamp_ns), "each launch can be timed", "only whole steps can be timed"),
    ]  # fmt: skip
    needed = [
        ("integer dot product", "shaderIntegerDotProduct",
         f"matmuls of {f'up to {few} tokens' if matrices else 'any number of tokens'}"),
        ("float16 arithmetic", "shaderFloat16", "scales, and matmuls on matrix units"),
        ("16-bit storage", "storageBuffer16BitAccess", "scales and the KV cache"),
        ("8-bit storage", "storageBuffer8BitAccess", "weights"),
        ("timeline semaphore", "timelineSemaphore", "steps in segments, each waited for on its own"),
    ]  # fmt: skip
    rows = [(name, there, yes if there else no) for name, there, yes, no in optional]
    for name, feature, path in needed:
        there, must = feature in device.features, feature in features_of_all_models()
        rows.append(
            (name, there, path if there else "models do not run without it" if must else "not needed")
        )
    return rows


@cache
def features_of_all_models() -> frozenset[str]:
    """Features that every model needs: the features of all shaders that do not use matrix units."""
    needs = [module.features for module in shader_modules(SPIRV).values()]
    return frozenset(REQUIRED).union(*(need for need in needs if "cooperativeMatrix" not in need))

"""Pairs of launches that a GPU's pass fuses, on a device: `rope` and attention, and a matmul and the norm after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tandem.bench.kernel_checks import ARENA, ARENA_BYTES, ATTENTION_ERROR, GUARD, HALF_RATIO, assert_matches
from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.fuse_launches import step_program
from tandem.devices.vulkan.recording import VulkanRecording
from tandem.kernels import attention, attention_rope, matmul, norm, rope
from tandem.kernels.abi import COUNTS, HEADER_SEQUENCES, KV_BLOCK, TOKEN_INTS, TOKEN_POSITION, TOKEN_SLOT
from tandem.kernels.kernel import Array, Case, Counts, Kernel, Scalars
from tandem.program.program import Launch, Program, Tensor

ONE = {"tokens": 1, "rows": 1, "work": 1}
Given = tuple[Kernel, Scalars, dict[str, Tensor]]


def record(device: VulkanDevice, given: Sequence[Given], counts: Counts) -> VulkanRecording:
    """Launches as a step of single tokens."""
    header = device.memory("step").view(np.int32)
    header[: len(COUNTS)] = [counts[name] for name in COUNTS]
    header[HEADER_SEQUENCES] = counts["tokens"]
    launches = [
        Launch(
            kernel, {b.name: tensors.get(b.name) for b in kernel.buffers}, scalars, kernel.name, barrier=True
        )
        for kernel, scalars, tensors in given
    ]
    return device.record(Program(launches, dict.fromkeys(COUNTS, 512), {ARENA: ARENA_BYTES}))


def kernels_of(recording: VulkanRecording) -> list[str]:
    """The launches of the step that is written now."""
    gpu = recording.device.capabilities
    return [
        launch.kernel.name for launch in step_program(recording.program, recording._bucket(), gpu).launches
    ]


def place(device: VulkanDevice, arrays: dict[str, Array]) -> dict[str, Tensor]:
    """Each in a place of its own."""
    tensors, at = {}, GUARD
    for name, array in arrays.items():
        stride = array.shape[1] if array.ndim > 1 else 0
        tensors[name] = Tensor(name, ARENA, "", array.nbytes, stride, offset=at)
        at += -(-array.nbytes // GUARD) * GUARD + GUARD
        device.write(tensors[name], np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    assert at <= ARENA_BYTES
    return tensors


def read(device: VulkanDevice, tensor: Tensor, array: Array) -> Array:
    return device.read(tensor).view(array.dtype).reshape(array.shape)


# ---- rope and attention


def token_table(case: Case) -> Array:
    """As `rope` takes it: position and KV slot of each token."""
    table = np.zeros((case.counts["tokens"], TOKEN_INTS), np.int32)
    for row, _, sequence, position in case.arrays["work"][:, :4]:
        block = case.arrays["tables"][sequence, position // KV_BLOCK]
        table[row, TOKEN_POSITION], table[row, TOKEN_SLOT] = position, block * KV_BLOCK + position % KV_BLOCK
    return table


def attention_pair(device: VulkanDevice, case: Case, tensors: dict[str, Tensor]) -> list[Given]:
    """`case`: of attention_rope, placed at `tensors`, with "tokens" among them."""
    qkv, heads = tensors["qkv"], attention_rope.by_kernel(tensors, case.scalars)
    for name, column in {"q": 0, "k": case.scalars["k_column"], "v": case.scalars["v_column"]}.items():
        begin = 4 * int(column)
        heads[name] = Tensor(name, ARENA, "f32", qkv.nbytes - begin, qkv.stride, begin, qkv)
    return [
        (rope.KERNEL, attention_rope.rope_scalars(case.scalars), heads),
        (attention.KERNEL, attention_rope.attention_scalars(case.scalars), heads),
    ]


def check_attention(device: VulkanDevice, case: Case, after_matmul: bool = False) -> dict[str, Array]:
    """Runs `rope` and attention, fused, and compares with the references of both; returns what was found.
    `after_matmul`: behind a launch that has nothing to do with them."""
    other = matmul.make_case("q4_0", 1, 64, 256, 0, 0, np.random.default_rng(0))
    others = {f"other {name}": array for name, array in other.arrays.items()}
    tensors = place(device, {**case.arrays, "tokens": token_table(case), **others})
    pair = attention_pair(device, case, tensors)
    if after_matmul:
        of_matmul = {name: tensors[f"other {name}"] for name in other.arrays}
        pair.insert(0, (matmul.BY_LAYOUT["q4_0"], other.scalars, of_matmul))
    recording = record(device, pair, case.counts)
    assert kernels_of(recording)[-1] == "attention_rope" and "rope" not in kernels_of(recording)
    recording.replay()
    columns = {"q": 0, "k": int(case.scalars["k_column"]), "v": int(case.scalars["v_column"])}
    heads = {name: case.arrays["qkv"][:, column:] for name, column in columns.items()}
    of_rope = {**case.arrays, **heads, "tokens": token_table(case)}
    rotated = rope.KERNEL.reference(of_rope, attention_rope.rope_scalars(case.scalars), case.counts)
    given = attention_rope.by_kernel(case.arrays, case.scalars)
    of_attention = {**given, "q": rotated["q"], "cache": rotated["cache"]}
    scalars = attention_rope.attention_scalars(case.scalars)
    expected = attention.KERNEL.reference(of_attention, scalars, case.counts)
    found = {name: read(device, tensors[name], case.arrays[name]) for name in ("cache", "out")}
    assert_matches(case, {"cache": found["cache"]}, {"cache": rotated["cache"]}, gpu=True)
    bound = replace(case, atol=HALF_RATIO * ATTENTION_ERROR, rtol=HALF_RATIO * ATTENTION_ERROR)
    assert_matches(bound, {"out": found["out"]}, expected, gpu=True)
    return found


# ---- a matmul and the norm after it


@dataclass(frozen=True)
class NormPair:
    given: Sequence[Given]
    norm: Case
    tensors: dict[str, Tensor]


def norm_pair(
    device: VulkanDevice, layout: str, dim: int, options: str, rng: np.random.Generator
) -> NormPair:
    """`options`: of norm.make_case."""
    of_matmul = matmul.make_case(layout, 1, dim, 512, 0, 0, rng)
    added = matmul.BY_LAYOUT[layout].reference(of_matmul.arrays, of_matmul.scalars, of_matmul.counts)["out"]
    case = norm.make_case(rng, layout, 1, dim, f"add {options}")
    matmul_arrays = {f"matmul {name}": array for name, array in of_matmul.arrays.items()}
    tensors = place(device, {**matmul_arrays, **case.arrays, "add": added})
    tensors["matmul out"] = tensors["add"]
    device.write(tensors["add"], np.zeros(tensors["add"].nbytes, np.uint8))
    scalars = {**case.scalars, "add_stride": of_matmul.scalars["out_stride"]}
    given: list[Given] = [
        (
            matmul.BY_LAYOUT[layout],
            of_matmul.scalars,
            {name: tensors[f"matmul {name}"] for name in of_matmul.arrays},
        ),
        (norm.KERNEL, scalars, tensors),
    ]
    case = replace(case, arrays={**case.arrays, "add": added}, scalars=scalars, atol=2e-5, rtol=2e-5)
    return NormPair(given, case, tensors)


def check_norm(device: VulkanDevice, layout: str, dim: int, options: str, rng: np.random.Generator) -> None:
    """Runs a matmul and the norm after it, fused, and compares with the reference of the norm."""
    pair = norm_pair(device, layout, dim, options, rng)
    recording = record(device, pair.given, ONE)
    assert kernels_of(recording) == [f"matmul_norm_partials_{layout}", "norm_finish"]
    recording.replay()
    arrays = pair.norm.arrays
    found = {name: read(device, pair.tensors[name], arrays[name]) for name in ("x", "out")}
    assert_matches(pair.norm, found, norm.KERNEL.reference(arrays, pair.norm.scalars, ONE), gpu=True)

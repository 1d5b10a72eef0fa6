"""Attention that turns queries itself and stores keys and values, for single tokens: against `rope` and `attention`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tandem.bench.kernel_checks import ARENA, ARENA_BYTES, GUARD, HALF_RATIO, assert_matches
from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.recording import Recording
from tandem.kernels import attention, matmul, norm, rope
from tandem.kernels.abi import (
    COUNTS,
    HEADER_SEQUENCES,
    KV_BLOCK,
    PART_NORM,
    PART_ROPE,
    PART_STORE,
    TOKEN_INTS,
    TOKEN_POSITION,
    TOKEN_SLOT,
)
from tandem.kernels.kernel import Array, Case, Counts, Kernel, Scalars
from tandem.kernels.kv_layout import kv_store
from tandem.program.program import Launch, Program, Tensor

ONE = {"tokens": 1, "rows": 1, "work": 1}


@dataclass(frozen=True)
class Turning:
    label: str
    attention: Case
    rope: Case


def make_case(
    label: str,
    heads: tuple[int, int, int],
    positions: Sequence[int],
    window: int = 0,
    parts: int = PART_NORM | PART_ROPE | PART_STORE,
    rot_dim: int = 0,
    interleaved: int = 0,
    seed: int = 0,
    kv: str = "f16",
) -> Turning:
    """`heads`: of queries, of keys, and their size. The place of the new token in the cache is NaN."""
    rng, (q_heads, kv_heads, dim), n = np.random.default_rng(seed), heads, len(positions)
    widths = [q_heads * dim, kv_heads * dim, kv_heads * dim]
    case = attention.make_case(
        rng, label, heads, [(p, 1) for p in positions], window, out_q8=1, q_gap=2 * kv_heads * dim, kv=kv
    )
    qkv = rng.standard_normal((n, sum(widths))).astype(np.float32)
    q, k, v = np.split(qkv, np.cumsum(widths)[:2], axis=1)
    tokens = np.zeros((n, TOKEN_INTS), np.int32)
    tokens[:, TOKEN_POSITION] = positions
    blocks = case.arrays["tables"][np.arange(n), np.array(positions) // KV_BLOCK]
    tokens[:, TOKEN_SLOT] = blocks * KV_BLOCK + np.array(positions) % KV_BLOCK
    with np.errstate(invalid="ignore"):
        nothing = np.full((n, kv_heads, dim), np.nan)
        kv_store(case.arrays["cache"], tokens[:, TOKEN_SLOT], nothing, nothing)
    rot_dim = rot_dim or dim
    angles = np.outer(np.arange(max(positions) + 1), 0.5 ** np.arange(rot_dim // 2))
    arrays: dict[str, Any] = {
        "q": q, "k": k, "v": v, "cache": case.arrays["cache"], "tokens": tokens,
        "table": np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32),
        "vectors": rng.uniform(0.5, 2, (2, dim)).astype(np.float32),
    }  # fmt: skip
    scalars = {
        "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim, "rot_dim": rot_dim, "q_stride": sum(widths),
        "k_stride": sum(widths), "v_stride": sum(widths), "eps": 1e-6, "interleaved": interleaved,
        "slot_field": TOKEN_SLOT, "kv": case.scalars["kv"], "parts": parts, "positions": len(angles),
        "blocks": case.scalars["blocks"],
    }  # fmt: skip
    case = replace(case, scalars={**case.scalars, "scale": dim**-0.5})
    return Turning(label, case, Case(label, arrays, scalars, case.counts, 5e-5, 5e-5))


def cases(dims: Sequence[int] = (64, 128, 256)) -> Iterator[Turning]:
    for dim in dims:
        for group in (1, 2, 3) if dim < 256 else (2, 4):
            positions = [0, 15, 16, 63, 64, 300 + dim + group]
            yield make_case(f"{dim}, {group} a head", (2 * group, 2, dim), positions, seed=group)
    yield make_case("window", (4, 2, dims[0]), [3, 100, 129, 1500], window=100)
    yield make_case("window of 2, 7 a head", (7, 1, dims[0]), [0, 1, 16, 17, 64, 65, 700], window=2)
    yield make_case(
        "interleaved, part of the head", (4, 2, dims[0]), [7, 130], rot_dim=dims[0] // 2, interleaved=1
    )
    yield make_case("part of the head", (4, 2, dims[0]), [7, 130], rot_dim=dims[0] // 2)
    yield make_case("without norm", (8, 1, dims[0]), [9, 700], parts=PART_ROPE | PART_STORE)
    yield make_case("deep", (4, 2, dims[0]), [4100])


def record_pair(
    device: VulkanDevice, pair: Sequence[tuple[Kernel, Scalars, dict[str, Tensor]]], counts: Counts
) -> Recording:
    """Launches as a step of single tokens, of which the last two must be joined."""
    header = device.memory("step").view(np.int32)
    header[: len(COUNTS)] = [counts[name] for name in COUNTS]
    header[HEADER_SEQUENCES] = counts["tokens"]
    launches = [
        Launch(
            kernel, {b.name: tensors.get(b.name) for b in kernel.buffers}, scalars, kernel.name, barrier=True
        )
        for kernel, scalars, tensors in pair
    ]
    recording = device.record(Program(launches, dict.fromkeys(COUNTS, 512), {ARENA: ARENA_BYTES}))
    assert recording._joints and all(
        joint.dispatches(recording._bucket(), device.capabilities) for joint in recording._joints.values()
    )
    return recording


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


def check(device: VulkanDevice, case: Turning, after_product: bool = False) -> dict[str, Array]:
    """What was found; `after_product`: behind a launch that has nothing to do with it."""
    kv_heads, dim = int(case.rope.scalars["kv_heads"]), int(case.rope.scalars["head_dim"])
    q_width = int(case.rope.scalars["q_heads"]) * dim
    qkv = np.concatenate([case.rope.arrays[name] for name in "qkv"], axis=1)
    arrays = {**{name: case.rope.arrays[name] for name in ("cache", "table", "vectors", "tokens")}, "qkv": qkv,
              **{name: case.attention.arrays[name] for name in ("tables", "work", "out")}}  # fmt: skip
    product = matmul.product_case("q4_0", 1, 64, 256, 0, 0, np.random.default_rng(0))
    tensors = place(
        device, {**arrays, **{f"product {name}": array for name, array in product.arrays.items()}}
    )
    for name, column in {"q": 0, "k": q_width, "v": q_width + kv_heads * dim}.items():
        size = qkv.nbytes - 4 * column
        tensors[name] = Tensor(name, ARENA, "f32", size, qkv.shape[1], 4 * column, tensors["qkv"])
    counts = case.attention.counts
    pair = [(rope.KERNEL, case.rope.scalars, tensors), (attention.KERNEL, case.attention.scalars, tensors)]
    if after_product:
        of_product = {name: tensors[f"product {name}"] for name in product.arrays}
        pair.insert(0, (matmul.BY_LAYOUT["q4_0"], product.scalars, of_product))
    record_pair(device, pair, counts).replay()
    turned = rope.KERNEL.reference(case.rope.arrays, case.rope.scalars, counts)
    expected = attention.KERNEL.reference(
        {**case.attention.arrays, "q": turned["q"], "cache": turned["cache"]}, case.attention.scalars, counts
    )

    def read(name: str) -> Array:
        return device.read(tensors[name]).view(arrays[name].dtype).reshape(arrays[name].shape)

    assert_matches(case.rope, {"cache": read("cache")}, {"cache": turned["cache"]}, gpu=True)
    bound = replace(case.attention, atol=HALF_RATIO * 4e-6, rtol=HALF_RATIO * 4e-6)
    assert_matches(bound, {"out": read("out")}, expected, gpu=True)
    return {name: read(name) for name in ("cache", "out")}


@dataclass(frozen=True)
class Pair:
    """A product of one token, then the norm of its result."""

    launches: Sequence[tuple[Kernel, Scalars, dict[str, Tensor]]]
    norm: Case
    tensors: dict[str, Tensor]


def norm_pair(device: VulkanDevice, layout: str, dim: int, options: str, rng: np.random.Generator) -> Pair:
    """`options`: of norm.make_case."""
    product = matmul.product_case(layout, 1, dim, 512, 0, 0, rng)
    added = matmul.BY_LAYOUT[layout].reference(product.arrays, product.scalars, product.counts)["out"]
    case = norm.make_case(rng, layout, 1, dim, f"add {options}")
    arrays = {
        **{f"product {name}": array for name, array in product.arrays.items()},
        **case.arrays,
        "add": added,
    }
    tensors = place(device, arrays)
    tensors["product out"] = tensors["add"]
    of_product = {name: tensors[f"product {name}"] for name in product.arrays}
    device.write(tensors["add"], np.zeros(tensors["add"].nbytes, np.uint8))
    scalars = {**case.scalars, "add_stride": product.scalars["out_stride"]}
    launches = [(matmul.BY_LAYOUT[layout], product.scalars, of_product), (norm.KERNEL, scalars, tensors)]
    case = replace(case, arrays={**case.arrays, "add": added}, scalars=scalars, atol=2e-5, rtol=2e-5)
    return Pair(launches, case, tensors)


def check_norm(device: VulkanDevice, layout: str, dim: int, options: str, rng: np.random.Generator) -> None:
    pair = norm_pair(device, layout, dim, options, rng)
    record_pair(device, pair.launches, ONE).replay()
    arrays = pair.norm.arrays
    got = {
        name: device.read(pair.tensors[name]).view(arrays[name].dtype).reshape(arrays[name].shape)
        for name in ("x", "out")
    }
    assert_matches(pair.norm, got, norm.KERNEL.reference(arrays, pair.norm.scalars, ONE), gpu=True)

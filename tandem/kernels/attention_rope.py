"""Attention with head norm, RoPE and KV store in one launch: `rope`, then `attention`, for one token per sequence.

For GPUs only (attention_rope.slang). It reads the matmul's queries, keys and values and does not change them.
Each work item is one token, whose new key and value go to the cache; keys and values are float16 or int8. Where there
are neither head norms nor a mean of the keys, `vectors` may be the sinks of attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tandem.kernels import attention, rope
from tandem.kernels.abi import (
    KV_BLOCK,
    PART_NORM,
    PART_ROPE,
    PART_SHIFT,
    PART_STORE,
    TOKEN_INTS,
    TOKEN_POSITION,
    TOKEN_SLOT,
)
from tandem.kernels.kernel import AFTER_SCALARS, Array, Buffer, Case, Cost, Counts, Kernel, Scalars
from tandem.kernels.kv_layout import kv_store
from tandem.kernels.rows import rows_bytes

T = TypeVar("T")


def attention_scalars(scalars: Scalars) -> Scalars:
    """The scalars of the `attention` kernel."""
    return {name: scalars[name] for name, _ in attention.KERNEL.scalars}


def rope_scalars(scalars: Scalars) -> Scalars:
    """The scalars of the `rope` kernel, where q, k and v are columns of one matrix."""
    strides = dict.fromkeys(("q_stride", "k_stride", "v_stride"), scalars["q_stride"])
    own = {**scalars, **strides, "slot_field": TOKEN_SLOT}
    return {name: own[name] for name, _ in rope.KERNEL.scalars}


def by_kernel(arrays: Mapping[str, T], scalars: Scalars) -> dict[str, T]:
    """The arrays, or whatever stands for them, by their names in `rope` and `attention`."""
    given = dict(arrays)
    if "vectors" in given and not int(scalars["parts"]) & (PART_NORM | PART_SHIFT):
        given["sinks"] = given.pop("vectors")
    return given


def fused_scalars(of_rope: Scalars, of_attention: Scalars, k_column: int, v_column: int) -> Scalars:
    own = {**of_rope, **of_attention, "k_column": k_column, "v_column": v_column}
    return {name: own[name] for name in KERNEL.scalar_names}


def cost(scalars: Scalars, counts: Counts) -> Cost:
    """The sum of rope and attention, without writing and re-reading the rotated queries and keys."""
    both = [rope.cost(rope_scalars(scalars), counts), attention.cost(attention_scalars(scalars), counts)]
    rotated = (scalars["q_heads"] + scalars["kv_heads"]) * scalars["head_dim"]
    saved = counts["tokens"] * 8 * rotated if int(scalars["parts"]) & (PART_NORM | PART_ROPE) else 0
    return Cost(sum(c.bytes for c in both) - saved, sum(c.ops for c in both))


def vector_floats(scalars: Scalars) -> int:
    parts, dim = int(scalars["parts"]), int(scalars["head_dim"])
    if parts & PART_NORM:
        return 2 * dim
    return int(scalars["kv_heads"]) * dim if parts & PART_SHIFT else int(scalars["q_heads"])


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    columns = int(max(scalars["k_column"], scalars["v_column"]) + scalars["kv_heads"] * scalars["head_dim"])
    of_rope, of_attention = rope_scalars(scalars), attention_scalars(scalars)
    attention_extents = attention.extents(of_attention, counts)
    return {
        **{name: attention_extents[name] for name in ("cache", "tables", "work", "out")},
        "table": rope.extents(of_rope, counts)["table"],
        "vectors": 4 * vector_floats(scalars),
        "qkv": rows_bytes(counts["tokens"], columns, scalars["q_stride"]),
    }


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    tokens, of_rope, arrays = counts["tokens"], rope_scalars(scalars), by_kernel(arrays, scalars)
    table = np.zeros((tokens, TOKEN_INTS), np.int32)
    for row, _, sequence, position in arrays["work"][: counts["work"], :4]:
        block = arrays["tables"][sequence, position // KV_BLOCK]
        table[row, TOKEN_POSITION], table[row, TOKEN_SLOT] = position, block * KV_BLOCK + position % KV_BLOCK
    given: dict[str, Array] = {name: arrays[name] for name in ("cache", "table", "vectors") if name in arrays}
    columns = {"q": 0, "k": int(scalars["k_column"]), "v": int(scalars["v_column"])}
    heads = {name: arrays["qkv"][:, column:] for name, column in columns.items()}
    rotated = rope.reference({**given, **heads, "tokens": table}, of_rope, counts)
    seen = {**arrays, "q": rotated["q"], "cache": rotated["cache"]}
    return {"cache": rotated["cache"], **attention.reference(seen, attention_scalars(scalars), counts)}


def make_case(
    rng: np.random.Generator,
    label: str,
    heads: tuple[int, int, int],
    positions: Sequence[int],
    window: int = 0,
    parts: int = PART_NORM | PART_ROPE | PART_STORE,
    rot_dim: int = 0,
    interleaved: int = 0,
    sinks: bool = False,
    kv: str = "f16",
) -> Case:
    """`heads`: query heads, KV heads, head_dim. The new token's KV slot in the cache is NaN (its scales, in int8)."""
    (q_heads, kv_heads, dim), n = heads, len(positions)
    rows = [(position, 1) for position in positions]
    case = attention.make_case(
        rng, label, heads, rows, window, kv=kv, out_q8=1, q_gap=2 * kv_heads * dim, sinks=sinks
    )
    slots = case.arrays["tables"][np.arange(n), np.array(positions) // KV_BLOCK] * KV_BLOCK
    with np.errstate(invalid="ignore"):
        nothing = np.full((n, kv_heads, dim), np.nan)
        kv_store(case.arrays["cache"], slots + np.array(positions) % KV_BLOCK, nothing, nothing)
    rot_dim = rot_dim or dim
    angles = np.outer(np.arange(max(positions) + 1), 0.5 ** np.arange(rot_dim // 2))
    arrays: dict[str, Any] = {
        "qkv": rng.standard_normal((n, (q_heads + 2 * kv_heads) * dim)).astype(np.float32),
        **{name: case.arrays[name] for name in ("cache", "tables", "work", "out")},
        "table": np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32),
    }
    if parts & (PART_NORM | PART_SHIFT):
        arrays["vectors"] = rng.uniform(0.5, 2, (2 if parts & PART_NORM else kv_heads, dim)).astype(
            np.float32
        )
    elif sinks:
        arrays["vectors"] = case.arrays["sinks"]
    of_rope = {
        "rot_dim": rot_dim,
        "eps": 1e-6,
        "interleaved": interleaved,
        "parts": parts,
        "positions": len(angles),
    }
    of_attention = {**case.scalars, "scale": dim**-0.5}
    scalars = fused_scalars(of_rope, of_attention, q_heads * dim, (q_heads + kv_heads) * dim)
    return Case(label, arrays, scalars, case.counts, atol=5e-5, rtol=5e-5)


def cases(rng: np.random.Generator, dims: Sequence[int] = (64, 128, 256)) -> Iterator[Case]:
    for dim in dims:
        for group in (1, 2, 3) if dim < 256 else (2, 4):
            positions = [0, 15, 16, 63, 64, 300 + dim + group]
            yield make_case(rng, f"{dim}, {group} per KV head", (2 * group, 2, dim), positions)
    dim, part = dims[0], dims[0] // 2
    yield make_case(rng, "window", (4, 2, dim), [3, 100, 129, 1500], window=100)
    yield make_case(rng, "window of 2, 7 per KV head", (7, 1, dim), [0, 1, 16, 17, 64, 65, 700], window=2)
    yield make_case(rng, "interleaved, part of the head", (4, 2, dim), [7, 130], rot_dim=part, interleaved=1)
    yield make_case(rng, "part of the head", (4, 2, dim), [7, 130], rot_dim=part)
    yield make_case(rng, "without norm", (8, 1, dim), [9, 700], parts=PART_ROPE | PART_STORE)
    parts = PART_ROPE | PART_STORE
    yield make_case(rng, "sinks", (8, 1, dim), [0, 9, 700], 128, parts, sinks=True)
    yield make_case(rng, "deep", (4, 2, dim), [4100])
    for dim in dims:
        yield make_case(rng, f"q8, {dim}", (4, 2, dim), [0, 15, 16, 700], kv="q8")
    dim = dims[0]
    yield make_case(
        rng, "q8, window, part of the head", (4, 2, dim), [3, 130, 700], 100, rot_dim=part, kv="q8"
    )
    parts |= PART_SHIFT
    yield make_case(rng, "q8, a mean of the keys", (7, 1, dim), [9, 700], parts=parts, kv="q8")


KERNEL = Kernel(
    name="attention_rope",
    buffers=(
        # float32 [T, q_stride]: query heads from column 0, then keys from k_column, values from v_column
        Buffer("qkv", "r"),
        Buffer("cache", "rw"),  # one layer's KV blocks, float16 or int8
        Buffer("tables", "r"),  # int32 [sequences][table_stride], as in `attention`
        Buffer("work", "r"),  # int32 [W][WORK_INTS], one row per entry
        Buffer("out", "w"),  # float32 [T, out_stride] or q8 [T, out_stride]
        # float32 [2][head_dim]: weights of the head norms; with PART_SHIFT [kv_heads][head_dim]; or [q_heads]: sinks
        Buffer("vectors", "r"),
        Buffer("table", "r", AFTER_SCALARS),  # float32 [positions][rot_dim / 2][cos, sin]
    ),
    scalars=(
        ("q_heads", "i"),
        ("kv_heads", "i"),
        ("k_column", "i"),  # first column of the keys in qkv
        ("q_stride", "i"),
        ("out_stride", "i"),
        ("table_stride", "i"),
        ("window", "i"),
        ("scale", "f"),
        ("softcap", "f"),
        ("v_column", "i"),  # first column of the values in qkv
        ("out_q8", "i"),
        ("eps", "f"),
        ("rot_dim", "i"),
    ),
    constants=("head_dim", "kv", "parts", "interleaved", "positions", "sequences", "blocks"),
    grid=lambda scalars: attention.grid(attention_scalars(scalars)),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
    gpu_only=True,
)

"""The kernel `rope` does head norm, RoPE and the KV write: all operations on q, k and v before attention.

The bits of `parts` (PART_*) select them: a fused Program does all three in one launch. q and k change in place. A token
with a negative slot is not stored. Absent buffers (q, k, v, vectors) have address 0 and stride 0.

With PART_SHIFT, which is for int8, a vector that is the same at all positions is subtracted from keys before they are
stored. That does not change attention, since all scores of a query change by the same number. It saves precision: in
models with a bias on K, the common part of keys can be 100 times their differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tandem.kernels.abi import (
    KV_BLOCK,
    KV_TYPES,
    PART_NORM,
    PART_ROPE,
    PART_SHIFT,
    PART_STORE,
    TOKEN_INTS,
    TOKEN_POSITION,
    TOKEN_SLOT,
)
from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.kv_layout import kv_bytes, kv_head_bytes, kv_store, kv_zeros
from tandem.kernels.norm import rms_norm
from tandem.kernels.rows import padded, rows_bytes


def cost(scalars: Scalars, counts: Counts) -> Cost:
    tokens, parts, head_dim = counts["tokens"], int(scalars["parts"]), scalars["head_dim"]
    kv = scalars["kv_heads"] * head_dim
    rotated = (scalars["q_heads"] * head_dim if scalars["q_stride"] else 0) + (
        kv if scalars["k_stride"] else 0
    )
    in_place = 8 * rotated if parts & (PART_NORM | PART_ROPE) else 0
    written = scalars["kv_heads"] * kv_head_bytes(head_dim, scalars["kv"]) / KV_BLOCK
    stored = 8 * kv + written if parts & PART_STORE else 0
    ops = rotated * ((4 if parts & PART_NORM else 0) + (3 if parts & PART_ROPE else 0))
    return Cost(bytes=tokens * (in_place + stored), ops=tokens * ops)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    tokens, dim = counts["tokens"], int(scalars["head_dim"])
    heads = {"q": scalars["q_heads"], "k": scalars["kv_heads"], "v": scalars["kv_heads"]}
    rows = {name: rows_bytes(tokens, int(n) * dim, scalars[f"{name}_stride"]) for name, n in heads.items()}
    return {
        **rows,
        "cache": kv_bytes(scalars["blocks"], scalars["kv_heads"], dim, scalars["kv"]),
        "table": 4 * int(scalars["positions"] * scalars["rot_dim"]),
        "vectors": 4 * dim * int(scalars["kv_heads"] if int(scalars["parts"]) & PART_SHIFT else 2),
        "tokens": 4 * TOKEN_INTS * tokens,
    }


def rotate(heads: Array, angles: Array, interleaved: bool) -> Array:
    """Rotates heads [T, H, D] by angles [T, pairs, (cos, sin)]. Columns from 2 * pairs on do not change."""
    pairs = angles.shape[1]
    first = np.arange(pairs) * (2 if interleaved else 1)
    second = first + (1 if interleaved else pairs)
    cosine, sine = angles[:, None, :, 0], angles[:, None, :, 1]
    rotated = heads.copy()
    rotated[..., first] = heads[..., first] * cosine - heads[..., second] * sine
    rotated[..., second] = heads[..., first] * sine + heads[..., second] * cosine
    return rotated


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    tokens, dim, parts = counts["tokens"], int(scalars["head_dim"]), int(scalars["parts"])
    table = arrays["tokens"][:tokens]
    heads: dict[str, Array] = {}
    outputs = {name: arrays[name].copy() for name in ("q", "k", "cache") if name in arrays}
    for name, count, weight in (("q", "q_heads", 0), ("k", "kv_heads", 1), ("v", "kv_heads", None)):
        if name not in arrays:
            continue
        width = int(scalars[count]) * dim
        x = arrays[name][:tokens, :width].reshape(tokens, -1, dim).astype(np.float64)
        if weight is not None:
            if parts & PART_NORM and "vectors" in arrays:
                x = rms_norm(x, scalars["eps"]) * arrays["vectors"][weight]
            if parts & PART_ROPE:
                x = rotate(x, arrays["table"][table[:, TOKEN_POSITION]], bool(scalars["interleaved"]))
            outputs[name][:tokens, :width] = x.reshape(tokens, width)
        heads[name] = x.astype(np.float32)
    if parts & PART_STORE:
        slots = table[:, int(scalars["slot_field"])]
        kept = slots >= 0
        k, v = (heads[name][kept] if name in heads else None for name in ("k", "v"))
        if parts & PART_SHIFT and k is not None:
            k = k - arrays["vectors"]
        kv_store(outputs["cache"], slots[kept], k, v)
    return outputs


def make_case(
    rng: np.random.Generator,
    label: str,
    shape: tuple[int, int, int, int, int],
    parts: int,
    interleaved: int = 0,
    kv: str = "f16",
    absent: str = "",
    gap: int = 0,
    size: float = 1.0,
) -> Case:
    tokens, q_heads, kv_heads, dim, rot_dim = shape
    group = int(rng.integers(3))
    blocks = -(-tokens // KV_BLOCK) + 2
    table = rng.integers(0, 1000, (tokens, TOKEN_INTS)).astype(np.int32)
    table[:, TOKEN_POSITION] = rng.integers(0, 50, tokens)
    table[:, TOKEN_SLOT + group] = rng.permutation(blocks * KV_BLOCK)[:tokens]
    if tokens > 3:
        table[2, TOKEN_SLOT + group] = -1
    angles = rng.uniform(0, 2 * np.pi, (50, rot_dim // 2))
    cache = kv_zeros(blocks, kv_heads, dim, kv)
    for field in cache.dtype.names or ():
        cache[field] = 9 * rng.standard_normal(cache[field].shape)
    arrays: dict[str, Any] = {
        "cache": cache,
        "table": np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32),
        "vectors": rng.uniform(0.5, 2, (kv_heads if parts & PART_SHIFT else 2, dim)).astype(np.float32),
        "tokens": table,
    }
    strides = {}
    for i, (name, heads) in enumerate((("q", q_heads), ("k", kv_heads), ("v", kv_heads))):
        strides[name] = heads * dim + gap * (i + 1)
        arrays[name] = padded(rng.standard_normal((tokens, heads * dim)) * size, strides[name])
    for name in absent.split():
        del arrays[name]
    scalars = {
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "rot_dim": rot_dim,
        **{f"{name}_stride": stride if name in arrays else 0 for name, stride in strides.items()},
        "eps": 1e-6,
        "interleaved": interleaved,
        "slot_field": TOKEN_SLOT + group,
        "kv": KV_TYPES.index(kv),
        "parts": parts,
        "positions": len(angles),
        "blocks": blocks,
    }
    # A rotated value is a difference of products, each to 3e-6 of its size: 5 deviations, or 10 if normed.
    largest = 5 * size if not parts & PART_NORM or "vectors" in absent else 10.0
    counts = {"tokens": tokens, "rows": 1, "work": 0}
    return Case(label, arrays, scalars, counts, atol=3e-6 * largest, rtol=3e-6)


def cases(rng: np.random.Generator) -> Iterator[Case]:
    everything = PART_NORM | PART_ROPE | PART_STORE
    shapes = (
        (1, 2, 1, 8, 8),
        (2, 3, 3, 64, 64),
        (5, 4, 2, 20, 12),
        (16, 2, 1, 96, 96),
        (17, 4, 2, 128, 64),
        (33, 3, 1, 34, 34),
    )
    for shape in shapes:
        for interleaved in (0, 1):
            name = "x".join(map(str, shape)) + (" interleaved" if interleaved else "")
            yield make_case(rng, f"{name} float16", shape, everything, interleaved, gap=interleaved * 3)
            yield make_case(rng, f"{name} float32", shape, everything, interleaved, "f32", "vectors")
            yield make_case(rng, f"{name} q8", shape, everything, interleaved, "q8")
    for parts, label in (
        (PART_NORM, "norm"),
        (PART_ROPE, "rope"),
        (PART_STORE, "store"),
        (PART_ROPE | PART_STORE, "rope and store"),
    ):
        yield make_case(rng, f"{label} alone", (5, 4, 2, 48, 32), parts, gap=1)
    for parts, label in (
        (PART_STORE, "store"),
        (PART_STORE | PART_SHIFT, "shift"),
        (PART_ROPE | PART_STORE | PART_SHIFT, "rope and shift"),
    ):
        yield make_case(rng, f"{label} in q8", (5, 4, 2, 96, 32), parts, 0, "q8", gap=1)
    for absent in ("q", "k", "v", "k v", "q v"):
        yield make_case(rng, f"without {absent}", (5, 4, 2, 16, 16), everything, 1, "f16", absent)
        yield make_case(rng, f"without {absent} q8", (5, 4, 2, 16, 16), everything, 1, "q8", absent)
    yield make_case(rng, "without k v cache", (5, 4, 2, 16, 16), PART_NORM | PART_ROPE, absent="k v cache")
    for size in (0.0, 1e-20, 1e4):
        yield make_case(rng, f"size {size:g}", (2, 2, 1, 32, 32), everything, size=size)
        yield make_case(
            rng, f"size {size:g} float32", (2, 2, 1, 32, 32), PART_ROPE | PART_STORE, 1, "f32", size=size
        )
        yield make_case(
            rng, f"size {size:g} q8", (2, 2, 1, 32, 32), PART_ROPE | PART_STORE, 1, "q8", size=size
        )
    yield make_case(rng, "very large head in q8", (2, 1, 1, 512, 512), PART_ROPE | PART_STORE, kv="q8")
    yield make_case(rng, "1x32x8x128", (1, 32, 8, 128, 128), everything)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One workgroup per token and head of q, k or v."""
    shader = "rope_q8" if KV_TYPES[int(scalars["kv"])] == "q8" else "rope"
    constants = tuple(int(scalars[name]) for name in ("head_dim", "parts", "kv"))
    heads = int(scalars["q_heads"] + 2 * scalars["kv_heads"])
    return Dispatch(heads, counts["tokens"], shader=shader, constants=constants)


KERNEL = Kernel(
    name="rope",
    buffers=(
        Buffer("q", "rw"),  # float32 [T, q_stride], heads of head_dim
        Buffer("k", "rw"),  # float32 [T, k_stride]
        Buffer("v", "r"),  # float32 [T, v_stride]
        Buffer("cache", "w"),  # one layer's KV blocks (kv_layout.h)
        Buffer("table", "r"),  # float32 [positions][rot_dim / 2][cos, sin]
        # float32 [2][head_dim]: the weights of the head norms; with PART_SHIFT [kv_heads][head_dim]
        Buffer("vectors", "r"),
        Buffer("tokens", "r"),  # int32 [T][TOKEN_INTS]
    ),
    scalars=(
        ("q_heads", "i"),
        ("kv_heads", "i"),
        ("head_dim", "i"),
        ("rot_dim", "i"),
        ("q_stride", "i"),
        ("k_stride", "i"),
        ("v_stride", "i"),
        ("eps", "f"),
        ("interleaved", "i"),  # 1: pairs (2i, 2i + 1); 0: pairs (i, i + rot_dim / 2)
        ("slot_field", "i"),  # the column of `tokens` with the KV slot
        ("kv", "i"),  # data type of the cache, an index into KV_TYPES
        ("parts", "i"),
        ("positions", "i"),  # rows of `table`, and then blocks of the cache: for the validator
        ("blocks", "i"),
    ),
    grid=lambda scalars: Grid(1, "tokens"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)

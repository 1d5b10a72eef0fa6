"""Head normalisation, rotary positions and the KV store: what q, k and v go through before attention.

`parts` says which of the three run: fused Programs do all in one launch, others one by one. q and k change in
place. A token whose slot is negative is not stored. Absent q, k, v, norms: address 0, stride 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.layouts import (
    KV_BLOCK,
    TOKEN_INTS,
    TOKEN_POSITION,
    TOKEN_SLOT,
    kv_bytes,
    kv_store,
    kv_zeros,
    padded,
    rows_bytes,
)
from tandem.kernels.norm import rms_norm

NORM, ROPE, STORE = 1, 2, 4  # bits of `parts`


def cost(scalars: Scalars, counts: Counts) -> Cost:
    tokens, parts, head_dim = counts["tokens"], int(scalars["parts"]), scalars["head_dim"]
    kv = scalars["kv_heads"] * head_dim
    turned = (scalars["q_heads"] * head_dim if scalars["q_stride"] else 0) + (
        kv if scalars["k_stride"] else 0
    )
    in_place = 8 * turned if parts & (NORM | ROPE) else 0
    stored = 2 * kv * (4 + (4 if scalars["kv_f32"] else 2)) if parts & STORE else 0
    ops = turned * ((4 if parts & NORM else 0) + (3 if parts & ROPE else 0))
    return Cost(bytes=tokens * (in_place + stored), ops=tokens * ops)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    tokens, dim = counts["tokens"], int(scalars["head_dim"])
    heads = {"q": scalars["q_heads"], "k": scalars["kv_heads"], "v": scalars["kv_heads"]}
    rows = {name: rows_bytes(tokens, int(n) * dim, scalars[f"{name}_stride"]) for name, n in heads.items()}
    return {
        **rows,
        "cache": kv_bytes(scalars["blocks"], scalars["kv_heads"], dim, scalars["kv_f32"]),
        "table": 4 * int(scalars["positions"] * scalars["rot_dim"]),
        "norms": 8 * dim,
        "tokens": 4 * TOKEN_INTS * tokens,
    }


def turn(heads: Array, angles: Array, interleaved: bool) -> Array:
    """heads [T, H, D]; angles [T, pairs, (cos, sin)]. Columns from 2 * pairs on stay."""
    pairs = angles.shape[1]
    first = np.arange(pairs) * (2 if interleaved else 1)
    second = first + (1 if interleaved else pairs)
    cosine, sine = angles[:, None, :, 0], angles[:, None, :, 1]
    turned = heads.copy()
    turned[..., first] = heads[..., first] * cosine - heads[..., second] * sine
    turned[..., second] = heads[..., first] * sine + heads[..., second] * cosine
    return turned


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
            if parts & NORM and "norms" in arrays:
                x = rms_norm(x, scalars["eps"]) * arrays["norms"][weight]
            if parts & ROPE:
                x = turn(x, arrays["table"][table[:, TOKEN_POSITION]], bool(scalars["interleaved"]))
            outputs[name][:tokens, :width] = x.reshape(tokens, width)
        heads[name] = x.astype(np.float32)
    if parts & STORE:
        slots = table[:, int(scalars["slot_field"])]
        kept = slots >= 0
        k, v = (heads[name][kept] if name in heads else None for name in ("k", "v"))
        kv_store(outputs["cache"], slots[kept], k, v)
    return outputs


def make_case(
    rng: np.random.Generator,
    label: str,
    shape: tuple[int, int, int, int, int],
    parts: int,
    interleaved: int = 0,
    kv_f32: int = 0,
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
    cache = kv_zeros(blocks, kv_heads, dim, np.float32 if kv_f32 else np.float16)
    cache[...] = rng.standard_normal(cache.shape)
    arrays: dict[str, Any] = {
        "cache": cache,
        "table": np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32),
        "norms": rng.uniform(0.5, 2, (2, dim)).astype(np.float32),
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
        "kv_f32": kv_f32,
        "parts": parts,
        "positions": len(angles),
        "blocks": blocks,
    }
    # A turned value is a difference of products, each to 3e-6 of its size: 5 deviations, or 10 if normed.
    largest = 5 * size if not parts & NORM or "norms" in absent else 10.0
    counts = {"tokens": tokens, "rows": 1, "work": 0}
    return Case(label, arrays, scalars, counts, atol=3e-6 * largest, rtol=3e-6)


def cases(rng: np.random.Generator) -> Iterator[Case]:
    everything = NORM | ROPE | STORE
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
            yield make_case(rng, f"{name} float16", shape, everything, interleaved, 0, gap=interleaved * 3)
            yield make_case(rng, f"{name} float32", shape, everything, interleaved, 1, "norms")
    for parts, label in ((NORM, "norm"), (ROPE, "rope"), (STORE, "store"), (ROPE | STORE, "rope and store")):
        yield make_case(rng, f"{label} alone", (5, 4, 2, 48, 32), parts, 0, 0, gap=1)
    for absent in ("q", "k", "v", "k v", "q v"):
        yield make_case(rng, f"without {absent}", (5, 4, 2, 16, 16), everything, 1, 0, absent)
    yield make_case(rng, "without k v cache", (5, 4, 2, 16, 16), NORM | ROPE, 0, 0, "k v cache")
    for size in (0.0, 1e-20, 1e4):
        yield make_case(rng, f"size {size:g}", (2, 2, 1, 32, 32), everything, 0, 0, size=size)
        yield make_case(rng, f"size {size:g} float32", (2, 2, 1, 32, 32), ROPE | STORE, 1, 1, size=size)
    yield make_case(rng, "1x32x8x128", (1, 32, 8, 128, 128), everything)


KERNEL = Kernel(
    name="rope",
    buffers=(
        Buffer("q", "rw"),  # float32 [T, q_stride], heads of head_dim
        Buffer("k", "rw"),  # float32 [T, k_stride]
        Buffer("v", "r"),  # float32 [T, v_stride]
        Buffer("cache", "w"),  # one layer's KV blocks (layouts.h), float16 or float32
        Buffer("table", "r"),  # float32 [positions][rot_dim / 2][cos, sin]
        Buffer("norms", "r"),  # float32 [2][head_dim]: the weights of q and of k
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
        ("kv_f32", "i"),
        ("parts", "i"),
        ("positions", "i"),  # rows of `table`, and blocks of the cache: their sizes, for the null device
        ("blocks", "i"),
    ),
    grid=lambda scalars: Grid(1, "tokens"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)

"""NumPy twins of kernels/layouts.h: quantised activations and the paged KV cache, for the references."""

from __future__ import annotations

from typing import Any

import numpy as np

from tandem.kernels.kernel import Array
from tandem.kernels.panels import Q8_COLUMNS, TILE

KV_BLOCK = 16  # tokens
KV_TYPES = ("f16", "f32", "q8")  # what keys and values are kept as; kernels' scalar `kv` is an index
KV_SCALED = 32  # elements of a head that share a scale in q8
# The columns of StepInputs' token table, int32 [T][TOKEN_INTS]; a KV group's slot is at TOKEN_SLOT + group.
TOKEN_ID, TOKEN_POSITION, TOKEN_SEQUENCE, TOKEN_SOURCE, TOKEN_SLOT, TOKEN_INTS = 0, 1, 2, 3, 4, 8

Q8_BLOCK = np.dtype(
    [
        ("q", np.int8, (TILE, Q8_COLUMNS)),
        ("scale", np.float32, TILE),
        ("sum", np.float32, TILE),
        ("low", np.float32, TILE),
        ("high", np.float32, TILE),
    ]
)


def q8_zeros(tokens: int, columns: int) -> Array:
    """[ceil(tokens / TILE), columns / 32] of Q8_BLOCK."""
    return np.zeros((-(-tokens // TILE), columns // Q8_COLUMNS), Q8_BLOCK)


def q8_store(blocks: Array, x: Array) -> None:
    """Quantises x [T, K] into rows 0..T-1, in place: the same float32 operations as q8_write."""
    tokens, columns = x.shape
    values = x.astype(np.float32).reshape(tokens, columns // Q8_COLUMNS, Q8_COLUMNS)
    largest = np.abs(values).max(axis=2, initial=0)
    with np.errstate(over="ignore", divide="ignore"):
        inverse = np.where(largest > np.float32(1e-30), np.float32(127) / largest, np.float32(0))
    scale = largest / np.float32(127)
    q = np.rint(values * inverse[..., None]).astype(np.int8)
    low, high = (half.sum(axis=2, dtype=np.int32).astype(np.float32) for half in (q[..., :16], q[..., 16:]))
    tile, row = np.divmod(np.arange(tokens), TILE)
    blocks["q"][tile, :, row] = q
    for name, value in {
        "scale": scale,
        "sum": scale * (low + high),
        "low": scale * low,
        "high": scale * high,
    }.items():
        blocks[name][tile, :, row] = value


def q8_pack(x: Array) -> Array:
    blocks = q8_zeros(*x.shape)
    q8_store(blocks, x)
    return blocks


def q8_unpack(blocks: Array, tokens: int) -> Array:
    """The first `tokens` rows as float32 [tokens, K]."""
    x: Array = blocks["q"] * blocks["scale"][..., None]  # [tiles, K / 32, TILE, 32]
    return x.swapaxes(1, 2).reshape(-1, blocks.shape[1] * Q8_COLUMNS)[:tokens]


def kv_head_bytes(head_dim: float, kv: float) -> int:
    """Of a block's keys and values of one head."""
    if KV_TYPES[int(kv)] == "q8":
        return int(2 * KV_BLOCK * (head_dim + 2 * -(-head_dim // KV_SCALED)))
    return int(2 * KV_BLOCK * head_dim * (4 if KV_TYPES[int(kv)] == "f32" else 2))


def kv_bytes(blocks: float, kv_heads: float, head_dim: float, kv: float) -> int:
    """The size of kv_zeros."""
    return int(blocks * kv_heads) * kv_head_bytes(head_dim, kv)


def kv_zeros(blocks: int, kv_heads: int, head_dim: int, kv: str) -> Array:
    """One layer's cache: [blocks, kv_heads] of what `kv_dtype` says."""
    return np.zeros((blocks, kv_heads), kv_dtype(head_dim, kv))


def kv_dtype(head_dim: int, kv: str) -> np.dtype[np.void]:
    """Keys [head_dim, KV_BLOCK] and values [KV_BLOCK, head_dim] of a block and a head; as q8 then their scales."""
    element = {"f16": np.float16, "f32": np.float32, "q8": np.int8}[kv]
    fields: list[Any] = [("k", element, (head_dim, KV_BLOCK)), ("v", element, (KV_BLOCK, head_dim))]
    if kv == "q8":
        scales = (-(-head_dim // KV_SCALED), KV_BLOCK)
        fields += [("k_scale", np.float16, scales), ("v_scale", np.float16, scales)]
    return np.dtype(fields)


def kv_quantise(x: Array) -> tuple[Array, Array]:
    """x [..., head_dim] as int8, and float16 scales [..., scales]: the same float32 operations as rope.c's store_q8."""
    dim = x.shape[-1]
    padded = np.pad(x.astype(np.float32), [(0, 0)] * (x.ndim - 1) + [(0, -dim % KV_SCALED)])
    groups = padded.reshape(*x.shape[:-1], -1, KV_SCALED)
    scale = (np.abs(groups).max(axis=-1) / np.float32(127)).astype(np.float16)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, np.float32(1) / scale.astype(np.float32), np.float32(0))
    q = np.rint(np.clip(groups * inverse[..., None], -127, 127)).astype(np.int8)
    return q.reshape(padded.shape)[..., :dim], scale


def kv_store(cache: Array, slots: Array, k: Array | None, v: Array | None) -> None:
    """Writes k and v [n, kv_heads, head_dim] at `slots`, in place."""
    block, inside = np.divmod(slots, KV_BLOCK)
    for name, x in (("k", k), ("v", v)):
        if x is None:
            continue
        if "k_scale" in (cache.dtype.names or ()):
            x, scales = kv_quantise(x)
            cache[f"{name}_scale"][block, :, :, inside] = scales
        if name == "k":
            cache["k"][block, :, :, inside] = x
        else:
            cache["v"][block, :, inside] = x


def kv_load(cache: Array, slots: Array) -> tuple[Array, Array]:
    """The keys and values at `slots`, each float32 [n, kv_heads, head_dim]."""
    block, inside = np.divmod(slots, KV_BLOCK)
    k, v = (x.astype(np.float32) for x in (cache["k"][block, :, :, inside], cache["v"][block, :, inside]))
    if "k_scale" in (cache.dtype.names or ()):
        for x, name in ((k, "k_scale"), (v, "v_scale")):
            scales = cache[name][block, :, :, inside].astype(np.float32)
            x *= np.repeat(scales, KV_SCALED, axis=-1)[..., : x.shape[-1]]
    return k, v


def rows_bytes(rows: int, columns: int, stride: float) -> int:
    """From the first to the last float32 of rows `stride` apart."""
    return 4 * ((rows - 1) * int(stride) + columns) if rows else 0


def padded(x: Array, stride: int) -> Array:
    """x [T, K] as rows `stride` apart; the gap is NaN, so that a kernel that reads it shows."""
    rows = np.full((x.shape[0], stride), np.nan, np.float32)
    rows[:, : x.shape[1]] = x
    return rows

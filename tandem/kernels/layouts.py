"""NumPy twins of devices/cpu/layouts.h: quantised activations and the paged KV cache, for the references."""

from __future__ import annotations

import numpy as np

from tandem.kernels.kernel import Array
from tandem.kernels.panels import Q8_COLUMNS, TILE

KV_BLOCK = 16  # tokens
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


def kv_zeros(blocks: int, kv_heads: int, head_dim: int, dtype: type[np.float16] | type[np.float32]) -> Array:
    """One layer's cache: [blocks, kv_heads, keys and values, head_dim * KV_BLOCK]."""
    return np.zeros((blocks, kv_heads, 2, head_dim * KV_BLOCK), dtype)


def kv_bytes(blocks: float, kv_heads: float, head_dim: float, f32: float) -> int:
    """The size of kv_zeros."""
    return int(blocks * kv_heads * 2 * head_dim * KV_BLOCK * (4 if f32 else 2))


def kv_views(cache: Array) -> tuple[Array, Array]:
    """Keys [blocks, kv_heads, head_dim, KV_BLOCK] and values [blocks, kv_heads, KV_BLOCK, head_dim]."""
    blocks, heads, _, size = cache.shape
    keys = cache[:, :, 0].reshape(blocks, heads, size // KV_BLOCK, KV_BLOCK)
    values = cache[:, :, 1].reshape(blocks, heads, KV_BLOCK, size // KV_BLOCK)
    assert np.shares_memory(keys, cache) and np.shares_memory(values, cache)
    return keys, values


def kv_store(cache: Array, slots: Array, k: Array | None, v: Array | None) -> None:
    """Writes k and v [n, kv_heads, head_dim] at `slots`, in place."""
    keys, values = kv_views(cache)
    block, inside = np.divmod(slots, KV_BLOCK)
    if k is not None:
        keys[block, :, :, inside] = k
    if v is not None:
        values[block, :, inside] = v


def kv_load(cache: Array, slots: Array) -> tuple[Array, Array]:
    """The keys and values at `slots`, each float32 [n, kv_heads, head_dim]."""
    keys, values = kv_views(cache)
    block, inside = np.divmod(slots, KV_BLOCK)
    return keys[block, :, :, inside].astype(np.float32), values[block, :, inside].astype(np.float32)


def rows_bytes(rows: int, columns: int, stride: float) -> int:
    """From the first to the last float32 of rows `stride` apart."""
    return 4 * ((rows - 1) * int(stride) + columns) if rows else 0


def padded(x: Array, stride: int) -> Array:
    """x [T, K] as rows `stride` apart; the gap is NaN, so that a kernel that reads it shows."""
    rows = np.full((x.shape[0], stride), np.nan, np.float32)
    rows[:, : x.shape[1]] = x
    return rows

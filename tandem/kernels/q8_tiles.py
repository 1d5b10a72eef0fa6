"""Activations quantised to int8 in NumPy, as q8_tiles.h has them: tiles of 16 tokens, blocks of 32 columns."""

from __future__ import annotations

import numpy as np

from tandem.kernels.abi import Q8_BLOCK, Q8_BLOCK_BYTES, Q8_COLUMNS, Q8_TILE
from tandem.kernels.kernel import Array


def q8_bytes(tokens: int, columns: int) -> int:
    return -(-tokens // Q8_TILE) * (columns // Q8_COLUMNS) * Q8_BLOCK_BYTES


def q8_tokens_bytes(tokens: int, columns: int) -> int:
    """Of the tiles, what belongs to the tokens: the last tile may have room for more."""
    return tokens * q8_bytes(Q8_TILE, columns) // Q8_TILE


def q8_zeros(tokens: int, columns: int) -> Array:
    """[ceil(tokens / Q8_TILE), columns / 32] of Q8_BLOCK."""
    return np.zeros((-(-tokens // Q8_TILE), columns // Q8_COLUMNS), Q8_BLOCK)


def q8_store(blocks: Array, x: Array, first: int = 0) -> None:
    """Quantises x [T, K] into T rows from `first`, in place: the same float32 operations as q8_write."""
    tokens, columns = x.shape
    values = x.astype(np.float32).reshape(tokens, columns // Q8_COLUMNS, Q8_COLUMNS)
    largest = np.abs(values).max(axis=2, initial=0)
    with np.errstate(over="ignore", divide="ignore"):
        inverse = np.where(largest > np.float32(1e-30), np.float32(127) / largest, np.float32(0))
    scale = largest / np.float32(127)
    q = np.rint(values * inverse[..., None]).astype(np.int8)
    low, high = (half.sum(axis=2, dtype=np.int32).astype(np.float32) for half in (q[..., :16], q[..., 16:]))
    tile, row = np.divmod(first + np.arange(tokens), Q8_TILE)
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
    x: Array = blocks["q"] * blocks["scale"][..., None]  # [tiles, K / 32, Q8_TILE, 32]
    return x.swapaxes(1, 2).reshape(-1, blocks.shape[1] * Q8_COLUMNS)[:tokens]

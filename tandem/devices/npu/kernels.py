"""What a core computes on packed vector tiles, in NumPy and bit-exact. Emulated; not yet run on a Phoenix."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Integers = npt.NDArray[np.int32]

EXACT_DEPTH = 2**24 // 128**2 - 1  # sums of so many products of int8 are exact in float32


def unpack(words: Words, rows: int, columns: int, high: int) -> npt.NDArray[np.int8]:
    """int8 vector tiles of `high` x 8 as a matrix."""
    tiles = words.view(np.int8).reshape(rows // high, columns // 8, high, 8)
    return tiles.transpose(0, 2, 1, 3).reshape(rows, columns)


def multiply(a: Words, b: Words, c: Words, m: int, k: int, n: int) -> None:
    """c += a x b; c holds int32 vector tiles of 4 x 8."""
    exact = np.float32 if k <= EXACT_DEPTH else np.float64
    product = unpack(a, m, k, 4).astype(exact) @ unpack(b, k, n, 8).astype(exact)
    tiles = product.astype(np.int32).reshape(m // 4, 4, n // 8, 8).transpose(0, 2, 1, 3)
    c.view(np.int32).reshape(m // 4, n // 8, 4, 8)[...] += tiles


def narrow(sums: Integers, output: str, shift: int, rounding: str) -> npt.NDArray[np.signedinteger]:
    """Shift right, round and saturate, as the cores' shift-round-saturate does."""
    wide = sums.astype(np.int64)
    if shift:
        below = wide & ((1 << shift) - 1)
        half, wide = 1 << (shift - 1), wide >> shift
        if rounding == "half up":
            wide += below >= half
        elif rounding == "half even":
            wide += (below > half) | ((below == half) & (wide % 2 == 1))
    limits = np.iinfo(output)
    return wide.clip(limits.min, limits.max).astype(output)

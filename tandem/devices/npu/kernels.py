"""What a core computes on packed vector tiles, in NumPy and bit-exact. Emulated; not yet run on a Phoenix."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tandem.devices.npu.operands import Words, unpack_int4
from tandem.devices.npu.tiling import WEIGHTS

Integers = npt.NDArray[np.int32]

EXACT_DEPTH = 2**24 // 128**2 - 1  # sums of so many products of int8 are exact in float32


def multiply(a: Words, b: Words, c: Words, m: int, k: int, n: int, weights: str = "int8") -> None:
    """c += a x b; c holds int32 vector tiles of 4 x 8."""
    deep = WEIGHTS[weights].vector_k
    rows = _matrix(a.view(np.int8), m, k, 4, deep)
    numbers = b.view(np.int8)
    columns = _matrix(unpack_int4(numbers) if weights == "int4" else numbers, k, n, deep, 8)
    exact = np.float32 if k <= EXACT_DEPTH else np.float64
    matmul = rows.astype(exact) @ columns.astype(exact)
    tiles = matmul.astype(np.int32).reshape(m // 4, 4, n // 8, 8).transpose(0, 2, 1, 3)
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


def _matrix(
    numbers: npt.NDArray[np.int8], rows: int, columns: int, high: int, wide: int
) -> npt.NDArray[np.int8]:
    """Vector tiles of `high` x `wide` as a matrix."""
    tiles = numbers.reshape(rows // high, columns // wide, high, wide)
    return tiles.transpose(0, 2, 1, 3).reshape(rows, columns)

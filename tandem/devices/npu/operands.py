"""A, B and C as they lie in DRAM, padded with zeros, two int4 a byte. Emulated; not yet run on a Phoenix.

A and B lie as the array reads them, so that each transfer is one run of addresses: A as [M/m][K/k][m][k], B as
[4][N/4n][K][n], where each shim has its own part. C is row-major: its rows are written in runs of n numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tandem.devices.npu.array import WORD
from tandem.devices.npu.plan import GemmPlan
from tandem.devices.npu.tiling import COLUMNS, WEIGHTS
from tandem.errors import ProgramError

Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.int8]


def words_of_a(plan: GemmPlan, a: Bytes) -> Words:
    words = np.empty(plan.argument_bytes[0] // WORD, np.uint32)
    write_a(plan, a, words.view(np.uint8))
    return words


def write_a(plan: GemmPlan, a: Bytes, to: npt.NDArray[np.uint8]) -> None:
    """Writes A into memory that the NPU reads."""
    (rows, _, depth), t = plan.tiling.padded, plan.tiling
    _check("A", a, (plan.M, plan.K), 128)
    row = np.dtype((np.void, t.k))  # of a tile, copied as one item: half the time of bytes
    tiles = _padded(a, rows, depth).view(row).reshape(rows // t.m, t.m, depth // t.k).transpose(0, 2, 1)
    to.view(row).reshape(tiles.shape)[...] = tiles


def words_of_b(plan: GemmPlan, b: Bytes) -> Words:
    """`b` is int8 for int4 weights too: each number by itself."""
    (_, columns, depth), n = plan.tiling.padded, plan.tiling.n
    _check("B", b, (plan.K, plan.N), WEIGHTS[plan.weights].max_magnitude)
    strips = _padded(b, depth, columns).reshape(depth, -1, COLUMNS, n).transpose(2, 1, 0, 3)
    whole = np.ascontiguousarray(strips)
    return (pack_int4(whole) if plan.weights == "int4" else whole).view(np.uint32).reshape(-1)


def c_of_words(plan: GemmPlan, words: Words) -> npt.NDArray[np.signedinteger]:
    rows, columns, _ = plan.tiling.padded
    found: npt.NDArray[np.signedinteger] = words.view(plan.output).reshape(rows, columns)
    return found[: plan.M, : plan.N]


def pack_int4(numbers: Bytes) -> Bytes:
    """Two to a byte, the first in the lower half."""
    low, high = numbers[..., 0::2], numbers[..., 1::2]
    return ((low & 15) | (high << 4)).astype(np.int8)


def unpack_int4(packed: Bytes) -> Bytes:
    """Halves with their sign, in order."""
    low, high = (packed << 4) >> 4, packed >> 4  # shifts of int8 keep the sign
    return np.stack((low, high), axis=-1).reshape(*packed.shape[:-1], -1)


def _check(name: str, matrix: Bytes, shape: tuple[int, int], largest: int) -> None:
    if matrix.shape != shape or matrix.dtype != np.int8:
        raise ProgramError(f"{name} is {matrix.dtype} of {matrix.shape}: give int8 of {shape}")
    if largest < 128 and matrix.size and not -largest <= matrix.min() <= matrix.max() < largest:
        raise ProgramError(
            f"{name} has numbers past {-largest} to {largest - 1}: they do not fit its weights"
        )


def _padded(matrix: Bytes, rows: int, columns: int) -> Bytes:
    if matrix.shape != (rows, columns):
        matrix = np.pad(matrix, ((0, rows - matrix.shape[0]), (0, columns - matrix.shape[1])))
    return np.ascontiguousarray(matrix)

"""Rows of float32 that lie `stride` elements apart."""

from __future__ import annotations

import numpy as np

from tandem.kernels.kernel import Array


def rows_bytes(rows: int, columns: int, stride: float) -> int:
    """Bytes from the first float32 of the first row to the last one of the last row."""
    return 4 * ((rows - 1) * int(stride) + columns) if rows else 0


def padded(x: Array, stride: int) -> Array:
    """x [T, K] as rows `stride` apart, with NaN in the gaps: a kernel that reads a gap fails its test."""
    rows = np.full((x.shape[0], stride), np.nan, np.float32)
    rows[:, : x.shape[1]] = x
    return rows

"""Pooling: each group of neighbouring rows becomes one row, their mean or all of them one after the other.

An image's patches come in the order that makes those of one output row neighbours. With `weight`, the mean is
multiplied by it and `bias` is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.rows import padded, rows_bytes


def out_dim(scalars: Scalars) -> int:
    return int(scalars["dim"] * (scalars["group"] if scalars["concatenate"] else 1))


def cost(scalars: Scalars, counts: Counts) -> Cost:
    read = counts["rows"] * scalars["group"] * scalars["dim"]
    return Cost(bytes=4 * (read + counts["rows"] * out_dim(scalars)), ops=read)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    return {
        "x": rows_bytes(counts["tokens"], int(scalars["dim"]), scalars["x_stride"]),
        "weight": 4 * int(scalars["dim"]),
        "bias": 4 * int(scalars["dim"]),
        "out": rows_bytes(counts["rows"], out_dim(scalars), scalars["out_stride"]),
    }


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    dim, group, n = int(scalars["dim"]), int(scalars["group"]), counts["rows"]
    x = arrays["x"][: n * group, :dim].astype(np.float64).reshape(n, group, dim)
    out = arrays["out"].copy()
    result = x.reshape(n, -1) if scalars["concatenate"] else x.mean(axis=1)
    if "weight" in arrays:
        result = result * arrays["weight"][:dim] + arrays["bias"][:dim]
    out[:n, : out_dim(scalars)] = result
    return {"out": out}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for rows, group, dim, gap in ((1, 1, 1, 0), (2, 4, 17, 3), (5, 16, 48, 0), (17, 9, 100, 4)):
        for concatenate, weighted in ((0, False), (1, False), (0, True)):
            scalars = {"dim": dim, "group": group, "concatenate": concatenate, "x_stride": dim + gap}
            width = out_dim(scalars)
            scalars["out_stride"] = width + 2 * gap
            arrays = {
                "x": padded(rng.standard_normal((rows * group, dim)), dim + gap),
                "out": padded(np.zeros((rows, width)), width + 2 * gap),
            }
            if weighted:
                arrays["weight"], arrays["bias"] = rng.standard_normal((2, dim)).astype(np.float32)
            counts = {"tokens": rows * group, "rows": rows, "work": 0}
            label = f"{rows} of {group} x {dim}{' concatenated' * concatenate}{' weighted' * weighted}"
            yield Case(label, arrays, scalars, counts, atol=1e-6, rtol=1e-6)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One thread computes one column of one row."""
    return Dispatch(-(-out_dim(scalars) // 64), counts["rows"])


KERNEL = Kernel(
    name="pool",
    buffers=(
        Buffer("x", "r"),  # float32 [T, x_stride]
        Buffer("weight", "r"),  # float32 [dim], of means; absent (address 0): ones
        Buffer("bias", "r"),  # float32 [dim], beside a weight
        Buffer("out", "w"),  # float32 [R, out_stride]
    ),
    scalars=(("dim", "i"), ("group", "i"), ("concatenate", "i"), ("x_stride", "i"), ("out_stride", "i")),
    grid=lambda scalars: Grid(1, "rows"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)

"""RMS norm of each of several groups of columns, times a weight for each column.

out = x / sqrt(mean of x^2 over the group + eps) * weight, as float32 rows or int8 tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.q8_tiles import q8_bytes, q8_pack, q8_store
from tandem.kernels.rows import padded, rows_bytes


def width(scalars: Scalars) -> int:
    return int(scalars["groups"]) * int(scalars["group_dim"])


def cost(scalars: Scalars, counts: Counts) -> Cost:
    elements = counts["tokens"] * width(scalars)
    return Cost(bytes=elements * (4 + (1.5 if scalars["out_q8"] else 4)), ops=elements * 4)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    dim, n = width(scalars), counts["tokens"]
    return {
        "x": rows_bytes(n, dim, scalars["x_stride"]),
        "weight": 4 * dim,
        "out": q8_bytes(n, dim) if scalars["out_q8"] else rows_bytes(n, dim, scalars["out_stride"]),
    }


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    dim, n = width(scalars), counts["tokens"]
    x = arrays["x"][:n, :dim].astype(np.float64).reshape(n, -1, int(scalars["group_dim"]))
    normed = x / np.sqrt(np.square(x).mean(axis=2, keepdims=True) + scalars["eps"])
    result, out = normed.reshape(n, dim) * arrays["weight"], arrays["out"].copy()
    if scalars["out_q8"]:
        q8_store(out, result)
    else:
        out[:n, :dim] = result
    return {"out": out}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    shapes = ((1, 1, 1, 0, 0), (2, 3, 17, 3, 0), (5, 2, 48, 0, 0), (33, 2, 64, 4, 0), (1, 4, 128, 0, 1))
    for n, groups, group_dim, gap, out_q8 in (*shapes, (17, 3, 32, 5, 1), (33, 2, 96, 0, 1)):
        dim = groups * group_dim
        x, old = rng.standard_normal((2, n, dim))
        arrays = {
            "x": padded(x * 3, dim + gap),
            "weight": rng.uniform(-2, 2, dim).astype(np.float32),
            "out": q8_pack(old) if out_q8 else padded(old, dim + gap),
        }
        scalars = {
            "groups": groups,
            "group_dim": group_dim,
            "x_stride": dim + gap,
            "out_stride": 0 if out_q8 else dim + gap,
            "eps": 1e-5,
            "out_q8": out_q8,
        }
        counts = {"tokens": n, "rows": 1, "work": 0}
        yield Case(f"{n}x{groups}x{group_dim}{' q8' * out_q8}", arrays, scalars, counts, atol=2e-8, rtol=4e-6)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One workgroup for a group of a token."""
    return Dispatch(int(scalars["groups"]), counts["tokens"])


KERNEL = Kernel(
    name="group_norm",
    buffers=(
        Buffer("x", "r"),  # float32 [T, x_stride]
        Buffer("weight", "r"),  # float32 [groups * group_dim]
        Buffer("out", "w"),  # float32 [T, out_stride] or q8 [T, groups * group_dim]
    ),
    scalars=(
        ("groups", "i"),
        ("group_dim", "i"),
        ("x_stride", "i"),
        ("out_stride", "i"),
        ("eps", "f"),
        ("out_q8", "i"),
    ),
    grid=lambda scalars: Grid(1, "tokens"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)

"""Quantises rows of float32 to int8 tiles (q8_tiles.h), the input of matmuls with quantised weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.q8_tiles import q8_bytes, q8_pack, q8_store
from tandem.kernels.rows import padded, rows_bytes


def count_of(scalars: Scalars) -> str:
    return "rows" if scalars["count_rows"] else "tokens"


def cost(scalars: Scalars, counts: Counts) -> Cost:
    elements = counts[count_of(scalars)] * scalars["dim"]
    return Cost(bytes=elements * (4 + 1.5), ops=elements * 3)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    dim, n = int(scalars["dim"]), counts[count_of(scalars)]
    return {"x": rows_bytes(n, dim, scalars["x_stride"]), "out": q8_bytes(n, dim)}


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    out = arrays["out"].copy()
    q8_store(out, arrays["x"][: counts[count_of(scalars)], : int(scalars["dim"])])
    return {"out": out}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Every operation is one float32 operation, so the reference is met bit for bit (atol = rtol = 0)."""

    def case(label: str, x: Array, gap: int = 0, count_rows: int = 0) -> Case:
        n, dim = x.shape
        arrays = {"x": padded(x, dim + gap), "out": q8_pack(rng.standard_normal((n, dim)))}
        counts = {"tokens": 1, "rows": n, "work": 0} if count_rows else {"tokens": n, "rows": 1, "work": 0}
        return Case(label, arrays, {"dim": dim, "x_stride": dim + gap, "count_rows": count_rows}, counts)

    for n, dim, gap in ((1, 32, 0), (2, 64, 1), (5, 96, 32), (16, 32, 7), (17, 576, 0), (33, 160, 16)):
        x = rng.standard_normal((n, dim)) * 10.0 ** rng.integers(-4, 4, (n, 1))
        yield case(f"{n}x{dim}", x, gap)
        yield case(f"{n}x{dim} rows", x, gap, count_rows=1)
    for size in (0, 1e-44, 1e-37, 1e-32, 1e-20, 1e4, 1e30):
        yield case(f"2x64 of size {size:g}", rng.uniform(-size, size, (2, 64)))
    one_large = rng.standard_normal((3, 64))
    one_large[:, 40] = 1e6
    yield case("one large value", one_large)
    yield case("ties", np.concatenate([[127], np.arange(-15.5, 15.5)])[None])
    yield case("1x2048", rng.standard_normal((1, 2048)))


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One thread quantises a block of 32 columns; y is the row."""
    blocks = int(scalars["dim"]) // 32
    return Dispatch(-(-blocks // 64), counts["rows" if scalars["count_rows"] else "tokens"])


KERNEL = Kernel(
    name="quantise",
    buffers=(Buffer("x", "r"), Buffer("out", "w")),  # float32 [T or R, x_stride] -> q8 [T or R, dim]
    scalars=(("dim", "i"), ("x_stride", "i"), ("count_rows", "i")),
    grid=lambda scalars: Grid(1, count_of(scalars)),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)

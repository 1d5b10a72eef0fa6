"""Layer normalisation: out = (x - mean) / sqrt(variance + eps) * weight + bias, of all rows or of those listed.

An absent buffer (`bias`, `rows`) has address 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.q8_tiles import q8_bytes, q8_pack, q8_store
from tandem.kernels.rows import padded, rows_bytes

THREADS = 128  # of a workgroup
# Values of `use_rows`: some rows of those of all tokens, or x has no others; 0: all tokens.
LISTED, OWN_ROWS = 1, 2


def count_of(scalars: Scalars) -> str:
    return "rows" if scalars["use_rows"] else "tokens"


def cost(scalars: Scalars, counts: Counts) -> Cost:
    elements = counts[count_of(scalars)] * scalars["dim"]
    out = 1.5 if scalars["out_q8"] else 4.0
    return Cost(bytes=elements * (4 + out) + 8 * scalars["dim"], ops=8 * elements)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    dim, n = int(scalars["dim"]), counts[count_of(scalars)]
    source = counts["tokens"] if scalars["use_rows"] == LISTED else n
    return {
        "x": rows_bytes(source, dim, scalars["x_stride"]),
        "weight": 4 * dim,
        "bias": 4 * dim,
        "rows": 4 * n,
        "out": q8_bytes(n, dim) if scalars["out_q8"] else rows_bytes(n, dim, scalars["out_stride"]),
    }


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    dim, n = int(scalars["dim"]), counts[count_of(scalars)]
    source = arrays["rows"][:n] if scalars["use_rows"] == LISTED else np.arange(n)
    x = arrays["x"][source, :dim].astype(np.float64)
    centred = x - x.mean(axis=1, keepdims=True)
    scaled = centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + scalars["eps"])
    result = scaled * arrays["weight"] + arrays.get("bias", 0.0)
    out = arrays["out"].copy()
    if scalars["out_q8"]:
        q8_store(out, result)
    else:
        out[:n, :dim] = result
    return {"out": out}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(label: str, tokens: int, dim: int, gap: int, use_rows: int, biased: bool, out_q8: int) -> Case:
        rows = rng.permutation(tokens)[: max(1, tokens // 3)].astype(np.int32)
        n = len(rows) if use_rows == LISTED else tokens
        old = rng.standard_normal((n, dim))
        arrays = {
            "x": padded(rng.standard_normal((tokens, dim)) + 3, dim + gap),
            "weight": rng.uniform(-2, 2, dim).astype(np.float32),
            "out": q8_pack(old) if out_q8 else padded(old, dim + 2 * gap),
        }
        if biased:
            arrays["bias"] = rng.standard_normal(dim).astype(np.float32)
        if use_rows == LISTED:
            arrays["rows"] = rows
        scalars = {
            "dim": dim,
            "x_stride": dim + gap,
            "out_stride": 0 if out_q8 else dim + 2 * gap,
            "eps": 1e-5,
            "out_q8": out_q8,
            "use_rows": use_rows,
        }
        counts = {"tokens": tokens, "rows": n if use_rows else len(rows), "work": 0}
        if use_rows == OWN_ROWS:
            counts["tokens"] = 1
        # The mean is a float32 sum over 16 lanes: a centred value is off by about 1e-6 of the mean.
        return Case(label, arrays, scalars, counts, atol=1e-5, rtol=1e-5)

    for tokens, dim, gap in ((1, 1, 0), (2, 17, 3), (5, 48, 0), (17, 100, 4), (33, 576, 0), (3, 2048, 0)):
        for use_rows in (0, 1):
            yield case(f"{tokens}x{dim}{' rows' * use_rows}", tokens, dim, gap, use_rows, True, 0)
        yield case(f"{tokens}x{dim} without bias", tokens, dim, gap, 0, False, 0)
        yield case(f"{tokens}x{dim} of rows", tokens, dim, gap, OWN_ROWS, True, 0)
    for tokens, dim in ((1, 32), (17, 96), (33, 576)):
        yield case(f"{tokens}x{dim} q8", tokens, dim, 0, 0, True, 1)
        yield case(f"{tokens}x{dim} rows q8", tokens, dim, 4, 1, False, 1)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One workgroup per row."""
    return Dispatch(counts[count_of(scalars)], constants=(THREADS, int(scalars["use_rows"])))


KERNEL = Kernel(
    name="layer_norm",
    buffers=(
        Buffer("x", "r"),  # float32 [T, x_stride]
        Buffer("weight", "r"),  # float32 [dim]
        Buffer("bias", "r"),  # float32 [dim]
        Buffer("rows", "r"),  # int32 [R]
        Buffer("out", "w"),  # float32 [T or R, out_stride] or q8 [T or R, dim]
    ),
    scalars=(
        ("dim", "i"),
        ("x_stride", "i"),
        ("out_stride", "i"),
        ("eps", "f"),
        ("out_q8", "i"),
        ("use_rows", "i"),
    ),
    grid=lambda scalars: Grid(1, count_of(scalars)),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)

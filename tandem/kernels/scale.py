"""Multiplies rows in place: by one factor, or each element by the factor that `chosen` names (weights of experts)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.rows import padded, rows_bytes


def cost(scalars: Scalars, counts: Counts) -> Cost:
    elements = counts["tokens"] * scalars["dim"]
    return Cost(bytes=elements * (8 if scalars["factors"] == 1 else 16), ops=elements)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    rows = rows_bytes(counts["tokens"], int(scalars["dim"]), scalars["stride"])
    return {"x": rows, "factors": 4 * int(scalars["factors"]), "chosen": rows}


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    dim, n = int(scalars["dim"]), counts["tokens"]
    x = arrays["x"].copy()
    x[:n, :dim] *= arrays["factors"][arrays["chosen"][:n, :dim] if "chosen" in arrays else 0]
    return {"x": x}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for tokens, dim, gap in ((1, 1, 0), (2, 17, 3), (5, 8, 0), (17, 100, 4), (33, 576, 0)):
        for factors in (1, 7):
            arrays = {
                "x": padded(rng.standard_normal((tokens, dim)), dim + gap),
                "factors": rng.uniform(-2, 2, factors).astype(np.float32),
            }
            if factors > 1:
                arrays["chosen"] = rng.integers(0, factors, (tokens, dim + gap)).astype(np.int32)
            scalars = {"dim": dim, "stride": dim + gap, "factors": factors}
            counts = {"tokens": tokens, "rows": 1, "work": 0}
            yield Case(f"{tokens}x{dim} by {factors}", arrays, scalars, counts)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One thread multiplies one element."""
    return Dispatch(-(-int(scalars["dim"]) // 64), counts["tokens"])


KERNEL = Kernel(
    name="scale",
    buffers=(
        Buffer("x", "rw"),  # float32 [T, stride]
        Buffer("factors", "r"),  # float32 [factors]
        Buffer("chosen", "r"),  # int32 [T, stride]; absent (address 0): the first factor for all
    ),
    scalars=(("dim", "i"), ("stride", "i"), ("factors", "i")),  # the last for the validator
    grid=lambda scalars: Grid(1, "tokens"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)

"""Adds columns of the rows that the host gives to the rows of an image's tokens, in place; no other row changes.

A token whose TOKEN_SOURCE is below 0 is of an image: row -1 - TOKEN_SOURCE of `inputs` is its own, as in embed.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.abi import TOKEN_INTS, TOKEN_SOURCE
from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.rows import padded, rows_bytes


def cost(scalars: Scalars, counts: Counts) -> Cost:
    """Of a step with text: the rows of images are few."""
    return Cost(bytes=4 * counts["tokens"], ops=0)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    n, dim = counts["tokens"], int(scalars["dim"])
    return {
        "x": rows_bytes(n, dim, scalars["stride"]),
        "inputs": rows_bytes(n, int(scalars["first"]) + dim, scalars["input_stride"]),
        "tokens": 4 * TOKEN_INTS * n,
    }


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    dim, first, x = int(scalars["dim"]), int(scalars["first"]), arrays["x"].copy()
    for token in range(counts["tokens"]):
        source = arrays["tokens"][token, TOKEN_SOURCE]
        if source < 0:
            x[token, :dim] += arrays["inputs"][-1 - source, first : first + dim]
    return {"x": x}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for tokens, dim, gap, first in (
        (1, 1, 0, 0),
        (2, 17, 3, 17),
        (5, 48, 0, 7),
        (17, 100, 4, 200),
        (33, 576, 0, 0),
    ):
        width = first + dim + gap
        table = np.zeros((tokens, TOKEN_INTS), np.int32)
        table[::2, TOKEN_SOURCE] = -1 - np.arange(len(table[::2]))[::-1]
        table[1::4, TOKEN_SOURCE] = 3
        arrays = {
            "x": padded(rng.standard_normal((tokens, dim)), dim + gap),
            "inputs": padded(rng.standard_normal((tokens, first + dim)), width),
            "tokens": table,
        }
        scalars = {"dim": dim, "stride": dim + gap, "first": first, "input_stride": width}
        yield Case(f"{tokens}x{dim} from {first}", arrays, scalars, {"tokens": tokens, "rows": 1, "work": 0})


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One thread adds one element."""
    return Dispatch(-(-int(scalars["dim"]) // 64), counts["tokens"])


KERNEL = Kernel(
    name="add_input",
    buffers=(
        Buffer("x", "rw"),  # float32 [T, stride]
        Buffer("inputs", "r"),  # float32 [inputs, input_stride]
        Buffer("tokens", "r"),  # int32 [T][TOKEN_INTS]
    ),
    scalars=(
        ("dim", "i"),
        ("stride", "i"),
        ("first", "i"),  # column of `inputs`
        ("input_stride", "i"),
    ),
    grid=lambda scalars: Grid(1, "tokens"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)

"""Embedding: a row of the table for each token, times a scale. The table is in panels: often it is the LM head too.

If TOKEN_SOURCE is above 0, the id is in row TOKEN_SOURCE - 1 of `sampled`: the results of the previous step.
Below 0, the embedding is row -1 - TOKEN_SOURCE of `inputs`, which the host wrote: a token of an image. It is unscaled.
Without `inputs`, such a token has the row of its id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from tandem.kernels.abi import RESULT_INTS, TOKEN_ID, TOKEN_INTS, TOKEN_SOURCE
from tandem.kernels.dispatch import Dispatch, Gpu, with_format
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.matmul import random_panels, unpack_panels
from tandem.kernels.panels import CHOSEN, LAYOUT_NAMES, LAYOUTS
from tandem.kernels.rows import padded, rows_bytes

THREADS = 64  # of a workgroup on a GPU


def _extents(s: Scalars, counts: Counts) -> dict[str, int]:
    rows, columns, n = int(s["rows"]), int(s["columns"]), counts["tokens"]
    return {
        "tokens": 4 * TOKEN_INTS * n,
        "table": LAYOUTS[LAYOUT_NAMES[int(s["format"])]].matrix_bytes(rows, columns),
        "sampled": 4 * RESULT_INTS * counts["rows"],
        "out": 4 * ((n - 1) * int(s["out_stride"]) + columns),
        "inputs": rows_bytes(n, columns, s["input_stride"]),
    }


def _cost(s: Scalars, counts: Counts) -> Cost:
    values = counts["tokens"] * s["columns"]
    layout = LAYOUTS[LAYOUT_NAMES[int(s["format"])]]
    return Cost(bytes=values * (4 + layout.chunk_bytes / layout.span), ops=2 * values)


def _reference(arrays: Mapping[str, Array], s: Scalars, counts: Counts) -> dict[str, Array]:
    layout, columns = LAYOUT_NAMES[int(s["format"])], int(s["columns"])
    table = unpack_panels(layout, arrays["table"], int(s["rows"]), columns)
    out = arrays["out"].copy()
    for t in range(counts["tokens"]):
        source, token = arrays["tokens"][t, TOKEN_SOURCE], arrays["tokens"][t, TOKEN_ID]
        if source < 0 and "inputs" in arrays:
            out[t, :columns] = arrays["inputs"][-1 - source, :columns]
            continue
        row = arrays["sampled"][source - 1, 0] if source > 0 else token
        out[t, :columns] = table[row] * np.float32(s["scale"])
    return {"out": out}


def _cases(layout: str, rng: np.random.Generator) -> Iterator[Case]:
    for tokens, rows, columns in ((1, 16, 256), (9, 50, 512)):
        ids = np.zeros((tokens, TOKEN_INTS), np.int32)
        ids[:, TOKEN_ID] = rng.integers(0, rows, tokens)
        ids[::3, TOKEN_SOURCE] = rng.integers(1, 4, len(ids[::3]))
        ids[1::4, TOKEN_SOURCE] = -1 - np.arange(len(ids[1::4]))[::-1]
        arrays = {
            "tokens": ids,
            "table": random_panels(layout, rows, columns, rng),
            "sampled": rng.integers(0, rows, (3, RESULT_INTS), np.int32),
            "out": np.zeros((tokens, columns + 5), np.float32),
            "inputs": padded(rng.standard_normal((tokens, columns)), columns + 3),
        }
        scalars = dict(
            format=LAYOUT_NAMES.index(layout),
            rows=rows,
            columns=columns,
            out_stride=columns + 5,
            scale=1.5,
            input_stride=columns + 3,
        )
        label = f"{layout} T={tokens} {rows}x{columns}"
        counts = {"tokens": tokens, "rows": 3, "work": 0}
        yield Case(label, arrays, scalars, counts, atol=1e-5, rtol=1e-5)
    without = {name: values for name, values in arrays.items() if name != "inputs"}
    yield Case(f"{label} without inputs", without, scalars, counts, atol=1e-5, rtol=1e-5)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One thread computes 8 columns of one token."""
    layout = LAYOUT_NAMES[int(scalars["format"])]
    chosen = layout in CHOSEN
    return Dispatch(
        -(-int(scalars["columns"]) // (8 * THREADS)),
        counts["tokens"],
        shader="embed_chosen" if chosen else "",
        constants=with_format((THREADS,), layout) if chosen else (),
    )


def _kernel(layout: str) -> Kernel:
    return Kernel(
        name=f"embed_{layout}",
        buffers=(
            Buffer("tokens", "r"),
            Buffer("table", "r"),
            Buffer("sampled", "r"),
            Buffer("out", "w"),
            Buffer("inputs", "r"),  # float32 [inputs, input_stride]; absent if no tokens of images have any
        ),
        scalars=(
            ("format", "i"),
            ("rows", "i"),
            ("columns", "i"),
            ("out_stride", "i"),
            ("scale", "f"),
            ("input_stride", "i"),
        ),
        grid=lambda s: Grid(1, "tokens"),
        cost=_cost,
        extents=_extents,
        reference=_reference,
        cases=partial(_cases, layout),
    )


BY_LAYOUT = {layout: _kernel(layout) for layout in LAYOUTS}
KERNELS = list(BY_LAYOUT.values())

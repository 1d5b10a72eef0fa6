"""A matmul for one token that writes partial sums of squares for the next norm instead of its result.

For GPUs only (matmul.slang, `_sums`). Many workgroups can then share the norm (norm_finish.py): each reads the sums of
squares and the whole row from scratch memory. The matmul copies the residual and the norm's weights there too, while it
waits for its own weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from tandem.kernels import matmul
from tandem.kernels.abi import EPILOGUE_STORE
from tandem.kernels.dispatch import COUNTERS
from tandem.kernels.kernel import SCRATCH_ADDRESS, Array, Buffer, Case, Cost, Counts, Kernel, Scalars
from tandem.kernels.panels import LAYOUTS

ROWS_PER_SUM = 8  # in test cases: the number of lanes of the smallest subgroup


def partials_bytes(dim: float, rows_per_sum: float) -> int:
    """The counters of scratch memory (unchanged), then float32 [dim / rows_per_sum][4] and [3][dim]."""
    return int(4 * (COUNTERS + 4 * (dim // rows_per_sum) + 3 * dim))


def split_partials(partials: Array, dim: int, rows_per_sum: int) -> tuple[Array, Array]:
    """Views of an array of partials_bytes: (sums [dim / rows_per_sum][4], rows [3][dim]).

    The rows are the residual x, the addend a (the matmul's result times the post norm's weight) and the norm's weight.
    Each group of rows_per_sum neighbours has the sums of result², x², x a and a². Without a post norm, a is the result
    itself, the second is the sum of (x + a)², and the others are 0.
    """
    begin, end = COUNTERS, COUNTERS + 4 * dim // rows_per_sum
    return partials[begin:end].reshape(-1, 4), partials[end : end + 3 * dim].reshape(3, dim)


def _cost(s: Scalars, counts: Counts) -> Cost:
    rows = int(s["rows"])
    whole = matmul.BY_LAYOUT[matmul.layout_of(s)].cost(s, counts)
    return Cost(whole.bytes + 4.0 * (2 + 3 - 1) * rows, whole.ops + 10.0 * rows)


def _extents(s: Scalars, counts: Counts) -> dict[str, int]:
    row = 4 * int(s["rows"])
    own = matmul.BY_LAYOUT[matmul.layout_of(s)].extents(s, {**counts, "tokens": 1})
    vectors = {"weight": row, "residual": row, "post_weight": row}
    scratch = {"partials": partials_bytes(s["rows"], s["rows_per_sum"])}
    return {name: nbytes for name, nbytes in own.items() if name != "out"} | vectors | scratch


def _reference(arrays: Mapping[str, Array], s: Scalars, counts: Counts) -> dict[str, Array]:
    dim, n = int(s["rows"]), int(s["rows_per_sum"])
    given = {**arrays, "out": np.zeros((1, dim), np.float32)}
    y = matmul.BY_LAYOUT[matmul.layout_of(s)].reference(given, {**s, "out_stride": dim}, counts)["out"][0]
    partials = arrays["partials"].copy()
    sums, rows = split_partials(partials, dim, n)
    x = arrays["residual"].reshape(-1)[:dim]
    a = y * arrays["post_weight"] if "post_weight" in arrays else y
    rows[:] = x, a, arrays["weight"]
    if "post_weight" in arrays:
        products = np.stack([y * y, x * x, x * a, a * a], axis=1)
    else:
        products = np.stack([0 * y, (x + y) ** 2, 0 * y, 0 * y], axis=1)
    sums[:] = products.astype(np.float64).reshape(-1, n, 4).sum(axis=1)
    return {"partials": partials}


def _cases(layout: str, rng: np.random.Generator) -> Iterator[Case]:
    for dim, columns, post in ((32, 512, True), (512, 512, False), (1056, 512, True), (1056, 768, False)):
        yield make_case(layout, dim, columns, post, rng)


def make_case(layout: str, dim: int, columns: int, post: bool, rng: np.random.Generator) -> Case:
    case = matmul.make_case(layout, 1, dim, columns, EPILOGUE_STORE, 0, rng)
    arrays = {name: array for name, array in case.arrays.items() if name != "out"} | {
        "weight": rng.uniform(-2, 2, dim).astype(np.float32),
        "residual": rng.standard_normal((1, dim)).astype(np.float32),
        "partials": np.zeros(partials_bytes(dim, ROWS_PER_SUM) // 4, np.float32),
    }
    if post:
        arrays["post_weight"] = rng.uniform(0.5, 2, dim).astype(np.float32)
    scalars = {**case.scalars, "rows_per_sum": ROWS_PER_SUM}
    # The matmul's result, whose products are summed, is exact to 2e-4 and of order 1 to 100.
    label = f"{layout} {dim}x{columns}{' post' if post else ''}"
    return Case(label, arrays, scalars, case.counts, atol=2e-3, rtol=5e-4)


def _kernel(layout: str) -> Kernel:
    return Kernel(
        name=f"matmul_norm_partials_{layout}",
        buffers=(
            Buffer("x", "r"),
            Buffer("weights", "r"),
            Buffer("bias", "r"),
            Buffer("weight", "r"),  # float32 [rows]: the weight of the norm
            Buffer("residual", "r"),  # float32 [1, rows]
            Buffer("post_weight", "r"),  # float32 [rows]; may be absent
            Buffer("partials", "w", SCRATCH_ADDRESS),  # float32, see split_partials
        ),
        scalars=matmul.BY_LAYOUT[layout].scalars,
        constants=("rows_per_sum",),
        grid=matmul.BY_LAYOUT[layout].grid,
        cost=_cost,
        extents=_extents,
        reference=_reference,
        cases=partial(_cases, layout),
        gpu_only=True,
    )


BY_LAYOUT = {layout: _kernel(layout) for layout in LAYOUTS if LAYOUTS[layout].quantised}
KERNELS = list(BY_LAYOUT.values())

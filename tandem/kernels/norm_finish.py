"""The second half of a fused matmul + norm: finishes the norm from the partial sums in scratch memory.

For GPUs only (norm.slang). matmul_norm_partials.py is the first half; together they replace a matmul and `norm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels import norm
from tandem.kernels.kernel import SCRATCH_ADDRESS, Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.matmul_norm_partials import ROWS_PER_SUM, partials_bytes, split_partials
from tandem.kernels.q8_tiles import q8_store


def cost(scalars: Scalars, counts: Counts) -> Cost:
    dim = scalars["dim"]
    read = partials_bytes(dim, scalars["rows_per_sum"]) - partials_bytes(0, 1)
    return Cost(read + dim * (4 + (1.5 if scalars["out_q8"] else 4)), ops=7 * dim)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    of_norm = norm.extents(scalars, {**counts, "tokens": 1})
    own = {name: of_norm[name] for name in ("x", "post_weight", "out")}
    return {**own, "partials": partials_bytes(scalars["dim"], scalars["rows_per_sum"])}


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    dim, eps = int(scalars["dim"]), scalars["eps"]
    sums, rows = split_partials(arrays["partials"], dim, int(scalars["rows_per_sum"]))
    added_squares, squares, product, weighted_squares = sums.astype(np.float64).sum(axis=0)
    residual, addend, weight = rows.astype(np.float64)
    # The squares of x + r a, where r is the inverse RMS of the addend, are x x + 2 r x a + r r a a.
    r = 1 / np.sqrt(added_squares / dim + eps) if "post_weight" in arrays else 1.0
    inverse = 1 / np.sqrt((squares + 2 * r * product + r * r * weighted_squares) / dim + eps)
    x, out = arrays["x"].copy(), arrays["out"].copy()
    row = residual + r * addend
    x[0, :dim] = row
    if scalars["out_q8"]:
        q8_store(out, (row * inverse * weight)[None])
    else:
        out[0, :dim] = row * inverse * weight
    return {"x": x, "out": out}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for dim, options in ((32, "post q8"), (512, "q8"), (1056, "post"), (1056, ""), (5376, "post q8")):
        yield make_case(rng, dim, options)


def make_case(rng: np.random.Generator, dim: int, options: str) -> Case:
    """`options`: the options of norm.make_case."""
    case = norm.make_case(rng, f"1x{dim}", 1, dim, f"add {options}")
    x, y = case.arrays["x"][0].astype(np.float64), case.arrays["add"][0].astype(np.float64)
    partials = np.zeros(partials_bytes(dim, ROWS_PER_SUM) // 4, np.float32)
    sums, rows = split_partials(partials, dim, ROWS_PER_SUM)
    post = "post_weight" in case.arrays
    a = y * case.arrays["post_weight"] if post else y
    rows[:] = x, a, case.arrays["weight"]
    none = np.zeros_like(y)
    products = np.stack([y * y, x * x, x * a, a * a] if post else [none, (x + y) ** 2, none, none], axis=1)
    sums[:] = products.reshape(-1, ROWS_PER_SUM, 4).sum(axis=1)
    arrays = {name: case.arrays[name] for name in ("x", "post_weight", "out") if name in case.arrays}
    scalars = {**case.scalars, "rows_per_sum": ROWS_PER_SUM}
    return Case(case.label, {**arrays, "partials": partials}, scalars, case.counts, atol=3e-6, rtol=3e-6)


KERNEL = Kernel(
    name="norm_finish",
    buffers=(
        Buffer("x", "w", 0),  # float32 [1, dim]: the residual stream
        Buffer("post_weight", "r", 2),  # read only for its presence: the partials include it
        Buffer("out", "w", 4),  # float32 [1, dim] or q8 [1, dim]
        Buffer("partials", "r", SCRATCH_ADDRESS),  # the output of matmul_norm_partials
    ),
    scalars=norm.KERNEL.scalars,
    constants=("rows_per_sum",),
    grid=lambda scalars: Grid(1),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
    gpu_only=True,
)

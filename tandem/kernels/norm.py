"""Residual addition and RMS normalisation: x += add (or rmsnorm(add) * post_weight), then out = rmsnorm(x) * weight.

With `use_rows` it processes only the listed rows of x and add (each at most once) and packs the results.
An absent buffer (`add`, `post_weight`, `weight` with `out`, `rows`) has address 0 and stride 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.q8_tiles import q8_bytes, q8_pack, q8_store
from tandem.kernels.rows import padded, rows_bytes


def count_of(scalars: Scalars) -> str:
    return "rows" if scalars["use_rows"] else "tokens"


def cost(scalars: Scalars, counts: Counts) -> Cost:
    elements = counts[count_of(scalars)] * scalars["dim"]
    residual = 8.0 if scalars["add_stride"] else 0.0  # reads add, writes x
    out = 1.5 if scalars["out_q8"] else 4.0 if scalars["out_stride"] else 0.0
    return Cost(
        bytes=elements * (4 + residual + out) + 4 * scalars["dim"], ops=elements * (7 if residual else 4)
    )


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    dim, n, tokens = int(scalars["dim"]), counts[count_of(scalars)], counts["tokens"]
    out = q8_bytes(n, dim) if scalars["out_q8"] else rows_bytes(n, dim, scalars["out_stride"])
    return {
        "x": rows_bytes(tokens, dim, scalars["x_stride"]),
        "add": rows_bytes(tokens, dim, scalars["add_stride"]),
        "post_weight": 4 * dim,
        "weight": 4 * dim,
        "out": out,
        "rows": 4 * n,
    }


def rms_norm(x: Array, eps: float) -> Array:
    """Over the last axis, in float64."""
    exact = x.astype(np.float64)
    scaled: Array = exact / np.sqrt(np.square(exact).mean(axis=-1, keepdims=True) + eps)
    return scaled


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    dim, eps, n = int(scalars["dim"]), scalars["eps"], counts[count_of(scalars)]
    source = arrays["rows"][:n] if scalars["use_rows"] else np.arange(n)
    x = arrays["x"].copy()
    outputs = {"x": x}
    if "add" in arrays:
        add = arrays["add"][source, :dim].astype(np.float64)
        if "post_weight" in arrays:
            add = rms_norm(add, eps) * arrays["post_weight"]
        x[source, :dim] = x[source, :dim] + add
    if "weight" in arrays:
        out = outputs["out"] = arrays["out"].copy()
        normed = rms_norm(x[source, :dim], eps) * arrays["weight"]
        if scalars["out_q8"]:
            q8_store(out, normed)
        else:
            out[:n, :dim] = normed
    return outputs


def make_case(
    rng: np.random.Generator,
    label: str,
    tokens: int,
    dim: int,
    options: str = "",
    size: float = 1.0,
    gap: int = 0,
) -> Case:
    """`options` names what is present: add, post, rows, q8; `only`: the addition without the norm."""
    has = options.split()
    rows = rng.permutation(tokens)[: max(1, tokens // 3)].astype(np.int32)
    n = len(rows) if "rows" in has else tokens

    def values(*shape: int) -> Array:
        return (rng.standard_normal(shape) * size).astype(np.float32)

    arrays: dict[str, Any] = {"x": padded(values(tokens, dim), dim + gap)}
    if "add" in has:
        arrays["add"] = padded(values(tokens, dim), dim + 2 * gap)
    if "post" in has:
        arrays["post_weight"] = rng.uniform(0.5, 2, dim).astype(np.float32)
    if "only" not in has:
        arrays["weight"] = rng.uniform(-2, 2, dim).astype(np.float32)
        arrays["out"] = (
            q8_pack(rng.standard_normal((n, dim))) if "q8" in has else padded(values(n, dim), dim + gap)
        )
    if "rows" in has:
        arrays["rows"] = rows
    scalars = {
        "dim": dim,
        "x_stride": dim + gap,
        "add_stride": dim + 2 * gap if "add" in has else 0,
        "out_stride": 0 if "only" in has or "q8" in has else dim + gap,
        "eps": 1e-6,
        "out_q8": int("q8" in has),
        "use_rows": int("rows" in has),
    }
    counts = {"tokens": tokens, "rows": len(rows), "work": 0}
    # Sums in float32 over 16 lanes. A normalised addend is of order 1, so it cancels against x to 3e-6.
    return Case(
        f"{label} {options}".strip(), arrays, scalars, counts, atol=3e-6 if "post" in has else 0, rtol=3e-6
    )


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for tokens, dim, gap in ((1, 1, 0), (2, 17, 3), (5, 48, 0), (16, 100, 4), (17, 576, 0), (33, 31, 1)):
        for options in ("", "add", "add post", "add only", "add post only", "add post rows", "rows"):
            yield make_case(rng, f"{tokens}x{dim}", tokens, dim, options, gap=gap)
    for tokens, dim, gap in ((1, 32, 0), (5, 96, 5), (16, 64, 0), (33, 160, 16)):
        for options in ("q8", "add post q8", "rows q8"):
            yield make_case(rng, f"{tokens}x{dim}", tokens, dim, options, gap=gap)
    for size in (0, 1e-20, 1e4):
        for options in ("", "add", "add post", "q8"):
            yield make_case(rng, f"2x64 of size {size:g}", 2, 64, options, size)
    yield make_case(rng, "1x2048", 1, 2048, "add q8")


KERNEL = Kernel(
    name="norm",
    buffers=(
        Buffer("x", "rw"),  # float32 [T, x_stride]
        Buffer("add", "r"),  # float32 [T, add_stride]
        Buffer("post_weight", "r"),  # float32 [dim]
        Buffer("weight", "r"),  # float32 [dim]
        Buffer("out", "w"),  # float32 [T or R, out_stride] or q8 [T or R, dim]
        Buffer("rows", "r"),  # int32 [R]
    ),
    scalars=(
        ("dim", "i"),
        ("x_stride", "i"),
        ("add_stride", "i"),
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

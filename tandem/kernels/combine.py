"""Adds what a token's experts computed, each times its weight, in the order of `chosen`; plus a shared expert's output,
times the sigmoid of its `gate` if it has one. An absent buffer (`shared`, `gate`) has address 0 and stride 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.experts import chosen_bytes, group, groups_bytes, max_slots, random_choice, slots_of
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.rows import padded, rows_bytes


def cost(s: Scalars, counts: Counts) -> Cost:
    elements = counts["tokens"] * s["dim"]
    return Cost(bytes=4 * elements * (s["used"] + 1 + bool(s["shared_stride"])), ops=2 * elements * s["used"])


def extents(s: Scalars, counts: Counts) -> dict[str, int]:
    n, dim = counts["tokens"], int(s["dim"])
    return {
        "x": rows_bytes(max_slots(n, s), dim, s["x_stride"]),
        "weights": chosen_bytes(n, s),
        "groups": groups_bytes(n, s),
        "shared": rows_bytes(n, dim, s["shared_stride"]),
        "gate": rows_bytes(n, 1, s["gate_stride"]),
        "out": rows_bytes(n, dim, s["out_stride"]),
    }


def reference(arrays: Mapping[str, Array], s: Scalars, counts: Counts) -> dict[str, Array]:
    n, dim = counts["tokens"], int(s["dim"])
    slots, weights = slots_of(arrays["groups"], s, n), arrays["weights"][:n].astype(np.float64)
    total = np.einsum("tj,tjd->td", weights, arrays["x"][slots, :dim].astype(np.float64))
    if "shared" in arrays:
        share = 1 / (1 + np.exp(-arrays["gate"][:n, :1].astype(np.float64))) if "gate" in arrays else 1.0
        total += share * arrays["shared"][:n, :dim]
    out = arrays["out"].copy()
    out[:n, :dim] = total
    return {"out": out}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for tokens, dim, experts, used in ((1, 48, 8, 2), (5, 100, 16, 4), (33, 17, 4, 2), (40, 160, 60, 6)):
        for extra in ("", "shared", "shared gate"):
            scalars: dict[str, float] = {
                "dim": dim, "experts": experts, "used": used, "x_stride": dim + 1,
                "shared_stride": dim + 2 if "shared" in extra else 0, "gate_stride": 16 if "gate" in extra else 0,
                "out_stride": dim + 3,
            }  # fmt: skip

            def values(rows: int, columns: int, stride: int) -> Array:
                return padded(rng.standard_normal((rows, columns)).astype(np.float32), stride)

            arrays = {
                "x": values(max_slots(tokens, scalars), dim, dim + 1),
                "weights": rng.uniform(0.1, 1.0, (tokens, used)).astype(np.float32),
                "groups": group(random_choice(tokens, used, experts, rng), experts),
                "out": padded(np.zeros((tokens, dim), np.float32), dim + 3),
            }
            if "shared" in extra:
                arrays["shared"] = values(tokens, dim, dim + 2)
            if "gate" in extra:
                arrays["gate"] = values(tokens, 1, 16)
            counts = {"tokens": tokens, "rows": 0, "work": 0}
            label = f"{tokens}x{dim}, {used} of {experts} experts {extra}".strip()
            yield Case(label, arrays, scalars, counts, atol=3e-6, rtol=3e-6)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One thread adds up one column; y is the token."""
    return Dispatch(-(-int(scalars["dim"]) // 64), counts["tokens"])


KERNEL = Kernel(
    name="combine",
    buffers=(
        Buffer("x", "r"),  # float32 [slots, x_stride]
        Buffer("weights", "r"),  # float32 [T, used]
        Buffer("groups", "r"),
        Buffer("shared", "r"),  # float32 [T, shared_stride]
        Buffer("gate", "r"),  # float32 [T, gate_stride], the first column
        Buffer("out", "w"),  # float32 [T, out_stride]
    ),
    scalars=(
        ("dim", "i"),
        ("experts", "i"),
        ("used", "i"),
        ("x_stride", "i"),
        ("shared_stride", "i"),
        ("gate_stride", "i"),
        ("out_stride", "i"),
    ),
    grid=lambda scalars: Grid(1, "tokens"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)

"""Copies each token's activations to its slots, so that an expert's tokens are whole tiles (experts.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.abi import Q8_COLUMNS, Q8_TILE
from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.experts import group, groups_bytes, max_slots, random_choice, slots_of
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.q8_tiles import q8_bytes, q8_pack, q8_zeros
from tandem.kernels.rows import padded, rows_bytes


def cost(s: Scalars, counts: Counts) -> Cost:
    return Cost(bytes=counts["tokens"] * s["dim"] * (1 + s["used"]) * (1.5 if s["q8"] else 4), ops=0)


def extents(s: Scalars, counts: Counts) -> dict[str, int]:
    n, dim = counts["tokens"], int(s["dim"])
    slots = max_slots(n, s)
    return {
        "x": q8_bytes(n, dim) if s["q8"] else rows_bytes(n, dim, s["x_stride"]),
        "groups": groups_bytes(n, s),
        "out": q8_bytes(slots, dim) if s["q8"] else rows_bytes(slots, dim, s["out_stride"]),
    }


def reference(arrays: Mapping[str, Array], s: Scalars, counts: Counts) -> dict[str, Array]:
    out, n, dim = arrays["out"].copy(), counts["tokens"], int(s["dim"])
    for token, slots in enumerate(slots_of(arrays["groups"], s, n)):
        for slot in slots:
            if s["q8"]:
                for field in out.dtype.names or ():
                    row = arrays["x"][field][token // Q8_TILE, :, token % Q8_TILE]
                    out[field][slot // Q8_TILE, :, slot % Q8_TILE] = row
            else:
                out[slot, :dim] = arrays["x"][token, :dim]
    return {"out": out}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for tokens, dim, experts, used in ((1, 64, 8, 2), (5, 96, 16, 4), (33, 32, 4, 2), (40, 160, 60, 6)):
        for q8 in (0, 1):
            scalars: dict[str, float] = {
                "dim": dim, "experts": experts, "used": used, "x_stride": dim + 3, "out_stride": dim + 5, "q8": q8
            }  # fmt: skip
            x, slots = rng.standard_normal((tokens, dim)).astype(np.float32), max_slots(tokens, scalars)
            arrays = {
                "x": q8_pack(x) if q8 else padded(x, dim + 3),
                "groups": group(random_choice(tokens, used, experts, rng), experts),
                "out": q8_zeros(slots, dim) if q8 else np.zeros((slots, dim + 5), np.float32),
            }
            label = f"{tokens}x{dim}, {used} of {experts} experts, q8={q8}"
            yield Case(label, arrays, scalars, {"tokens": tokens, "rows": 0, "work": 0})


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One thread copies a word of a token to all of its slots; y is the token."""
    columns = int(scalars["dim"])
    columns = columns // Q8_COLUMNS * (Q8_COLUMNS // 4 + 4) if scalars["q8"] else columns
    return Dispatch(-(-columns // 64), counts["tokens"])


KERNEL = Kernel(
    name="gather_tokens",
    buffers=(
        Buffer("x", "r"),  # float32 [T, x_stride] or q8 [T, dim]
        Buffer("groups", "r"),
        Buffer("out", "w"),  # float32 [slots, out_stride] or q8 [slots, dim]
    ),
    scalars=(
        ("dim", "i"),
        ("experts", "i"),
        ("used", "i"),
        ("x_stride", "i"),
        ("out_stride", "i"),
        ("q8", "i"),
    ),
    grid=lambda scalars: Grid(1, "tokens"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)

"""Applies an activation function to what experts computed (experts.py), for experts without a gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.abi import Q8_TILE
from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.experts import group, groups_bytes, max_slots, random_choice, slots_of
from tandem.kernels.glu import ACTIVATIONS, activate
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.q8_tiles import q8_bytes, q8_pack, q8_zeros
from tandem.kernels.rows import rows_bytes


def cost(s: Scalars, counts: Counts) -> Cost:
    elements = counts["tokens"] * s["used"] * s["dim"]
    return Cost(bytes=elements * (4 + (1.5 if s["out_q8"] else 4)), ops=2 * elements)


def extents(s: Scalars, counts: Counts) -> dict[str, int]:
    n, dim = counts["tokens"], int(s["dim"])
    slots = max_slots(n, s)
    return {
        "x": rows_bytes(slots, dim, s["x_stride"]),
        "groups": groups_bytes(n, s),
        "out": q8_bytes(slots, dim) if s["out_q8"] else rows_bytes(slots, dim, s["out_stride"]),
    }


def reference(arrays: Mapping[str, Array], s: Scalars, counts: Counts) -> dict[str, Array]:
    out, dim = arrays["out"].copy(), int(s["dim"])
    slots = slots_of(arrays["groups"], s, counts["tokens"]).ravel()
    result = activate(arrays["x"][slots, :dim], int(s["activation"]))
    if s["out_q8"]:
        packed = q8_pack(result)
        for field in out.dtype.names or ():
            for row, slot in enumerate(slots):
                values = packed[field][row // Q8_TILE, :, row % Q8_TILE]
                out[field][slot // Q8_TILE, :, slot % Q8_TILE] = values
    else:
        out[slots, :dim] = result
    return {"out": out}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for tokens, dim, experts, used, q8 in (
        (1, 64, 8, 2, 0), (5, 17, 16, 4, 0), (33, 32, 4, 2, 1), (40, 160, 60, 6, 1)
    ):  # fmt: skip
        scalars: dict[str, float] = {
            "dim": dim, "experts": experts, "used": used, "x_stride": dim + 3, "out_stride": 0 if q8 else dim + 5,
            "activation": ACTIVATIONS["squared_relu"], "out_q8": q8,
        }  # fmt: skip
        slots = max_slots(tokens, scalars)
        arrays = {
            "x": rng.standard_normal((slots, dim + 3)).astype(np.float32),
            "groups": group(random_choice(tokens, used, experts, rng), experts),
            "out": q8_zeros(slots, dim) if q8 else np.zeros((slots, dim + 5), np.float32),
        }
        label = f"{tokens}x{dim}, {used} of {experts} experts{' q8' * q8}"
        counts = {"tokens": tokens, "rows": 0, "work": 0}
        yield Case(label, arrays, scalars, counts, atol=2e-8, rtol=2e-6)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One thread computes 4 columns of the slots of a token."""
    return Dispatch(-(-int(scalars["dim"]) // (4 * 64)), counts["tokens"])


KERNEL = Kernel(
    name="activate_slots",
    buffers=(
        Buffer("x", "r"),  # float32 [slots, x_stride]
        Buffer("groups", "r"),
        Buffer("out", "w"),  # float32 [slots, out_stride] or q8 [slots, dim]
    ),
    scalars=(
        ("dim", "i"),
        ("experts", "i"),
        ("used", "i"),
        ("x_stride", "i"),
        ("out_stride", "i"),
        ("activation", "i"),
        ("out_q8", "i"),
    ),
    grid=lambda scalars: Grid(1, "tokens"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)

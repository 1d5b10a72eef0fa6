"""RMS norm of each head times a weight, times SiLU of a gate: the end of a layer with a recurrent state.

out = x / sqrt(mean of x^2 over the head + eps) * weight * silu(gate), as float32 rows or int8 tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.abi import ACTIVATION_SILU
from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.glu import activate
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.q8_tiles import q8_bytes, q8_pack, q8_store
from tandem.kernels.rows import padded, rows_bytes

GPU_HEADS = 8  # of a workgroup


def width(scalars: Scalars) -> int:
    return int(scalars["heads"]) * int(scalars["head_dim"])


def cost(scalars: Scalars, counts: Counts) -> Cost:
    elements = counts["tokens"] * width(scalars)
    return Cost(bytes=elements * (8 + (1.5 if scalars["out_q8"] else 4)), ops=elements * 20)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    dim, n = width(scalars), counts["tokens"]
    return {
        "x": rows_bytes(n, dim, scalars["x_stride"]),
        "gate": rows_bytes(n, dim, scalars["gate_stride"]),
        "weight": 4 * int(scalars["head_dim"]),
        "out": q8_bytes(n, dim) if scalars["out_q8"] else rows_bytes(n, dim, scalars["out_stride"]),
    }


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    dim, n = width(scalars), counts["tokens"]
    x = arrays["x"][:n, :dim].astype(np.float64).reshape(n, -1, int(scalars["head_dim"]))
    scaled = x / np.sqrt(np.square(x).mean(axis=2, keepdims=True) + scalars["eps"]) * arrays["weight"]
    result = scaled.reshape(n, dim) * activate(arrays["gate"][:n, :dim], ACTIVATION_SILU)
    out = arrays["out"].copy()
    if scalars["out_q8"]:
        q8_store(out, result)
    else:
        out[:n, :dim] = result
    return {"out": out}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    shapes = ((1, 1, 1, 0, 0), (2, 3, 17, 3, 0), (5, 2, 48, 0, 0), (33, 2, 64, 4, 0), (1, 4, 128, 0, 1))
    for n, heads, head_dim, gap, out_q8 in (*shapes, (17, 3, 32, 5, 1), (33, 2, 96, 0, 1)):
        dim = heads * head_dim
        x, gate, old = rng.standard_normal((3, n, dim))
        arrays = {
            "x": padded(x * 3, dim + gap),
            "gate": padded(gate * 4, dim + 2 * gap),
            "weight": rng.uniform(-2, 2, head_dim).astype(np.float32),
            "out": q8_pack(old) if out_q8 else padded(old, dim + gap),
        }
        scalars = {
            "heads": heads,
            "head_dim": head_dim,
            "x_stride": dim + gap,
            "gate_stride": dim + 2 * gap,
            "out_stride": 0 if out_q8 else dim + gap,
            "eps": 1e-5,
            "out_q8": out_q8,
        }
        counts = {"tokens": n, "rows": 1, "work": 0}
        yield Case(f"{n}x{heads}x{head_dim}{' q8' * out_q8}", arrays, scalars, counts, atol=2e-8, rtol=4e-6)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One workgroup for GPU_HEADS heads of a token."""
    workgroups = -(-int(scalars["heads"]) // GPU_HEADS)
    return Dispatch(workgroups, counts["tokens"], constants=(int(scalars["out_q8"]),))


KERNEL = Kernel(
    name="gated_norm",
    buffers=(
        Buffer("x", "r"),  # float32 [T, x_stride]
        Buffer("gate", "r"),  # float32 [T, gate_stride]
        Buffer("weight", "r"),  # float32 [head_dim]
        Buffer("out", "w"),  # float32 [T, out_stride] or q8 [T, heads * head_dim]
    ),
    scalars=(
        ("heads", "i"),
        ("head_dim", "i"),
        ("x_stride", "i"),
        ("gate_stride", "i"),
        ("out_stride", "i"),
        ("eps", "f"),
        ("out_q8", "i"),
    ),
    grid=lambda scalars: Grid(1, "tokens"),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)

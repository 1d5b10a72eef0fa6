"""GLU, the gate of a feed-forward layer or of attention: out = activation(gate) * up, as float32 rows or int8 tiles.

Without `up` (address 0), out = activation(gate). With `limits`, it is clamped to these two numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from tandem.kernels.abi import (
    ACTIVATION_GELU,
    ACTIVATION_IDENTITY,
    ACTIVATION_SIGMOID,
    ACTIVATION_SILU,
    ACTIVATION_SQUARED_RELU,
)
from tandem.kernels.dispatch import Dispatch, Gpu
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.q8_tiles import q8_bytes, q8_pack, q8_store
from tandem.kernels.rows import padded, rows_bytes

ACTIVATIONS = {
    "silu": ACTIVATION_SILU,
    "gelu": ACTIVATION_GELU,
    "gelu_erf": ACTIVATION_GELU,  # and the scalar `erf`
    "sigmoid": ACTIVATION_SIGMOID,
    "identity": ACTIVATION_IDENTITY,
    "squared_relu": ACTIVATION_SQUARED_RELU,
}


def activate(x: Array, activation: int, erf: bool = False) -> Array:
    exact: Array = x.astype(np.float64)
    if activation == ACTIVATION_IDENTITY:
        return exact
    if activation == ACTIVATION_SQUARED_RELU:
        return np.square(np.maximum(exact, 0))
    if erf:
        gelu: Array = 0.5 * exact * (1 + np.vectorize(math.erf, otypes=[np.float64])(exact / math.sqrt(2)))
        return gelu
    if activation == ACTIVATION_GELU:
        gelu = 0.5 * exact * (1 + np.tanh(np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)))
        return gelu
    with np.errstate(over="ignore"):
        sigmoid: Array = 1 / (1 + np.exp(-exact))
    return sigmoid if activation == ACTIVATION_SIGMOID else exact * sigmoid


def count_of(scalars: Scalars) -> str:
    return "rows" if scalars["count_rows"] else "tokens"


def cost(scalars: Scalars, counts: Counts) -> Cost:
    elements = counts[count_of(scalars)] * scalars["dim"]
    return Cost(bytes=elements * (8 + (1.5 if scalars["out_q8"] else 4)), ops=elements * 16)


def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
    dim, n = int(scalars["dim"]), counts[count_of(scalars)]
    return {
        "gate": rows_bytes(n, dim, scalars["gate_stride"]),
        "up": rows_bytes(n, dim, scalars["up_stride"]),
        "limits": 8,
        "out": q8_bytes(n, dim) if scalars["out_q8"] else rows_bytes(n, dim, scalars["out_stride"]),
    }


def reference(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    dim, n = int(scalars["dim"]), counts[count_of(scalars)]
    out = arrays["out"].copy()
    result = activate(arrays["gate"][:n, :dim], int(scalars["activation"]), bool(scalars["erf"]))
    if "up" in arrays:
        result = result * arrays["up"][:n, :dim]
    if "limits" in arrays:
        result = np.clip(result, *arrays["limits"])
    if scalars["out_q8"]:
        q8_store(out, result)
    else:
        out[:n, :dim] = result
    return {"out": out}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(
        label: str,
        gate: Array,
        name: str,
        out_q8: int,
        gap: int = 0,
        gated: bool = True,
        rows: int = 0,
        limits: tuple[float, float] | None = None,
    ) -> Case:
        n, dim = gate.shape
        up, old = rng.uniform(-2, 2, (2, n, dim))
        arrays = {
            "gate": padded(gate, dim + gap),
            **({"up": padded(up, dim + 2 * gap)} if gated else {}),
            **({"limits": np.array(limits, np.float32)} if limits else {}),
            "out": q8_pack(old) if out_q8 else padded(old, dim + gap),
        }
        scalars = {
            "dim": dim,
            "gate_stride": dim + gap,
            "up_stride": dim + 2 * gap if gated else 0,
            "out_stride": 0 if out_q8 else dim + gap,
            "activation": ACTIVATIONS[name],
            "out_q8": out_q8,
            "count_rows": int(rows > 0),
            "erf": int(name == "gelu_erf"),
        }
        full_label = f"{label} {name}{' q8' * out_q8}"
        counts = {"tokens": n - rows if rows else n, "rows": n if rows else 1, "work": 0}
        # 2e-8: the left tail of GELU; the approximation of erf is off by 1.5e-7
        atol = 1.5e-6 if name == "gelu_erf" else 2e-8
        return Case(full_label, arrays, scalars, counts, atol=atol, rtol=2e-6)

    for name in ACTIVATIONS:
        for n, dim, gap in ((1, 1, 0), (2, 17, 3), (5, 48, 0), (16, 100, 4), (17, 256, 0), (33, 31, 1)):
            yield case(f"{n}x{dim}", rng.standard_normal((n, dim)) * 4, name, 0, gap)
        for n, dim, gap in ((1, 32, 0), (5, 96, 5), (17, 64, 0), (33, 160, 16)):
            yield case(f"{n}x{dim}", rng.standard_normal((n, dim)) * 4, name, 1, gap)
        for size in (0, 1e-20, 100, 1e4, 1e30 if name != "squared_relu" else 1e15):
            yield case(f"2x64 to size {size:g}", rng.uniform(-size, size, (2, 64)), name, 0)
        yield case("every exponent", np.linspace(-95, 95, 1999)[None], name, 0)
        yield case("1x2048", rng.standard_normal((1, 2048)), name, 1)
        for n, dim, q8 in ((1, 17, 0), (33, 64, 0), (17, 96, 1)):
            label = f"{n}x{dim} without up"
            yield case(label, rng.standard_normal((n, dim)) * 4, name, q8, gated=False)
        yield case("17 rows", rng.standard_normal((17, 48)), name, 0, 3, gated=False, rows=9)
    for n, dim, gap, gated in ((1, 1, 0, False), (17, 100, 3, False), (5, 48, 0, True)):
        x = rng.standard_normal((n, dim)) * 4
        yield case(f"{n}x{dim} in limits", x, "identity", 0, gap, gated=gated, limits=(-1.25, 2.5))


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One thread computes 4 columns of one token."""
    groups = -(-int(scalars["dim"]) // (4 * 64))
    return Dispatch(groups, counts[count_of(scalars)])


KERNEL = Kernel(
    name="glu",
    buffers=(
        Buffer("gate", "r"),  # float32 [T, gate_stride]
        Buffer("up", "r"),  # float32 [T, up_stride]
        Buffer("limits", "r"),  # float32 [2]: the least and the greatest result
        Buffer("out", "w"),  # float32 [T, out_stride] or q8 [T, dim]
    ),
    scalars=(
        ("dim", "i"),
        ("gate_stride", "i"),
        ("up_stride", "i"),
        ("out_stride", "i"),
        ("activation", "i"),
        ("out_q8", "i"),
        ("count_rows", "i"),  # 1: a row for each row of logits; 0: for each token
        ("erf", "i"),  # 1: GELU by its definition, not in its tanh form
    ),
    grid=lambda scalars: Grid(1, count_of(scalars)),
    cost=cost,
    extents=extents,
    reference=reference,
    cases=cases,
)

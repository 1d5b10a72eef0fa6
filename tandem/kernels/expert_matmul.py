"""Matmul of a mixture of experts: each slot times the matrix of its expert (+ bias), with matmul.py's epilogues.

The experts' matrices are stacked to one tall matrix in panels. Its code is in matmul.c, matmul_rows.slang and
matmul_float.slang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from tandem.kernels.abi import (
    EPILOGUE_CLAMPED_GLU,
    EPILOGUE_GELU_GLU,
    EPILOGUE_SILU_GLU,
    EPILOGUE_STORE,
    PANEL_ROWS,
    Q8_TILE,
)
from tandem.kernels.dispatch import Dispatch, Gpu, shader_layout, with_format
from tandem.kernels.experts import (
    expected_experts,
    group,
    groups_bytes,
    in_use,
    max_slots,
    most_experts,
    random_choice,
)
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.matmul import gated, layout_of, panels, random_panels, unpack_panels
from tandem.kernels.matmul_dispatch import PANELS_PER_GROUP
from tandem.kernels.panels import LAYOUT_NAMES, LAYOUTS
from tandem.kernels.q8_tiles import q8_bytes, q8_pack, q8_store, q8_unpack, q8_zeros
from tandem.kernels.rows import rows_bytes

FLOAT_TOKENS = 4  # that matmul_float.slang computes together


def items(s: Scalars) -> int:
    """Work items of one expert."""
    return -(-panels(int(s["rows"])) // int(s["panels_per_item"]))


def _grid(s: Scalars) -> Grid:
    return Grid(items(s) * int(s["used"]), "tokens", most=items(s) * int(s["experts"]))


def _extents(s: Scalars, counts: Counts) -> dict[str, int]:
    n, rows, columns, experts = counts["tokens"], int(s["rows"]), int(s["columns"]), int(s["experts"])
    slots, layout = max_slots(n, s), LAYOUTS[layout_of(s)]
    width = rows // (2 if s["epilogue"] else 1)
    return {
        "x": q8_bytes(slots, columns) if layout.quantised else rows_bytes(slots, columns, s["x_stride"]),
        "weights": layout.matrix_bytes(experts * rows, columns),
        "bias": 4 * experts * rows,
        "groups": groups_bytes(n, s),
        "out": q8_bytes(slots, width) if s["out_q8"] else rows_bytes(slots, width, s["out_stride"]),
    }


def _cost(s: Scalars, counts: Counts) -> Cost:
    n, rows, columns = counts["tokens"], int(s["rows"]), int(s["columns"])
    values = n * s["used"] * (columns * 1.5 + 4 * rows)
    return Cost(bytes=expected_bytes(s, n) + values, ops=2.0 * n * s["used"] * rows * columns)


def expected_bytes(s: Scalars, tokens: int) -> float:
    """Bytes of weights that tokens read if each chooses its experts at random."""
    matrix = LAYOUTS[layout_of(s)].matrix_bytes(int(s["rows"]), int(s["columns"]))
    return matrix * expected_experts(tokens, s)


def _reference(arrays: Mapping[str, Array], s: Scalars, counts: Counts) -> dict[str, Array]:
    rows, columns, experts = int(s["rows"]), int(s["columns"]), int(s["experts"])
    layout, slots = layout_of(s), max_slots(counts["tokens"], s)
    weights = unpack_panels(layout, arrays["weights"], experts * rows, columns).astype(np.float64)
    quantised = LAYOUTS[layout].quantised
    x = q8_unpack(arrays["x"], slots) if quantised else arrays["x"][:slots, :columns]
    out = arrays["out"].copy()
    for expert, first, tokens in in_use(arrays["groups"]):
        y = x[first : first + tokens].astype(np.float64) @ weights[expert * rows : (expert + 1) * rows].T
        bias = arrays.get("bias")
        if s["epilogue"]:
            half = experts * rows // 2
            gate, up = (
                part.reshape(tokens, -1) for part in np.split(y.reshape(tokens, -1, 2, 32), 2, axis=2)
            )
            if bias is not None:
                own = slice(expert * rows // 2, (expert + 1) * rows // 2)
                gate, up = gate + bias[own], up + bias[half : 2 * half][own]
            y = gated(gate, up, int(s["epilogue"]))
        elif bias is not None:
            y = y + bias[expert * rows : (expert + 1) * rows]
        if s["out_q8"]:
            q8_store(out, y.astype(np.float32), first)
        else:
            out[first : first + tokens, : y.shape[1]] = y
    return {"out": out}


def _cases(layout: str, rng: np.random.Generator) -> Iterator[Case]:
    for tokens, rows, columns, experts, used, epilogue, out_q8, bias in (
        (1, 16, 256, 8, 2, EPILOGUE_STORE, 0, False),
        (5, 48, 512, 4, 2, EPILOGUE_STORE, 0, True),
        (40, 32, 256, 3, 2, EPILOGUE_STORE, 0, False),
        (100, 32, 256, 3, 2, EPILOGUE_STORE, 0, False),
        (7, 128, 256, 6, 3, EPILOGUE_SILU_GLU, 0, False),
        (19, 64, 256, 4, 2, EPILOGUE_GELU_GLU, 1, False),
        (3, 64, 256, 5, 4, EPILOGUE_CLAMPED_GLU, 1, True),
    ):
        yield make_case(layout, tokens, rows, columns, experts, used, epilogue, out_q8, bias, rng)


def make_case(
    layout: str,
    tokens: int,
    rows: int,
    columns: int,
    experts: int,
    used: int,
    epilogue: int,
    out_q8: int,
    bias: bool,
    rng: np.random.Generator,
) -> Case:
    width = rows // (2 if epilogue else 1)
    scalars: dict[str, float] = {
        "format": LAYOUT_NAMES.index(layout), "rows": rows, "columns": columns, "x_stride": columns,
        "out_stride": width + 3, "panels_per_item": 4 if epilogue else 2, "experts": experts, "used": used,
        "epilogue": epilogue, "out_q8": out_q8,
    }  # fmt: skip
    slots = max_slots(tokens, scalars)
    x = rng.standard_normal((slots, columns)).astype(np.float32)
    arrays: dict[str, Array] = {
        "x": q8_pack(x) if LAYOUTS[layout].quantised else x,
        "weights": random_panels(layout, experts * rows, columns, rng),
        "groups": group(random_choice(tokens, used, experts, rng), experts),
        "out": q8_zeros(slots, width) if out_q8 else np.zeros((slots, width + 3), np.float32),
    }
    if bias:
        arrays["bias"] = rng.standard_normal(experts * rows).astype(np.float32)
    label = f"{layout} T={tokens} {experts}x{rows}x{columns} used={used} epilogue={epilogue} q8={out_q8}"
    return Case(label, arrays, scalars, {"tokens": tokens, "rows": 0, "work": 0}, atol=2e-4, rtol=1e-4)


def dispatch(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """y: the experts in use at most. A workgroup computes 64 rows, or a panel of float weights (GLU: four)."""
    experts, count = most_experts(counts["tokens"], scalars), panels(int(scalars["rows"]))
    layout = layout_of(scalars)
    if not LAYOUTS[layout].quantised:
        threads = min(128, gpu.workgroup_invocations)
        sums = threads // gpu.subgroup_min * PANEL_ROWS * FLOAT_TOKENS
        return Dispatch(count // 4 if scalars["epilogue"] else count, experts, constants=(threads, sums))
    rows = PANEL_ROWS * PANELS_PER_GROUP
    each = counts["tokens"] * scalars["used"] / scalars["experts"]  # slots of an expert, on average
    # Parts of the columns: 4. With 8 and 16 it was slower on an H200, also for one token (docs/LESSONS.md).
    threads = rows * min(4, gpu.workgroup_invocations // rows)
    return Dispatch(
        -(-count // PANELS_PER_GROUP),
        experts,
        shader=f"expert_matmul_{shader_layout(layout)}",
        constants=with_format((threads, Q8_TILE * (1 if each < 24 else 2 if each < 48 else 4)), layout),
    )


def _kernel(layout: str) -> Kernel:
    return Kernel(
        name=f"expert_matmul_{layout}",
        buffers=(
            Buffer("x", "r"),  # float32 [slots, x_stride] or q8 [slots, columns]
            Buffer("weights", "r"),  # panels of [experts * rows, columns]; with GLU as in matmul.py
            Buffer("bias", "r"),  # float32 [experts, rows]; with GLU [2, experts, rows / 2]
            Buffer("out", "w"),  # float32 [slots, out_stride] or q8 [slots, rows, or half of them with GLU]
            Buffer("groups", "r"),
        ),
        scalars=(
            ("format", "i"),
            ("rows", "i"),  # of one expert: whole panels
            ("columns", "i"),
            ("x_stride", "i"),
            ("out_stride", "i"),
            ("panels_per_item", "i"),
            ("experts", "i"),
            ("epilogue", "i"),
            ("out_q8", "i"),
            ("used", "i"),
        ),
        grid=_grid,
        cost=_cost,
        extents=_extents,
        reference=_reference,
        cases=partial(_cases, layout),
    )


BY_LAYOUT = {layout: _kernel(layout) for layout in LAYOUTS}
KERNELS = list(BY_LAYOUT.values())

"""Matmul of a mixture of experts: each slot times the matrix of its expert (+ bias), with matmul.py's epilogues.

The experts' matrices are stacked to one tall matrix in panels. Its code is in matmul.c, matmul_rows.slang,
matmul_coopmat_reg.slang and matmul_float.slang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from tandem.kernels.dispatch import (
    FLOAT_TYPES,
    SCRATCH_WORDS_BYTES,
    Dispatch,
    Gpu,
    padded,
    shader_layout,
    with_format,
)
from tandem.kernels.experts import (
    expected_experts,
    group,
    groups_bytes,
    in_use,
    max_slots,
    most_experts,
    random_choice,
    tokens_of,
)
from tandem.kernels.kernel import Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.matmul import gated, layout_of, panels, random_panels, unpack_panels
from tandem.kernels.matmul_dispatch import PANELS_PER_GROUP, REG_TOKENS, matmul_dots
from tandem.kernels.panels import LAYOUT_NAMES, LAYOUTS
from tandem.kernels.q8_tiles import q8_bytes, q8_pack, q8_store, q8_unpack, q8_zeros
from tandem.kernels.rows import rows_bytes

FLOAT_TOKENS = 4  # that matmul_float.slang computes together


def items(s: Scalars) -> int:
    """Work items of one expert."""
    return -(-panels(int(s["rows"])) // int(s["panels_per_item"]))


def _grid(s: Scalars) -> Grid:
    return Grid(items(s) * int(s["used"]), "tokens", most=items(s) * int(s["experts"]))


def _extents(by_token: bool, s: Scalars, counts: Counts) -> dict[str, int]:
    n, rows, columns, experts = counts["tokens"], int(s["rows"]), int(s["columns"]), int(s["experts"])
    slots, layout = max_slots(n, s), LAYOUTS[layout_of(s)]
    x_rows = n if by_token else slots
    width = rows // (2 if s["epilogue"] else 1)
    return {
        "x": q8_bytes(x_rows, columns) if layout.quantised else rows_bytes(x_rows, columns, s["x_stride"]),
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


def _reference(by_token: bool, arrays: Mapping[str, Array], s: Scalars, counts: Counts) -> dict[str, Array]:
    rows, columns, experts = int(s["rows"]), int(s["columns"]), int(s["experts"])
    layout, x_rows = layout_of(s), counts["tokens"] if by_token else max_slots(counts["tokens"], s)
    weights = unpack_panels(layout, arrays["weights"], experts * rows, columns).astype(np.float64)
    quantised = LAYOUTS[layout].quantised
    x = q8_unpack(arrays["x"], x_rows) if quantised else arrays["x"][:x_rows, :columns]
    if by_token:
        x = x[tokens_of(arrays["groups"], s, counts["tokens"])]
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


def _cases(layout: str, by_token: bool, rng: np.random.Generator) -> Iterator[Case]:
    for tokens, rows, columns, experts, used, epilogue, out_q8, bias in (
        (1, 16, 256, 8, 2, EPILOGUE_STORE, 0, False),
        (5, 48, 512, 4, 2, EPILOGUE_STORE, 0, True),
        (40, 32, 256, 3, 2, EPILOGUE_STORE, 0, False),
        (100, 32, 256, 3, 2, EPILOGUE_STORE, 0, False),
        (7, 128, 256, 6, 3, EPILOGUE_SILU_GLU, 0, False),
        (19, 64, 256, 4, 2, EPILOGUE_GELU_GLU, 1, False),
        (3, 64, 256, 5, 4, EPILOGUE_CLAMPED_GLU, 1, True),
        (30, 64, 256, 4, 2, EPILOGUE_CLAMPED_GLU, 0, True),
    ):
        yield make_case(layout, tokens, rows, columns, experts, used, epilogue, out_q8, bias, rng, by_token)


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
    by_token: bool = False,
) -> Case:
    width = rows // (2 if epilogue else 1)
    scalars: dict[str, float] = {
        "format": LAYOUT_NAMES.index(layout), "rows": rows, "columns": columns, "x_stride": columns,
        "out_stride": width + 3, "panels_per_item": 4 if epilogue else 2, "experts": experts, "used": used,
        "epilogue": epilogue, "out_q8": out_q8,
    }  # fmt: skip
    slots = max_slots(tokens, scalars)
    x = rng.standard_normal((tokens if by_token else slots, columns)).astype(np.float32)
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
    if on_matrix_units := dispatch_coopmat(False, scalars, counts, gpu):
        return on_matrix_units
    if LAYOUTS[layout].quantised:
        if dots_are_fastest(scalars, counts, gpu):
            return dispatch_dots(BY_SLOT, scalars, counts, gpu)
        return dispatch_rows(False, scalars, counts, gpu)
    threads = min(128, gpu.workgroup_invocations)
    sums = threads // gpu.subgroup_min * PANEL_ROWS * FLOAT_TOKENS
    return Dispatch(count // 4 if scalars["epilogue"] else count, experts, constants=(threads, sums))


# ---- integer dot products, a block a lane: the shader of dense matmuls of one or two tokens

MAX_DOT_TOKENS = 4  # up to this number of tokens, they are faster than matrix units
MAX_DOT_SLOTS = 1.3  # and up to this number of slots of an expert in use, on average
MAX_SINGLE_TOKENS = 1  # up to this number, a workgroup takes one slot at a time; else two
BY_SLOT, BY_TOKEN, ONE_TOKEN = 1, 2, 3  # whose activations experts read: GROUPED of matmul.slang


def takes_dots(scalars: Scalars, counts: Counts) -> bool:
    """Whether experts have so few slots that dot products are faster than matrix units."""
    tokens = counts["tokens"]
    if tokens <= MAX_DOT_TOKENS:
        return True
    each = tokens * scalars["used"] / expected_experts(tokens, scalars)
    return LAYOUTS[layout_of(scalars)].quantised and each <= MAX_DOT_SLOTS


def dots_are_fastest(scalars: Scalars, counts: Counts, gpu: Gpu) -> bool:
    """Whether dot products are also faster than a row for each lane: not on AMD's GPUs, where a row for each lane has
    its activations in scalar registers."""
    return takes_dots(scalars, counts) and gpu.vendor != "AMD"


def dispatch_dots(grouped: int, scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """y: workgroups, each for an expert in use."""
    tokens, each = counts["tokens"], panels(int(scalars["rows"]))
    in_use = expected_experts(tokens, scalars)
    at_a_time = 1 if tokens <= MAX_SINGLE_TOKENS else 2
    fill = 1 if tokens <= MAX_DOT_TOKENS else 2  # more threads for several slots
    dense = matmul_dots(layout_of(scalars), scalars, int(each * in_use) // fill, at_a_time, gpu, {})
    y = most_experts(tokens, scalars)
    constants = (*padded(dense.constants, GROUPED_CONSTANT), grouped, y)
    return replace(dense, x=each // 4 if scalars["epilogue"] else each, y=y, constants=constants)


ONE_TOKEN_CONSTANT = 6  # of matmul_rows.slang


def dispatch_rows(one_token: bool, scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """`one_token`: of expert_matmul_tokens.py."""
    rows, layout = PANEL_ROWS * PANELS_PER_GROUP, layout_of(scalars)
    each = counts["tokens"] * scalars["used"] / scalars["experts"]  # slots of an expert, on average
    # Parts of the columns: 4. With 8 and 16 it was slower on an H200, also for one token (docs/LESSONS.md).
    threads = rows * min(4, gpu.workgroup_invocations // rows)
    constants = with_format((threads, Q8_TILE * (1 if each < 24 else 2 if each < 48 else 4)), layout)
    return Dispatch(
        -(-panels(int(scalars["rows"])) // PANELS_PER_GROUP),
        most_experts(counts["tokens"], scalars),
        shader=f"expert_matmul_{shader_layout(layout)}",
        constants=(*padded(constants, ONE_TOKEN_CONSTANT), 1) if one_token else constants,
    )


# ---- cooperative matrices, with weights in registers: an expert's rows for all of its slots, some tiles at a time

GROUPED_CONSTANT = 6  # of matmul_coopmat_reg.slang and matmul.slang: BY_SLOT or BY_TOKEN


def dispatch_coopmat(by_token: bool, scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch | None:
    """`by_token`: of expert_matmul_tokens.py."""
    layout, columns = layout_of(scalars), int(scalars["columns"])
    quantised = LAYOUTS[layout].quantised
    if not gpu.register_coopmat or columns % 32 or not (quantised or layout in FLOAT_TYPES):
        return None
    if takes_dots(scalars, counts):
        return None
    pairs, tiles, split_k, units = coopmat_shape(scalars, counts["tokens"])
    # The last tiles that are read may be no longer those of an expert.
    x_rows = REG_TOKENS * (expanded_tiles(by_token, scalars, counts) + tiles)
    if 2 * x_rows * columns > SCRATCH_WORDS_BYTES:
        if not quantised:
            return None
        tiles = 1
    expand = f"expand_{'expert_tokens' if by_token else 'slots'}{'' if quantised else '_f32'}"
    expanded = tiles > 1 or not quantised  # else the tile comes from the quantised activations themselves
    grouped = BY_TOKEN if by_token else BY_SLOT
    return Dispatch(
        -(-panels(int(scalars["rows"])) // (2 * pairs * units)),
        most_experts(counts["tokens"], scalars),
        shader=f"matmul_{shader_layout(layout)}_{'x' if expanded else 'q'}u{pairs}n{tiles}",
        constants=(*padded(with_format((32 * split_k * units, split_k), layout), GROUPED_CONSTANT), grouped),
        subgroup=32,
        scratch="r" if expanded else "",
        expand=expand if expanded else "",
    )


def coopmat_shape(scalars: Scalars, tokens: int) -> tuple[int, int, int, int]:
    """Pairs of panels of a subgroup, tiles of slots, subgroups that share the columns of rows, and those with their own
    rows."""
    each = tokens * scalars["used"] / scalars["experts"]  # slots of an expert, on average
    if each > 12:
        return (2, 4, 4, 1) if scalars["epilogue"] else (1, 8, 2, 2)
    if each > 5:
        return (2, 4, 4, 1) if scalars["epilogue"] else (1, 4, 2, 2)
    return (2, 1, 2, 2) if scalars["epilogue"] else (1, 1, 2, 4)


def expanded_tiles(by_token: bool, scalars: Scalars, counts: Counts) -> int:
    """Tiles of activations in scratch memory: all that there may be."""
    rows = counts["tokens"] if by_token else max_slots(counts["tokens"], scalars)
    return -(-rows // REG_TOKENS)


def expand(by_token: bool, scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """Writes activations in the order in which lanes load them. A thread writes what one lane loads of 32 columns and
    a tile of slots or tokens."""
    return Dispatch(-(-int(scalars["columns"]) // 128), expanded_tiles(by_token, scalars, counts))


def kernel(layout: str, by_token: bool = False) -> Kernel:
    """`by_token`: see expert_matmul_tokens.py."""
    return Kernel(
        name=f"expert_matmul_tokens_{layout}" if by_token else f"expert_matmul_{layout}",
        buffers=(
            Buffer("x", "r"),  # float32 [slots or T, x_stride] or q8 [slots or T, columns]
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
        extents=partial(_extents, by_token),
        reference=partial(_reference, by_token),
        cases=partial(_cases, layout, by_token),
        gpu_only=by_token,
    )


BY_LAYOUT = {layout: kernel(layout) for layout in LAYOUTS}
KERNELS = list(BY_LAYOUT.values())

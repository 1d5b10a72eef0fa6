"""Expands activations to float16 in scratch memory, in the order that cooperative matrix matmuls read.

For GPUs only, before such a matmul. Activations are int8, or with 16-bit float weights float32 (NAME_f32).
`expand_coopmat` writes float16 [tokens][columns]: tokens padded to whole tiles, columns by `padded_columns`.
`expand_coopmat_reg` writes them in the order in which the lanes of a subgroup load them. `expand_slots` and
`expand_expert_tokens` write the slots or tokens of experts' matmuls in whole tiles, in use or not.
All are entry points of coopmat_activations.slang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from tandem.kernels import expert_matmul, matmul
from tandem.kernels.dispatch import COUNTER_BYTES
from tandem.kernels.experts import max_slots
from tandem.kernels.kernel import SCRATCH_ADDRESS, Array, Buffer, Case, Cost, Counts, Grid, Kernel, Scalars
from tandem.kernels.matmul import token_count
from tandem.kernels.matmul_dispatch import REG_TOKENS, covered_tokens, padded_columns, reg_tiles
from tandem.kernels.panels import LAYOUTS
from tandem.kernels.q8_tiles import q8_bytes

SHRINK = np.float32(1 / 16)  # scale of activations that keeps sums in float16 range (panels.slang)
BYTE_ORDER = (0, 2, 1, 3)  # four bytes become float16 in pairs of every second one


def _halves(arrays: Mapping[str, Array], scalars: Scalars, tokens: int, rows: int, columns: int) -> Array:
    """float16 [rows][columns / 4][4 in BYTE_ORDER]; 0 past the last token and column."""
    x, width = arrays["x"], int(scalars["columns"])
    if x.dtype == np.float32:
        values = (x[:, :width] * SHRINK).astype(np.float16)
    else:
        scale = (x["scale"] * SHRINK).astype(np.float16)
        values = (x["q"].astype(np.float16) * scale[..., None]).swapaxes(1, 2)  # [tiles, TILE, K / 32, 32]
    padded = np.zeros((rows, columns), np.float16)
    padded[:tokens, :width] = values.reshape(-1, width)[:tokens]
    return padded.reshape(rows, -1, 4)[..., BYTE_ORDER]


def _rows(kernel: str, scalars: Scalars, counts: Counts) -> int:
    """Rows of activations: tokens, or slots of experts."""
    if "coopmat" in kernel:
        return token_count(scalars, counts)
    return counts["tokens"] if "tokens" in kernel else max_slots(counts["tokens"], scalars)


def expanded_bytes(kernel: str, scalars: Scalars, counts: Counts) -> int:
    columns = int(scalars["columns"])
    if "coopmat" not in kernel:
        tiles = expert_matmul.expanded_tiles("tokens" in kernel, scalars, counts)
        return COUNTER_BYTES + 2 * columns * REG_TOKENS * tiles
    tokens = token_count(scalars, counts)
    if kernel.startswith("expand_coopmat_reg"):
        return COUNTER_BYTES + 2 * columns * REG_TOKENS * reg_tiles(tokens)
    return COUNTER_BYTES + 2 * padded_columns(columns) * covered_tokens(scalars, tokens)


def _store(arrays: Mapping[str, Array], halves: Array) -> dict[str, Array]:
    expanded, begin = arrays["expanded"].copy(), COUNTER_BYTES // 2
    expanded[begin : begin + halves.size] = halves.reshape(-1)
    return {"expanded": expanded}


def _coopmat(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    tokens = token_count(scalars, counts)
    rows, columns = covered_tokens(scalars, tokens), padded_columns(scalars["columns"])
    return _store(arrays, _halves(arrays, scalars, tokens, rows, columns))


def _coopmat_reg(arrays: Mapping[str, Array], scalars: Scalars, counts: Counts) -> dict[str, Array]:
    """[block of 32 columns][tile of 8 tokens][token][t = 0..3][columns 4 t to 4 t + 3, then 16 more]."""
    tokens = token_count(scalars, counts)
    tiles = reg_tiles(tokens)
    halves = _halves(arrays, scalars, tokens, REG_TOKENS * tiles, int(scalars["columns"]))
    shape = (tiles, REG_TOKENS, -1, 2, 4, 4)  # [tile][token][block][low, high][t][4]
    return _store(arrays, halves.reshape(shape).transpose(2, 0, 1, 4, 3, 5))


def _of_experts(
    by_token: bool, arrays: Mapping[str, Array], scalars: Scalars, counts: Counts
) -> dict[str, Array]:
    """[tile of 8 slots or tokens][block of 32 columns][slot][t = 0..3][columns 4 t to 4 t + 3, then 16 more]."""
    tiles, columns = expert_matmul.expanded_tiles(by_token, scalars, counts), int(scalars["columns"])
    rows = counts["tokens"] if by_token else REG_TOKENS * tiles
    halves = _halves(arrays, scalars, rows, REG_TOKENS * tiles, columns)
    shape = (tiles, REG_TOKENS, columns // 32, 2, 4, 4)
    return _store(arrays, halves.reshape(shape).transpose(0, 2, 1, 4, 3, 5))


def _kernel(name: str, reference: object, layout: str) -> Kernel:
    """`layout`: of weights whose matmul reads such activations."""
    experts, by_token = "coopmat" not in name, "tokens" in name

    def extents(scalars: Scalars, counts: Counts) -> dict[str, int]:
        tokens, columns = _rows(name, scalars, counts), int(scalars["columns"])
        q8 = LAYOUTS[layout].quantised
        x = q8_bytes(tokens, columns) if q8 else 4 * ((tokens - 1) * int(scalars["x_stride"]) + columns)
        return {"x": x, "expanded": expanded_bytes(name, scalars, counts)}

    def cost(scalars: Scalars, counts: Counts) -> Cost:
        sizes = extents(scalars, counts)
        return Cost(bytes=float(sizes["x"] + sizes["expanded"] - COUNTER_BYTES), ops=0.0)

    def cases(rng: np.random.Generator) -> Iterator[Case]:
        for tokens, columns, epilogue in ((9, 512, 0), (16, 64, 0), (30, 96, 1), (64, 256, 2), (100, 256, 0)):
            of_matmul = (
                expert_matmul.make_case(layout, tokens, 64, columns, 5, 2, epilogue, 0, False, rng, by_token)
                if experts
                else matmul.make_case(layout, tokens, 64, columns, epilogue, 0, rng)
            )
            halves = np.zeros(expanded_bytes(name, of_matmul.scalars, of_matmul.counts) // 2, np.float16)
            arrays = {"x": of_matmul.arrays["x"], "expanded": halves}
            yield Case(f"{tokens}x{columns}", arrays, of_matmul.scalars, of_matmul.counts)

    return Kernel(
        name=name,
        buffers=(
            Buffer("x", "r"),  # q8 or float32 [T or slots, columns]
            Buffer("expanded", "w", SCRATCH_ADDRESS),  # float16, after the counters
        ),
        scalars=(expert_matmul if experts else matmul).BY_LAYOUT[layout].scalars,  # the scalars of the matmul
        grid=lambda scalars: Grid(
            int(scalars["columns"]) // 32, "rows" if scalars.get("count") else "tokens"
        ),
        cost=cost,
        extents=extents,
        reference=reference,  # type: ignore[arg-type]
        cases=cases,
        gpu_only=True,
    )


KERNELS = [
    _kernel("expand_coopmat", _coopmat, "q4_0"),
    _kernel("expand_coopmat_f32", _coopmat, "f16"),
    _kernel("expand_coopmat_reg", _coopmat_reg, "q4_0"),
    _kernel("expand_coopmat_reg_f32", _coopmat_reg, "f16"),
    _kernel("expand_slots", partial(_of_experts, False), "q4_0"),
    _kernel("expand_slots_f32", partial(_of_experts, False), "f16"),
    _kernel("expand_expert_tokens", partial(_of_experts, True), "q4_0"),
    _kernel("expand_expert_tokens_f32", partial(_of_experts, True), "f16"),
]
BY_NAME = {kernel.name: kernel for kernel in KERNELS}

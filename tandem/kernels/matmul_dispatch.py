"""How matmuls are dispatched on a GPU: integer dot products for few tokens, cooperative matrices for more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from tandem.kernels.abi import PANEL_ROWS
from tandem.kernels.dispatch import (
    ENOUGH_WORKGROUPS,
    FLOAT_TYPES,
    PART_SUMS_BYTES,
    SCRATCH_WORDS_BYTES,
    Dispatch,
    Gpu,
    compiled_scalars,
    padded,
    shader_layout,
    with_format,
)
from tandem.kernels.kernel import Counts, Scalars
from tandem.kernels.matmul import layout_of, token_count
from tandem.kernels.panels import CHOSEN, LAYOUTS

Choice = Mapping[str, int]
Path = Literal["float", "integer_dot", "rows", "coopmat_reg", "coopmat"]

# Up to this number of tokens, integer dot products are faster than cooperative matrices through shared memory
# (MAX_DOT_TOKENS) or with weights in registers (MAX_DOT_TOKENS_REG).
MAX_DOT_TOKENS = 8
MAX_DOT_TOKENS_REG = 2
MAX_FLOAT_TOKENS = 4  # the same for float weights, which dot products multiply in float32
ENOUGH_THREADS = {"discrete": 128_000, "integrated": 20_000}  # threads that fill a GPU of this kind
# Panels of a vocabulary-sized matmul, which has more rows than a GPU has subgroups.
HEAD_PANELS = 4096
# Formats of which 16 lanes share a block of 32 columns for one or two tokens; of the others 4 do (block_panels.slang).
QUARTERS = ("q4_0", "q4_1", "q8_0")
# Threads that fill a discrete GPU with a block a lane, as was fastest on an H200: for one token with one panel a lane
# and with two (GLU), and otherwise.
BLOCK_THREADS = {"q4_k": (110_000, 86_000), "q6_k": (86_000, 128_000)}
OTHER_BLOCK_THREADS = 110_000


def matmul(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """Few tokens: one workgroup per panel of 16 rows; with GLU, per four panels (32 outputs)."""
    layout, tokens = layout_of(scalars), token_count(scalars, counts)
    panels = -(-int(scalars["rows"]) // PANEL_ROWS)
    choice = gpu.choices.of("matmul", scalars, tokens)
    path = matmul_path(scalars, counts, gpu)
    if path == "float":
        return _matmul_float(layout, scalars, panels, tokens, gpu, choice)
    if path == "coopmat_reg":
        tiles = coopmat_reg_tiles(int(scalars["columns"]), tokens, gpu, LAYOUTS[layout].quantised)
        return _matmul_coopmat_reg(layout, scalars, panels, tokens, tiles, gpu, choice)
    if path == "coopmat":
        return _matmul_coopmat(layout, scalars, panels, tokens, gpu, choice)
    if path == "rows":
        return _matmul_rows(layout, panels, tokens, gpu, choice)
    return matmul_dots(layout, scalars, panels, tokens, gpu, choice)


def matmul_path(scalars: Scalars, counts: Counts, gpu: Gpu) -> Path:
    """The shader for a matmul: for float weights, with integer dot products of a quarter of a row or of a row per lane,
    or with cooperative matrices whose weights are in registers or go through shared memory."""
    layout, tokens, columns = layout_of(scalars), token_count(scalars, counts), int(scalars["columns"])
    quantised = LAYOUTS[layout].quantised
    if not quantised and (layout not in FLOAT_TYPES or tokens <= MAX_FLOAT_TOKENS or columns % 32):
        return "float"
    choice = gpu.choices.of("matmul", scalars, tokens)  # "integer_dot": not on matrix units
    in_registers = coopmat_reg_tiles(columns, tokens, gpu, quantised) or (
        quantised and tokens <= MAX_DOT_TOKENS
    )
    if gpu.register_coopmat and in_registers and not choice.get("integer_dot", tokens <= MAX_DOT_TOKENS_REG):
        return "coopmat_reg"
    by_rows = "integer_dot" not in choice and rows_are_fastest(tokens, bool(scalars["epilogue"]), gpu)
    if quantised and choice.get("rows", by_rows):
        return "rows"
    fits = 2 * covered_tokens(scalars, tokens) * padded_columns(columns) <= SCRATCH_WORDS_BYTES
    # The shader has 32-bit offsets into the weights.
    fits = fits and LAYOUTS[layout].matrix_bytes(int(scalars["rows"]), columns) < 1 << 32
    few = quantised and tokens <= MAX_DOT_TOKENS
    if not choice.get("integer_dot", few) and fits and has_coopmat(gpu):
        return "coopmat"
    if not quantised:
        return "float"
    return "rows" if gpu.vendor == "AMD" and tokens > MAX_DOT_TOKENS and not choice else "integer_dot"


def has_coopmat(gpu: Gpu) -> bool:
    """Whether the GPU multiplies 16 x 16 x 16 float16 matrices with float32 sums in subgroups of 32."""
    shape = (16, 16, 16, "f16", "f16", "f32")
    has_shape = any((s.m, s.n, s.k, s.a, s.b, s.c) == shape for s in gpu.matrix_shapes)
    return has_shape and gpu.subgroup_min <= 32 <= gpu.subgroup_max and gpu.shared_memory >= 48 << 10


# ---- integer dot products, a row a lane

PANELS_PER_GROUP = 4  # of matmul_rows.slang
MIN_ROWS_TOKENS, MAX_ROWS_TOKENS = 2, 128
# Tokens of a lane whose sums leave room for 16 waves; from there on, lanes share decoded rows.
MAX_LANE_SUMS = 32
SHARING_THREADS = 256  # of matmul_*_shared_rows


def rows_are_fastest(tokens: int, glu: bool, gpu: Gpu) -> bool:
    """Whether a row a lane is the default: where scalar registers hold the activations (AMD), by the instructions that
    are counted for RDNA3 (docs/AMD.md). More tokens than MAX_ROWS_TOKENS are for matrix units, if there are any. With
    GLU, one token is among them; without, other shaders leave the norm that follows little to do
    (`matmul_norm_partials`)."""
    if gpu.register_coopmat or (tokens > MAX_ROWS_TOKENS and has_coopmat(gpu)):
        return False
    if gpu.vendor == "AMD":
        return glu or tokens >= MIN_ROWS_TOKENS
    return has_coopmat(gpu) and tokens > MAX_DOT_TOKENS


def reads_q8_sums(gpu: Gpu) -> bool:
    """Whether any of its matmuls reads the sums of quantised activations: a row a lane, formats with minima do."""
    return not gpu.register_coopmat


def _matmul_rows(layout: str, panels: int, tokens: int, gpu: Gpu, choice: Choice) -> Dispatch:
    """Computes 8, 16, 32, 64 or 128 tokens at a time, and skips those past the last."""
    rows = PANEL_ROWS * PANELS_PER_GROUP
    shared = tokens > MAX_LANE_SUMS and "split_k" not in choice
    shared = shared and gpu.workgroup_invocations >= SHARING_THREADS
    at_a_time = min(MAX_ROWS_TOKENS if shared else 64, max(8, 1 << (tokens - 1).bit_length()))
    threads = rows * choice.get("split_k", min(4, gpu.workgroup_invocations // rows))
    # Arithmetic begins to bind at 24 tokens. RDNA3 issues two instructions at once in waves of 32 only.
    subgroup = 32 if tokens > 16 and gpu.subgroup_min <= 32 < gpu.subgroup_max else 0
    return Dispatch(
        -(-panels // PANELS_PER_GROUP),
        -(-tokens // at_a_time),
        shader=f"matmul_{shader_layout(layout)}_{'shared_rows' if shared else 'rows'}",
        constants=with_format((threads, at_a_time), layout),
        subgroup=choice.get("subgroup", subgroup),
    )


# ---- float weights


def _matmul_float(
    layout: str, scalars: Scalars, panels: int, tokens: int, gpu: Gpu, choice: Choice
) -> Dispatch:
    """Computes 1, 2, 4 or (F32) 8 tokens at a time; with GLU, a workgroup computes four panels, one after the other."""
    workgroups = panels // 4 if scalars["epilogue"] else panels
    max_tokens = 8 if layout == "f32" else 4  # sums of 8 rows for 8 tokens do not fit in registers
    tokens_at_a_time = min(max_tokens, 1 << (tokens - 1).bit_length())
    wanted = ENOUGH_THREADS.get(gpu.kind, 1) / workgroups
    sizes = [n for n in (64, 128, 256, 512, 1024) if n <= gpu.workgroup_invocations]
    threads = choice.get("threads", min(sizes, key=lambda n: abs(math.log(n / wanted))))
    partial_sums = threads // gpu.subgroup_min * PANEL_ROWS * tokens_at_a_time
    # A matrix of few rows (a router) fills the device by its tokens.
    at_once = tokens if workgroups >= ENOUGH_WORKGROUPS.get(gpu.kind, 1) else tokens_at_a_time
    return Dispatch(
        workgroups,
        -(-tokens // at_once),
        shader=f"matmul_{layout}_t{tokens_at_a_time}",
        constants=(threads, partial_sums, at_once),
    )


# ---- integer dot products


def matmul_dots(
    layout: str, scalars: Scalars, panels: int, tokens: int, gpu: Gpu, choice: Choice
) -> Dispatch:
    """Computes 1, 2, 4 or 8 tokens at a time."""
    columns, glu = int(scalars["columns"]), bool(scalars["epilogue"])
    tokens_at_a_time = tokens if tokens <= 2 else 4 if tokens <= 4 else 8
    two_panels = glu and tokens_at_a_time <= 2  # a lane has one panel of gate and one of up
    quarters = tokens > 2 or layout in QUARTERS or (layout == "q6_k" and glu and tokens == 2)
    if not quarters:
        default = _threads_of_blocks(layout, columns, panels, tokens, glu, gpu)
    else:
        default = _threads_of_quarters(columns, panels, tokens_at_a_time, glu, gpu)
    threads = choice["threads"] * (4 if glu else 1) if "threads" in choice else default
    # Floats of shared memory.
    partial_sums = (2 if two_panels else 1) * threads // gpu.subgroup_min * PANEL_ROWS * tokens_at_a_time
    return Dispatch(
        panels // 4 if glu else panels,
        shader=f"matmul_{shader_layout(layout)}_t{tokens_at_a_time}" + ("_glu" if two_panels else ""),
        constants=with_format(
            (threads, int(glu), partial_sums, *([columns] if tokens_at_a_time <= 2 else [])), layout
        ),
        subgroup=choice.get("subgroup", 0),
        compiled_scalars=compiled_scalars(gpu) if tokens == 1 else 0,
    )


def _threads_of_quarters(columns: int, panels: int, tokens: int, glu: bool, gpu: Gpu) -> int:
    """Threads of a workgroup, enough in total to fill the device, if there are blocks of columns for them."""
    max_threads = min({1: 512, 2: 384}.get(tokens, 128), columns // 8, gpu.workgroup_invocations)
    max_threads //= 4 if glu else 1
    wanted = min(ENOUGH_THREADS.get(gpu.kind, 1) / panels, max_threads)
    min_threads = 64
    if glu and tokens == 2:  # two panels a lane: twice the sums per thread, half the threads
        wanted, min_threads = wanted / 2, max(32, gpu.subgroup_max // 2)
    sizes = range(min_threads, max(min_threads, max_threads) + 1, min(min_threads, 64))

    def rank(n: int) -> tuple[bool, float]:
        """Prefers threads that process a row in whole rounds of two blocks, if they are at least half of `wanted`."""
        whole = tokens > 2 or (2 * n >= wanted and columns // 32 % (2 * n // PANEL_ROWS) == 0)
        return not whole, abs(math.log(n / wanted))

    return min(sizes, key=rank) * (4 if glu else 1)


def _threads_of_blocks(layout: str, columns: int, panels: int, tokens: int, glu: bool, gpu: Gpu) -> int:
    """The same for one or two tokens with a block a lane.

    With GLU half of the threads have the first panels of gate and up, half the second."""
    blocks, parts = columns // 32, 2 if glu else 1
    one_token = tokens == 1 and layout in BLOCK_THREADS
    discrete = BLOCK_THREADS[layout][glu] if one_token else OTHER_BLOCK_THREADS
    wanted = (discrete if gpu.kind == "discrete" else ENOUGH_THREADS.get(gpu.kind, 1)) / panels
    wanted *= 4 if glu else 1
    if tokens == 2 and not glu:
        wanted = min(wanted, 256)
    step = parts * max(32, gpu.subgroup_max)  # a subgroup is in one part
    sizes = range(step, max(step, min(512, gpu.workgroup_invocations)) + 1, step)

    def rank(n: int) -> float:
        """The distance from `wanted`, and the part of the last round that finds no block."""
        units = n // parts // 4
        idle = -(-blocks // units) * units / blocks - 1
        return abs(math.log(n / max(wanted, 1))) + 4 * idle

    return min(sizes, key=rank)


def matmul_norm_partials(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch | None:
    """Like the matmul for one token; None if integer dot products are not used for it."""
    own = {name: value for name, value in scalars.items() if name != "rows_per_sum"}
    if counts["tokens"] > 1 or scalars["epilogue"] or matmul_path(own, counts, gpu) != "integer_dot":
        return None
    plain = matmul(own, counts, gpu)
    constants = (*plain.constants[:4], int(scalars["rows_per_sum"]))
    return replace(plain, shader=f"{plain.shader}_sums", constants=with_format(constants, layout_of(own)))


def rows_per_sum(gpu: Gpu) -> int:
    """Rows of a panel whose squares a subgroup sums for the norm after the matmul."""
    return min(PANEL_ROWS, gpu.subgroup_min)


# ---- cooperative matrices, with weights in registers

COOPMAT_REG_SUMS = 3072  # float4s of shared memory for the partial sums of matmul_coopmat_reg.slang
SHARING = 4  # subgroups that share decoded weights, of matmul_coopmat_reg.slang
# Workgroups from which sharing is faster, and the same where decoding takes longer.
MIN_SHARING_WORKGROUPS, MIN_SHARING_WORKGROUPS_SLOW = 256, 128
SLOW_TO_DECODE = ("q4_k", "q5_k", "q6_k", *(layout for layout in CHOSEN if layout != "q5_0"), *FLOAT_TYPES)
REG_TOKENS = 8  # tokens of a tile: columns of the matrix of activations
# Of matmul_many: the first of its own specialisation constants, and its workgroups that a core runs at once.
MANY_CONSTANTS, TILES_PER_CORE = 7, 2
# Workgroups that share a tile of 64 rows and 256 tokens: each has some of the columns; their sums are added at the end.
MIN_PART_COLUMNS, MAX_PARTS = 512, 11
TILE_SUMS_BYTES = 64 * 256 * 4  # of one workgroup
PART_SUMS_COLUMNS = 1.6  # columns of a tile that take as long as writing and reading these bytes, on an H200


def reg_tiles(tokens: int) -> int:
    """Tiles of REG_TOKENS in whole groups of up to 8, which a subgroup processes together."""
    tiles = min(8, 1 << (-(-tokens // REG_TOKENS) - 1).bit_length())
    return tiles * -(-tokens // (REG_TOKENS * tiles))


def coopmat_reg_tiles(columns: int, tokens: int, gpu: Gpu, quantised: bool = True) -> int:
    """Tiles that a matmul reads from scratch memory; 0: it reads the quantised activations themselves, or is not on
    matrix units."""
    tiles, few = reg_tiles(tokens), MAX_DOT_TOKENS if quantised else MAX_FLOAT_TOKENS
    fits = 2 * REG_TOKENS * columns * tiles <= SCRATCH_WORDS_BYTES
    return tiles if gpu.register_coopmat and tokens > few and fits else 0


def _matmul_coopmat_reg(
    layout: str, scalars: Scalars, panels: int, tokens: int, expanded: int, gpu: Gpu, choice: Choice
) -> Dispatch:
    """One subgroup computes 32 or 64 rows for up to 8 tiles of 8 tokens.

    `expanded`: tiles that come from scratch memory; 0: the one tile comes from the quantised activations themselves.
    """
    glu, tiles = bool(scalars["epilogue"]), min(8, expanded or 1)
    groups = max(1, expanded // 8)
    tiles_of_rows = -(-panels // 4) * -(-groups // SHARING)
    whole, shared, parts = divide_tiles(tiles_of_rows, int(scalars["columns"]), gpu)
    enough = MIN_SHARING_WORKGROUPS_SLOW if layout in SLOW_TO_DECODE else MIN_SHARING_WORKGROUPS
    if groups >= SHARING:
        sharing = tiles_of_rows >= enough or parts > 1
    else:  # half of the subgroups would have no tokens: worth it only where they decode for long
        sharing = tiles_of_rows >= enough and layout in SLOW_TO_DECODE
    if groups > 1 and choice.get("shared", sharing):
        constants = padded(with_format((32 * SHARING, 1), layout), MANY_CONSTANTS)
        return Dispatch(
            whole + shared * parts,
            shader=f"matmul_{shader_layout(layout)}_su2n8",
            constants=(*constants, groups, whole, parts),
            subgroup=32,
            scratch="r",
            part_sums=parts > 1,
            expand=_expand("expand_coopmat_reg", layout),
        )
    pairs = 2 if glu or groups > 1 else 1  # pairs of panels per subgroup
    in_pairs = LAYOUTS[layout].span > 32  # neighbouring blocks share scales: subgroups take pairs of them
    # split_k: subgroups that share the columns of the same rows, more where rows are few; units: subgroups with rows of
    # their own.
    if groups > 1:
        long = scalars["columns"] >= 2 * scalars["rows"] or groups < SHARING
        split_k = 1 if -(-panels // 16) * groups >= 256 else 4 if long else 2
        units = 4 // split_k
    elif panels >= HEAD_PANELS and tiles < 8:
        pairs, split_k, units = (1, 4, 2) if tiles == 1 else (2, 2, 2)
    elif tiles == 1 and (tokens <= 4 or in_pairs):
        # Also 10% faster for 5 to 8 tokens of other formats. Not used there: throughput must not fall from 8 to 9
        # tokens, which need a second tile.
        wide = panels >= 256 and (not in_pairs or scalars["columns"] >= 2 * scalars["rows"])
        pairs = 2 if glu or wide else 1
        split_k = 16 if not glu and scalars["columns"] >= 2048 and (wide or panels < 256) else 8
        units = 1
        if glu and in_pairs:
            split_k, units = 4, 2
    elif tiles == 2 and in_pairs:
        split_k, units = (4, 1) if glu else (8, 2 if panels >= 256 else 1)
    else:
        split_k = 4 if tiles == 8 or (glu and tiles != 2) else 8
        units = 2 if (glu and tiles == 1) or (not glu and tiles == 4) else 1
    pairs, split_k = choice.get("pairs", pairs), choice.get("split_k", split_k)
    units = choice.get("units", units)
    return Dispatch(
        -(-panels // (2 * pairs * units)),
        groups,
        shader=f"matmul_{shader_layout(layout)}_{'x' if expanded else 'q'}u{pairs}n{tiles}",
        constants=with_format((32 * split_k * units, split_k), layout),
        subgroup=32,
        scratch="r" if expanded else "",
        expand=_expand("expand_coopmat_reg", layout) if expanded else "",
    )


def divide_tiles(tiles: int, columns: int, gpu: Gpu) -> tuple[int, int, int]:
    """Returns (tiles with a workgroup each, tiles that several workgroups share, how many share one).

    The last tiles are shared: with a workgroup each, they would leave most of a GPU idle.
    """
    at_once = TILES_PER_CORE * gpu.cores
    shared = tiles % at_once if at_once else 0
    if not shared:
        return tiles, 0, 1
    most = min(columns // MIN_PART_COLUMNS, PART_SUMS_BYTES // (shared * TILE_SUMS_BYTES), MAX_PARTS)

    def time(parts: int) -> float:  # in columns of a tile
        sums = PART_SUMS_COLUMNS * shared * parts if parts > 1 else 0
        return -(-shared * parts // at_once) / parts * columns + sums

    parts = min(range(1, max(1, most) + 1), key=time)
    return (tiles - shared, shared, parts) if parts > 1 else (tiles, 0, 1)


def _expand(kernel: str, layout: str) -> str:
    """The kernel that expands a matmul's activations: int8, or float32 with float weights."""
    return kernel if LAYOUTS[layout].quantised else f"{kernel}_f32"


def expand_coopmat_reg(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One thread writes the values that one lane loads of a block of 32 columns and a tile of tokens."""
    return Dispatch(-(-int(scalars["columns"]) // 128), reg_tiles(token_count(scalars, counts)))


# ---- cooperative matrices, through shared memory


MANY_TOKENS = 128  # tokens of a workgroup
MANY_WIDE = 256  # with twice the threads, if shared memory holds them: weights are decoded half as often
MANY_WIDE_BYTES = 55_296


def _matmul_coopmat(
    layout: str, scalars: Scalars, panels: int, tokens: int, gpu: Gpu, choice: Choice
) -> Dispatch:
    """One workgroup computes 128 rows for 128 or 256 tokens, or of float weights 32 or 64 rows for up to 64 tokens."""
    covered = covered_tokens(scalars, tokens)
    kernel = f"matmul_{shader_layout(layout)}"
    if covered >= MANY_TOKENS:
        wide = covered % MANY_WIDE == 0 and gpu.shared_memory >= MANY_WIDE_BYTES
        width = choice.get("many", MANY_WIDE if wide else MANY_TOKENS)
        grid, shader, threads = (-(-panels // 8), covered // width), f"{kernel}_many", width
    else:
        height = 4 if scalars["epilogue"] else 2
        grid, shader, threads = (-(-panels // height), 1), f"{kernel}_p{height}n{covered // 16}", 0
    return Dispatch(
        *grid,
        shader=shader,
        constants=with_format((threads,), layout),
        subgroup=32,
        scratch="r",
        expand=_expand("expand_coopmat", layout),
    )


def covered_tokens(scalars: Scalars, tokens: int) -> int:
    """`tokens` rounded up to what tiles cover: 128 or a multiple of 256, or for float weights also 16, 32 or 64."""
    tiles = 1 if tokens <= 16 else 2 if tokens <= 32 else 4
    few = tokens <= (32 if scalars["epilogue"] else 64) and not LAYOUTS[layout_of(scalars)].quantised
    wide = -(-tokens // MANY_WIDE) * MANY_WIDE
    return 16 * tiles if few else MANY_TOKENS if tokens <= MANY_TOKENS else wide


def padded_columns(columns: float) -> int:
    """An odd number of cache lines of 64: rows that are a large power of two apart put each other out of the cache."""
    return (-(-int(columns) // 64) | 1) * 64


def expand_coopmat(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One thread expands 4 columns of one token."""
    covered = covered_tokens(scalars, token_count(scalars, counts))
    return Dispatch(-(-padded_columns(scalars["columns"]) // (4 * 128)), covered)

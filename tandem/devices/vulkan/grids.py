"""How each kernel is dispatched on Vulkan: workgroups, and which entry point with which specialisation constants.

One function a kernel name: (scalars, counts, device) -> Dispatch. `counts` are those of the bucket that is being
recorded ("tokens", "rows", "work"): the kernel skips what lies past the counts in StepInputs' header.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tandem.devices.choices import Choice
from tandem.devices.vulkan.capabilities import Capabilities
from tandem.errors import DeviceError
from tandem.kernels.abi import KV_TYPES, PANEL_ROWS, PART_ROPE, PART_SHIFT, PART_STORE
from tandem.kernels.kernel import Counts, Scalars
from tandem.kernels.kv_layout import kv_bytes
from tandem.kernels.panels import LAYOUT_NAMES, LAYOUTS


@dataclass(frozen=True)
class Dispatch:
    x: int
    y: int = 1
    z: int = 1
    shader: str = ""  # entry point; "": the kernel's own name
    constants: tuple[int, ...] = ()  # specialisation constants 0, 1, ...; absent ones keep their defaults
    subgroup: int = 0  # invocations; 0: the driver's choice
    scratch: bool = False  # uses the device's scratch memory: not beside another launch that does
    before: Dispatch | None = None  # runs first, with the same arguments; this one waits for it
    beside: bool = False  # waits for nothing: runs beside the launch before it
    known: int = 0  # of the launch's scalars, from the first on, that are compiled in
    expands: bool = False  # leaves its output in scratch memory, as the next launch's `before` would


SCALARS = 16  # of a launch


def known_scalars(device: Capabilities, count: int = SCALARS) -> int:
    """Of a launch for one token: a GPU with memory of its own starts sooner without loading them, and compiles fast."""
    return count if device.kind == "discrete" else 0


# Memory in which the workgroups of a launch meet. It begins with counters, which are 0 between launches.
SCRATCH_BYTES, COUNTERS = 32 << 20, 16384
ENOUGH_WORKGROUPS = {"discrete": 1024, "integrated": 256}  # to fill a device; software is filled by any
ENOUGH_THREADS = {"discrete": 128_000, "integrated": 20_000}
MOST_SPLITS = 64  # of the keys of a query
KEY_SUBGROUPS = (
    4  # subgroups of multi-subgroup attention that take the same keys; a loop does not end with fewer
)
ENOUGH_MULTI_SUBGROUP = (
    128  # workgroups of multi-subgroup attention: a large GPU's cores have room for about one each
)
LANES_OF_HEAD = 32  # lanes that rotate a head (RoPE) of a single token
RUN_SCALARS = 13  # of attention_rope: from here on they are an address, another in the next run
PREFETCH_BYTES = 8 << 20  # of a layer's keys and values, ahead of attention: more would not stay in cache
HEAD_PANELS = 4096  # of a product with more rows than there are subgroups: a vocabulary's
Grid = Callable[[Scalars, Counts, Capabilities], Dispatch]


def quantise(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A thread a block of 32 columns; y walks the rows."""
    blocks = int(scalars["dim"]) // 32
    return Dispatch(-(-blocks // 64), counts["rows" if scalars["count_rows"] else "tokens"])


def norm(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A workgroup a row; the fewer rows there are to hide its latency, the more threads share one."""
    rows = counts["rows" if scalars["use_rows"] else "tokens"]
    dim, most = int(scalars["dim"]), device.workgroup_invocations
    few = max(64, 1 << (-(-dim // 12) - 1).bit_length())
    threads = min(few if rows <= 64 else 512 if dim >= 4096 else 256, most)
    while threads * 32 < dim and threads < most:
        threads *= 2
    if threads * 32 < dim:
        raise DeviceError(
            f"{device.name} normalises at most {32 * threads} columns, not {dim}: use the device cpu"
        )
    threads = device.choices.of("norm", scalars, rows).get("threads", threads)
    strides = (dim, *(int(scalars[f"{name}_stride"]) for name in ("x", "add", "out")))
    held = 2 if 8 * threads >= dim else 3 if 12 * threads >= dim else 8  # groups of 4 columns a thread
    aligned = all(n % 4 == 0 for n in strides)
    tiles = coopmat_tiles(dim, rows, device) if scalars["out_q8"] and aligned else 0
    constants = (threads, int(aligned), tiles, int(scalars["add_stride"] > 0), int(scalars["out_q8"]),
                 int(scalars["use_rows"]))  # fmt: skip
    return Dispatch(rows, shader=f"norm_{held}", constants=constants, scratch=tiles > 0, expands=tiles > 0)


def spread_norm(scalars: Scalars, device: Capabilities) -> Dispatch:
    """Of a single row that the product before has left in scratch memory: a thread 4 columns."""
    threads = 128
    constants = (threads, 1, 0, 1, int(scalars["out_q8"]), 0, rows_summed(device))
    return Dispatch(
        -(-int(scalars["dim"]) // (4 * threads)), shader="norm_spread", constants=constants, scratch=True,
        known=known_scalars(device),
    )  # fmt: skip


def rows_summed(device: Capabilities) -> int:
    """Of a product's panel, those whose squares a subgroup adds up for the norm after it."""
    return min(PANEL_ROWS, device.subgroup_min)


def glu(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    return Dispatch(-(-int(scalars["dim"]) // (4 * 64)), counts["tokens"])


def embed(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A thread 8 columns of a token."""
    return Dispatch(-(-int(scalars["columns"]) // (8 * 64)), counts["tokens"])


def rope(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A workgroup a head of a token: q's, k's and v's."""
    shader = "rope_q8" if KV_TYPES[int(scalars["kv"])] == "q8" else "rope"
    constants = tuple(int(scalars[name]) for name in ("head_dim", "parts", "kv"))
    heads = int(scalars["q_heads"] + 2 * scalars["kv_heads"])
    return Dispatch(heads, counts["tokens"], shader=shader, constants=constants)


def attention(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A workgroup some queries of a work item and a KV head; of few items, each with a part of the keys."""
    kv_heads, dim = int(scalars["kv_heads"]), int(scalars["head_dim"])
    if kv_bytes(scalars["blocks"], kv_heads, dim, scalars["kv"]) >= 1 << 32:
        raise DeviceError(
            "a layer's keys and values take more than 4 GB: use a smaller --kv-memory or --context"
        )
    rows = 1 if counts["tokens"] <= counts["work"] else 16  # of an item, as a rule
    together = 1 << (rows * int(scalars["q_heads"]) // kv_heads - 1).bit_length()
    takes = dim in (64, 128, 256) and scalars["q_stride"] % 4 == 0 and KV_TYPES[int(scalars["kv"])] != "f32"
    if device.register_coopmat and takes:
        return _attention_coopmat(scalars, counts, device, together, rows)
    choice = device.choices.of("attention", scalars, counts["tokens"], counts["work"])
    queries = min(choice.get("queries", 8 if dim <= 256 else 4), together)
    enough = ENOUGH_WORKGROUPS.get(device.kind, 8)
    slots = _attention_slots(scalars, counts, device, -(-together // queries), queries, 64, enough)
    loads = 2 if device.kind == "software" else 8  # at a time: longer code takes long to compile in software
    constants = (queries, dim, int(scalars["kv"]), loads)
    return Dispatch(kv_heads, counts["work"], slots, "attention", constants, scratch=True)


def _attention_coopmat(
    scalars: Scalars, counts: Counts, device: Capabilities, together: int, rows: int
) -> Dispatch:
    """On matrix units, 16 queries a subgroup, or for single tokens four subgroups together."""
    kv_heads, dim = int(scalars["kv_heads"]), int(scalars["head_dim"])
    choice = device.choices.of("attention", scalars, counts["tokens"], counts["work"])
    # Four subgroups together have the lowest latency, but a core has room for few such workgroups.
    pairs, most = max(1, kv_heads * counts["work"]), ENOUGH_WORKGROUPS.get(device.kind, 1024)
    few = choice.get("multi_subgroup", int(4 * pairs <= most))
    multi_subgroup = rows == 1 and together <= 8 and together * dim <= 1024 and bool(few)
    queries = min(choice.get("queries", 16), together)
    tiles = -(-queries // 16)
    # Subgroups with the same queries, each with a part of the keys, as shared memory allows.
    filling = 8 // tiles if few else max(1, min(8 // tiles, most // pairs))
    if multi_subgroup and counts["work"] == 1 and dim <= 128:
        filling = 3 * KEY_SUBGROUPS  # 192 keys at once, as registers allow
    key_splits = choice.get("key_splits", 2 if rows > 1 else filling)
    exchanged = 32 * queries if multi_subgroup else 0  # of two floats, each of them
    while (
        key_splits * (4 * queries * (dim + 2) + 8 * exchanged) + 32 * tiles * dim
        > device.shared_memory - 1024
    ):
        key_splits = (
            key_splits - KEY_SUBGROUPS if multi_subgroup and key_splits > KEY_SUBGROUPS else key_splits // 2
        )
    multi_subgroup = multi_subgroup and key_splits >= KEY_SUBGROUPS and key_splits % KEY_SUBGROUPS == 0
    rounds = choice.get(
        "rounds", 4 if rows == 1 and not multi_subgroup else 1
    )  # of a part, before parts meet
    keys = 64 * rounds * (key_splits // KEY_SUBGROUPS if multi_subgroup else key_splits)
    enough = ENOUGH_MULTI_SUBGROUP if multi_subgroup else most
    slots = _attention_slots(scalars, counts, device, -(-together // queries), queries, keys, enough)
    shader = f"attention_{'multi_subgroup' if multi_subgroup else 'coopmat'}_{dim}"
    constants = (
        queries,
        dim,
        int(scalars["kv"]),
        key_splits,
        32 * tiles * key_splits,
        max(1, exchanged * key_splits),
        rounds,
    )
    return Dispatch(kv_heads, counts["work"], slots, shader, constants, subgroup=32, scratch=True)


def attention_rope(rope: Scalars, scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch | None:
    """Attention that does the work of a `rope` launch too, where every sequence has one token; None: it cannot."""
    dispatch, parts, dim = attention(scalars, counts, device), int(rope["parts"]), int(scalars["head_dim"])
    if not dispatch.shader.startswith("attention_multi_subgroup") or KV_TYPES[int(scalars["kv"])] != "f16":
        return None
    queries, key_splits = dispatch.constants[0], dispatch.constants[3]
    shared = (key_splits + 1) * 4 * queries * (dim + 2) + key_splits * 256 * queries + (32 + 2) * dim + 1024
    whole = not parts & PART_ROPE or rope["rot_dim"] % 4 == 0
    alone = scalars["window"] == 1  # then no stored key is seen, and its block may be gone
    if not parts & PART_STORE or parts & PART_SHIFT or not whole or alone or shared > device.shared_memory:
        return None
    group = int(scalars["q_heads"] // scalars["kv_heads"])
    if group > queries:
        return None
    constants = (*dispatch.constants, LANES_OF_HEAD, parts, int(rope["interleaved"]), group, dispatch.z, 1)
    known = known_scalars(device, RUN_SCALARS)
    return replace(dispatch, shader=f"attention_rope_{dim}", constants=constants, known=known)


def attention_prefetch(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch | None:
    """What reads what attention of a single token is about to read, beside the launch before; None: it does not pay."""
    if device.kind != "discrete" or counts["work"] > 1:
        return None  # with memory that is shared, caches are small: all would be read twice
    kv_heads, dim, kv = (int(scalars[name]) for name in ("kv_heads", "head_dim", "kv"))
    blocks = max(1, PREFETCH_BYTES // kv_bytes(1, kv_heads, dim, kv))
    return Dispatch(
        kv_heads, 4, shader="attention_prefetch", constants=(1, dim, kv, blocks, 256), beside=True
    )


def _attention_slots(
    scalars: Scalars, counts: Counts, device: Capabilities, tiles: int, queries: int, keys: int, enough: int
) -> int:
    """Workgroups of a work item and a KV head, for its tiles of queries and the parts of their keys, `keys` or more."""
    pairs = max(1, int(scalars["kv_heads"]) * counts["work"])
    choice = device.choices.of("attention", scalars, counts["tokens"], counts["work"])
    wanted = max(2, choice.get("workgroups", enough) // pairs)
    longest = min(int(scalars["window"]) or 1 << 30, 16 * int(scalars["table_stride"]))  # keys seen
    wanted = max(tiles, min(wanted, tiles * (longest // keys + 2)))
    room = (SCRATCH_BYTES - 4 * COUNTERS) // (4 * queries * (int(scalars["head_dim"]) + 4))
    return max(1, min(wanted, MOST_SPLITS, min(room, COUNTERS) // pairs))


def coopmat_tiles(columns: int, tokens: int, device: Capabilities) -> int:
    """Tiles of 8 tokens that a product takes from scratch memory, in whole groups of up to 8; 0: it does not."""
    tiles = min(8, 1 << (-(-tokens // 8) - 1).bit_length())
    tiles *= -(-tokens // (8 * tiles))
    fits = 16 * columns * tiles <= SCRATCH_BYTES - 4 * COUNTERS
    return tiles if device.register_coopmat and tokens > 8 and fits else 0


FEW_TOKENS = 8  # up to here integer dot products are faster than matrices that go through shared memory,
TWO_TOKENS = 2  # and up to here than those that do not


def matmul(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """Few tokens: a workgroup a panel of 16 rows; with GLU one for the four panels that make 32 outputs."""
    layout = LAYOUT_NAMES[int(scalars["format"])]
    tokens = counts["rows" if scalars["count"] else "tokens"]
    panels = -(-int(scalars["rows"]) // PANEL_ROWS)
    choice = device.choices.of("matmul", scalars, tokens)  # "integer_dot": not on matrix units
    if not LAYOUTS[layout].quantised:
        return Dispatch(
            panels // 4 if scalars["epilogue"] else panels, constants=(choice.get("threads", 128),)
        )
    columns = int(scalars["columns"])
    tiles = coopmat_tiles(columns, tokens, device)
    if (
        device.register_coopmat
        and (tiles or tokens <= 8)
        and not choice.get("integer_dot", tokens <= TWO_TOKENS)
    ):
        return _matmul_coopmat_reg(f"matmul_{layout}", scalars, panels, tokens, tiles, choice)
    fits = 2 * (tokens + 127) * (columns + 63) < SCRATCH_BYTES - 4 * COUNTERS
    fits = (
        fits and LAYOUTS[layout].matrix_bytes(PANEL_ROWS * panels, columns) < 1 << 32
    )  # as its shader's offsets
    if not choice.get("integer_dot", tokens <= FEW_TOKENS) and fits and has_matrix_units(device):
        return _matmul_coopmat(f"matmul_{layout}", scalars, panels, tokens)
    return _matmul_dots(layout, scalars, panels, tokens, device, choice)


def _matmul_dots(
    layout: str, scalars: Scalars, panels: int, tokens: int, device: Capabilities, choice: Choice
) -> Dispatch:
    """By integer dot products, of 1, 2, 4 or 8 tokens together."""
    columns, glu = int(scalars["columns"]), bool(scalars["epilogue"])
    together = tokens if tokens <= TWO_TOKENS else 4 if tokens <= 4 else 8
    two_panels = glu and together <= TWO_TOKENS  # a lane has one of gate and one of up
    # Threads of a panel: enough in all to fill the device, if there are blocks of columns for them.
    most = min({1: 512, 2: 384}.get(together, 128), columns // 8, device.workgroup_invocations)
    most //= 4 if glu else 1
    wanted = min(ENOUGH_THREADS.get(device.kind, 1) / panels, most)
    least = 64
    if two_panels and together == 2:  # twice the sums: as much in registers with half the threads
        wanted, least = wanted / 2, max(32, device.subgroup_max // 2)
    sizes = range(least, max(least, most) + 1, min(least, 64))

    def rank(n: int) -> tuple[bool, float]:
        """Whole rounds first, but not with less than half of what is wanted."""
        whole = together > 2 or (2 * n >= wanted and _even(layout, columns, n, glu, together))
        return not whole, abs(math.log(n / wanted))

    threads = choice.get("threads", min(sizes, key=rank)) * (4 if glu else 1)
    meeting = (2 if two_panels else 1) * threads // device.subgroup_min * PANEL_ROWS * together
    shader = f"matmul_{layout}_t{together}" + ("_glu" if two_panels else "")
    return Dispatch(
        panels // 4 if glu else panels,
        shader=shader,
        constants=(threads, int(glu), meeting, *([columns] if together <= TWO_TOKENS else [])),
        subgroup=choice.get("subgroup", 0),
        known=known_scalars(device) if tokens == 1 else 0,
    )


def _even(layout: str, columns: int, threads: int, glu: bool, tokens: int) -> bool:
    """Whether so many threads a panel, with the blocks that each has on its way, go through a row in whole rounds."""
    # As matmul.slang has them: for GLU two panels share threads (one token of Q4_1, Q5 and Q8_0 has more blocks).
    one = layout in ("q4_k", "q5_k") or (layout == "q6_k" and tokens == 2)
    blocks = 1 if one and not glu else 2
    return columns // 32 % (threads // PANEL_ROWS * blocks) == 0


def _matmul_coopmat_reg(
    kernel: str, scalars: Scalars, panels: int, tokens: int, expanded: int, choice: Choice
) -> Dispatch:
    """On matrix units, with weights in registers: a subgroup 32 or 64 rows of up to 8 tiles of 8 tokens.

    `expanded`: tiles that come from scratch memory; 0: the one tile is taken from the quantised activations themselves.
    """
    glu, tiles = bool(scalars["epilogue"]), min(8, expanded or 1)
    groups = max(1, expanded // 8)
    pairs = 2 if glu or groups > 1 else 1  # of panels
    # split_k: subgroups that share the columns of the same rows, more where rows are few; units: subgroups with rows of
    # their own.
    if groups > 1:
        split_k = (
            1 if -(-panels // 16) * groups >= 256 else 4 if scalars["columns"] >= 2 * scalars["rows"] else 2
        )
        units = 4 // split_k
    elif panels >= HEAD_PANELS and tiles < 8:
        pairs, split_k, units = (1, 4, 2) if tiles == 1 else (2, 2, 2)
    elif tokens <= 4:
        # For 5 to 8 tokens this is faster too, by 5%; but then a ninth, which takes a second tile, would cost more than
        # it brings, and a batch's tokens a second shall not fall as it grows.
        pairs = 2 if glu or panels >= 256 else 1
        split_k, units = 16 if not glu and scalars["columns"] >= 2048 else 8, 1
    else:
        split_k = 4 if tiles == 8 or (glu and tiles != 2) else 8
        units = 2 if (glu and tiles == 1) or (not glu and tiles == 4) else 1
    pairs, split_k = choice.get("pairs", pairs), choice.get("split_k", split_k)
    units = choice.get("units", units)
    shader = f"{kernel}_{'x' if expanded else 'q'}u{pairs}n{tiles}"
    expand = (
        Dispatch(-(-int(scalars["columns"]) // 128), expanded, shader="expand_coopmat_reg")
        if expanded
        else None
    )
    return Dispatch(
        -(-panels // (2 * pairs * units)), groups, shader=shader, constants=(32 * split_k * units, split_k),
        subgroup=32, scratch=expanded > 0, before=expand,
    )  # fmt: skip


def _matmul_coopmat(kernel: str, scalars: Scalars, panels: int, tokens: int) -> Dispatch:
    """On matrix units: 32 or 64 rows of up to 64 tokens a workgroup, or 128 rows of 128 tokens."""
    columns = -(-int(scalars["columns"]) // 64) * 64
    tiles = 1 if tokens <= 16 else 2 if tokens <= 32 else 4
    many = tokens > 64 or (tiles == 4 and scalars["epilogue"])
    covered = -(-tokens // 128) * 128 if many else 16 * tiles
    expand = Dispatch(-(-columns // (4 * 128)), covered, shader="expand_coopmat")
    if many:
        return Dispatch(
            -(-panels // 8), covered // 128, shader=f"{kernel}_many", subgroup=32, scratch=True, before=expand
        )
    height = 4 if scalars["epilogue"] else 2
    name = f"{kernel}_p{height}n{tiles}"
    return Dispatch(-(-panels // height), shader=name, subgroup=32, scratch=True, before=expand)


def has_matrix_units(device: Capabilities) -> bool:
    """float16 matrices of 16 x 16 x 16 with float32 sums, for subgroups of 32."""
    shape = (16, 16, 16, "f16", "f16", "f32")
    found = any((s.m, s.n, s.k, s.a, s.b, s.c) == shape for s in device.matrix_shapes)
    return found and device.subgroup_min <= 32 <= device.subgroup_max and device.shared_memory >= 48 << 10


def sample(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A few workgroups a row: reading 1 MB takes no more than 16."""
    parts = max(2, min(16, ENOUGH_WORKGROUPS.get(device.kind, 8) // 4 // max(1, counts["rows"])))
    return Dispatch(parts, counts["rows"], scratch=True)


GRIDS: dict[str, Grid] = {
    "attention": attention,
    **{f"embed_{name}": embed for name in LAYOUTS},
    "glu": glu,
    "norm": norm,
    "rope": rope,
    **{f"matmul_{name}": matmul for name in LAYOUTS},
    "quantise": quantise,
    "sample": sample,
}

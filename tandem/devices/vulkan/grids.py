"""How each kernel is dispatched on Vulkan: workgroups, and which entry point with which specialisation constants.

One function a kernel name: (scalars, counts, device) -> Dispatch. `counts` are those of the bucket that is being
recorded ("tokens", "rows", "work"): the kernel skips what lies past the counts in StepInputs' header.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.devices.vulkan.capabilities import Capabilities
from tandem.kernels.kernel import Counts, Scalars
from tandem.kernels.panels import LANES, LAYOUT_NAMES, LAYOUTS


@dataclass(frozen=True)
class Dispatch:
    x: int
    y: int = 1
    z: int = 1
    shader: str = ""  # entry point; "": the kernel's own name
    constants: tuple[
        int, ...
    ] = ()  # specialisation constants 0, 1, ...; absent ones keep the shader's default
    subgroup: int = 0  # invocations; 0: the driver's choice
    scratch: bool = False  # uses the device's scratch memory: not beside another launch that does
    before: Dispatch | None = None  # runs first, with the same arguments; this one waits for it


# Memory in which the workgroups of a launch meet. It begins with counters, which are 0 between launches.
SCRATCH_BYTES, COUNTERS = 32 << 20, 16384
ENOUGH_WORKGROUPS = {"discrete": 1024, "integrated": 256}  # to fill a device; software is filled by any
MOST_SPLITS = 64  # of the keys of a query
# Right with a software stand-in for matrices, wrong on the one GPU it was tried on: not chosen until it is understood.
MATRIX_ATTENTION = False

Grid = Callable[[Scalars, Counts, Capabilities], Dispatch]


def quantise(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A thread a block of 32 columns; y walks the rows."""
    blocks = int(scalars["dim"]) // 32
    return Dispatch(-(-blocks // 64), counts["rows" if scalars["count_rows"] else "tokens"])


def norm(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A workgroup a row; the fewer rows there are to hide its latency, the more threads share one."""
    rows = counts["rows" if scalars["use_rows"] else "tokens"]
    dim, most = int(scalars["dim"]), device.workgroup_invocations
    threads = min(max(64, 1 << (-(-dim // 8) - 1).bit_length()) if rows <= 64 else 256, most)
    while threads * 32 < dim and threads < most:
        threads *= 2
    strides = (dim, *(int(scalars[f"{name}_stride"]) for name in ("x", "add", "out")))
    held = 2 if threads * 8 >= dim else 8  # groups of 4 columns a thread
    return Dispatch(rows, shader=f"norm_{held}", constants=(threads, int(all(n % 4 == 0 for n in strides))))


def glu(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    return Dispatch(-(-int(scalars["dim"]) // (4 * 64)), counts["tokens"])


def embed(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A thread 8 columns of a token."""
    return Dispatch(-(-int(scalars["columns"]) // (8 * 64)), counts["tokens"])


def rope(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A workgroup a head of a token: q's, k's and v's."""
    return Dispatch(int(scalars["q_heads"] + 2 * scalars["kv_heads"]), counts["tokens"])


def attention(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A workgroup some queries of a work item and a KV head; of few items, each with a part of the keys."""
    kv_heads, dim = int(scalars["kv_heads"]), int(scalars["head_dim"])
    rows = 1 if counts["tokens"] <= counts["work"] else 16  # of an item, as a rule
    together = rows * int(scalars["q_heads"]) // kv_heads
    fits_matrices = dim % 16 == 0 and dim <= 256 and not scalars["kv_f32"]
    matrix = (
        MATRIX_ATTENTION and counts["tokens"] > 16 and rows > 1 and fits_matrices and has_matrix_units(device)
    )
    queries = 32 if matrix else min(8 if dim <= 256 else 4, 1 << (together - 1).bit_length())
    slots = _attention_slots(scalars, counts, device, -(-together // queries), queries, matrix)
    # Keys at a time, by the size of shared memory; or loads at a time: longer code takes long to compile in software.
    keys, loads = 64 if dim <= 128 else 32, 2 if device.kind == "software" else 8
    constants = (queries, dim, int(scalars["kv_f32"]), keys if matrix else loads)
    shader, subgroup = ("attention_matrix", 32) if matrix else ("attention", 0)
    return Dispatch(kv_heads, counts["work"], slots, shader, constants, subgroup, scratch=True)


def _attention_slots(
    scalars: Scalars, counts: Counts, device: Capabilities, tiles: int, queries: int, matrix: bool
) -> int:
    """Workgroups of a work item and a KV head, for its tiles of queries and the parts of their keys."""
    pairs = max(1, int(scalars["kv_heads"]) * counts["work"])
    least, size = (1, 2) if matrix else (2, 1)  # those on matrix units have more to do
    wanted = max(least, ENOUGH_WORKGROUPS.get(device.kind, 8) // size // pairs)
    longest = min(int(scalars["window"]) or 1 << 30, 16 * int(scalars["table_stride"]))  # keys seen
    wanted = max(tiles, min(wanted, tiles * (longest // 64 + 2)))
    room = (SCRATCH_BYTES - 4 * COUNTERS) // (4 * queries * (int(scalars["head_dim"]) + 4))
    return max(1, min(wanted, MOST_SPLITS, min(room, COUNTERS) // pairs))


FEW_TOKENS = 8  # up to here integer dot products are faster than matrix units


def matmul(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """Few tokens: a workgroup a panel of 16 rows; with GLU one for the four panels that make 32 outputs."""
    layout = LAYOUT_NAMES[int(scalars["format"])]
    tokens = counts["rows" if scalars["count"] else "tokens"]
    panels, glu = -(-int(scalars["rows"]) // LANES), bool(scalars["epilogue"])
    groups = panels // 4 if glu else panels
    if not LAYOUTS[layout].quantised:
        return Dispatch(groups, constants=(128,))
    fits = 2 * (tokens + 127) * (int(scalars["columns"]) + 63) < SCRATCH_BYTES - 4 * COUNTERS
    if tokens > FEW_TOKENS and fits and has_matrix_units(device):
        return _matmul_matrix(f"matmul_{layout}", scalars, panels, tokens)
    together = 1 if tokens == 1 else 4 if tokens <= 4 else 8
    return Dispatch(
        groups, shader=f"matmul_{layout}_t{together}", constants=(256 if glu or panels < 1024 else 128,)
    )


def _matmul_matrix(kernel: str, scalars: Scalars, panels: int, tokens: int) -> Dispatch:
    """On matrix units: 32 or 64 rows of up to 64 tokens a workgroup, or 128 rows of 128 tokens."""
    columns = -(-int(scalars["columns"]) // 64) * 64
    tiles = 1 if tokens <= 16 else 2 if tokens <= 32 else 4
    many = tokens > 64 or (tiles == 4 and scalars["epilogue"])
    covered = -(-tokens // 128) * 128 if many else 16 * tiles
    expand = Dispatch(-(-columns // (4 * 128)), covered, shader="matmul_expand")
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

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


Grid = Callable[[Scalars, Counts, Capabilities], Dispatch]


def quantise(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A thread a block of 32 columns; y walks the rows."""
    blocks = int(scalars["dim"]) // 32
    return Dispatch(-(-blocks // 64), counts["rows" if scalars["count_rows"] else "tokens"])


def norm(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A workgroup a row; the larger the fewer rows there are to hide its latency."""
    rows = counts["rows" if scalars["use_rows"] else "tokens"]
    return Dispatch(rows, constants=(256 if rows > 64 else min(1024, device.workgroup_invocations),))


def glu(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    return Dispatch(-(-int(scalars["dim"]) // (4 * 64)), counts["tokens"])


def embed(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A thread 8 columns of a token."""
    return Dispatch(-(-int(scalars["columns"]) // (8 * 64)), counts["tokens"])


def rope(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A workgroup a head of a token: q's, k's and v's."""
    return Dispatch(int(scalars["q_heads"] + 2 * scalars["kv_heads"]), counts["tokens"])


def attention(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """A workgroup some queries of a work item, of one KV head."""
    group, dim = int(scalars["q_heads"] // scalars["kv_heads"]), int(scalars["head_dim"])
    most = 8 if dim <= 256 else 4  # shared memory
    queries = most if counts["tokens"] > counts["work"] else min(most, 1 << (group - 1).bit_length())
    slots = -(-16 * group // queries) if counts["tokens"] > counts["work"] else -(-group // queries)
    constants = (queries, dim, int(scalars["kv_f32"]), slots)
    return Dispatch(int(scalars["kv_heads"]), counts["work"], slots, constants=constants)


FEW_TOKENS = 8  # up to here integer dot products are faster than matrix units


def matmul(scalars: Scalars, counts: Counts, device: Capabilities) -> Dispatch:
    """Few tokens: a workgroup a panel of 16 rows; with GLU one for the four panels that make 32 outputs."""
    layout = LAYOUT_NAMES[int(scalars["format"])]
    tokens = counts["rows" if scalars["count"] else "tokens"]
    panels = -(-int(scalars["rows"]) // LANES)
    if tokens > FEW_TOKENS and LAYOUTS[layout].quantised and has_matrix_units(device):
        return _matmul_matrix(f"matmul_{layout}", panels, tokens)
    if scalars["epilogue"]:
        return Dispatch(panels // 4, constants=(256,))
    return Dispatch(panels, constants=(128,))


def _matmul_matrix(kernel: str, panels: int, tokens: int) -> Dispatch:
    """On matrix units: 64 rows and up to 64 tokens a workgroup, or 128 rows and 128 tokens."""
    if tokens <= 64:
        tiles = 1 if tokens <= 16 else 2 if tokens <= 32 else 4
        return Dispatch(-(-panels // 4), shader=f"{kernel}_{tiles}", subgroup=32)
    return Dispatch(-(-panels // 8), -(-tokens // 128), shader=f"{kernel}_many", subgroup=32)


def has_matrix_units(device: Capabilities) -> bool:
    """float16 matrices of 16 x 16 x 16 with float32 sums, for subgroups of 32."""
    shape = (16, 16, 16, "f16", "f16", "f32")
    found = any((s.m, s.n, s.k, s.a, s.b, s.c) == shape for s in device.matrix_shapes)
    return found and device.subgroup_min <= 32 <= device.subgroup_max and device.shared_memory >= 48 << 10


GRIDS: dict[str, Grid] = {
    "attention": attention,
    **{f"embed_{name}": embed for name in LAYOUTS},
    "glu": glu,
    "norm": norm,
    "rope": rope,
    **{f"matmul_{name}": matmul for name in LAYOUTS},
    "quantise": quantise,
}

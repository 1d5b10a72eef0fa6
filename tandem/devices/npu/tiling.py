"""How a GEMM is cut: the tile of a core, what is padded. Emulated; not yet run on a Phoenix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.errors import LimitError

COLUMNS, ROWS = 4, 4  # of cores
CORE_BYTES = 64 * 1024
STACK_BYTES = 0xD00  # from the start of a core's memory; as AMD's own GEMM kernels have it
PARAMETER_BYTES = 64  # behind the stack: objects behind them stay aligned
# Bytes at the end, where the linker puts .data, .rodata and .bss; assumed, as none was linked yet.
DATA_BYTES = 1024
DEPTH = 2  # of a FIFO: one object is filled while the other is used

# Published measurements on Phoenix; they rank tilings and are reported nowhere.
OPS_PER_SECOND = 6.76e12
BYTES_PER_SECOND = 15e9
# Storing the accumulators after each call, 32 bytes a cycle, takes as long as a depth of 32 at 256 products a cycle.
STORE_DEPTH = 32
# A core whose C is a single object waits until it has left, a word a cycle: as long as this depth takes, in int32.
DRAIN_DEPTH = 256

# Cores multiply 2 x 2 vector tiles at a time, to use each loaded operand twice.
M_STEP, N_STEP = 8, 16


@dataclass(frozen=True)
class Weights:
    """What B is made of. A vector tile is 4 x `vector_k` times `vector_k` x 8."""

    bits: int
    vector_k: int
    max_magnitude: int


WEIGHTS = {"int8": Weights(8, 8, 128), "int4": Weights(4, 16, 8)}


@dataclass(frozen=True)
class Tiling:
    """A core's tile is m x k times k x n; `rows`, `columns` and `depth` count the array's tiles in the padded GEMM. A
    core holds `c_objects` of C: with one it waits for it to leave, but has room for larger tiles."""

    m: int
    k: int
    n: int
    rows: int
    columns: int
    depth: int
    c_objects: int = DEPTH

    @property
    def padded(self) -> tuple[int, int, int]:
        """M, N and K after padding with zeros."""
        return self.rows * ROWS * self.m, self.columns * COLUMNS * self.n, self.depth * self.k


def core_bytes(m: int, k: int, n: int, out_bytes: int, bits: int = 8, c_objects: int = DEPTH) -> int:
    """Data memory a core needs: its FIFOs' objects, a 32-bit accumulator where the output is narrower, stack,
    parameters and static data."""
    accumulator = 0 if out_bytes == 4 else m * n * 4
    objects = DEPTH * (m * k + k * n * bits // 8) + c_objects * m * n * out_bytes
    return objects + accumulator + STACK_BYTES + PARAMETER_BYTES + DATA_BYTES


def seconds(tiling: Tiling, out_bytes: int, weights: str = "int8") -> float:
    """The roofline that ranks tilings: A is read again for each column of tiles, B for each row of them."""
    M, N, K = tiling.padded
    w = WEIGHTS[weights]
    moved = M * K * tiling.columns + K * N * w.bits // 8 * tiling.rows + M * N * out_bytes
    faster = w.vector_k / WEIGHTS["int8"].vector_k  # products a cycle; that a GEMM keeps it is not published
    drain = DRAIN_DEPTH * out_bytes / 4 if tiling.c_objects == 1 else 0
    computed = 2 * M * N * (K * (1 / faster + STORE_DEPTH / tiling.k) + drain) / OPS_PER_SECOND
    return max(computed, moved / BYTES_PER_SECOND)


def best(M: int, N: int, K: int, out_bytes: int, weights: str = "int8") -> Tiling:
    """The fastest tiling that fits; of equals the one with the fewest kernel calls."""
    if min(M, N, K) < 1:
        raise LimitError("positive shape", f"a GEMM of {M} x {K} times {K} x {N} has nothing to compute")
    found = []
    step = WEIGHTS[weights].vector_k
    for m, n, most, c_objects in _tiles(out_bytes, weights):
        depth = -(-K // most)
        k = -(-K // (depth * step)) * step
        tiling = tile_gemm(M, N, K, (m, k, n), c_objects)
        calls = tiling.rows * tiling.columns * tiling.depth
        found.append((seconds(tiling, out_bytes, weights), calls, m, n, c_objects, tiling))
    return min(found, key=lambda each: each[:-1])[-1]


def resident(shapes: Sequence[tuple[int, int, int]], out_bytes: int, weights: str = "int8") -> list[Tiling]:
    """The GEMMs of `shapes` (M, N, K), all with one tile of a core, so that they share one configuration: the tile
    that is fastest for all of them together."""
    step, found = WEIGHTS[weights].vector_k, []
    for m, n, most, c_objects in _tiles(out_bytes, weights):
        whole = {math.ceil(K / math.ceil(K / most) / step) * step for _, _, K in shapes}
        for k in whole | {most}:
            tilings = [tile_gemm(M, N, K, (m, k, n), c_objects) for M, N, K in shapes]
            total = sum(seconds(t, out_bytes, weights) for t in tilings)
            found.append((total, m, k, n, c_objects, tilings))
    return min(found, key=lambda each: each[:-1])[-1]


def tile_gemm(M: int, N: int, K: int, tile: tuple[int, int, int], c_objects: int = DEPTH) -> Tiling:
    """M x K times K x N in tiles of m, k, n."""
    m, k, n = tile
    return Tiling(m, k, n, -(-M // (ROWS * m)), -(-N // (COLUMNS * n)), -(-K // k), c_objects)


def _tiles(out_bytes: int, weights: str) -> Iterator[tuple[int, int, int, int]]:
    """m and n that fit a core, with the largest k beside them, and the objects of C."""
    w = WEIGHTS[weights]
    for m in range(M_STEP, 136, M_STEP):
        for n in range(N_STEP, 264, N_STEP):
            for c_objects in (1, DEPTH):
                room = CORE_BYTES - core_bytes(m, 0, n, out_bytes, c_objects=c_objects)
                most = room // (DEPTH * (m + n * w.bits // 8)) // w.vector_k * w.vector_k
                if most >= w.vector_k:
                    yield m, n, most, c_objects

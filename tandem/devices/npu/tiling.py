"""How a GEMM is cut: the tile of a core, what is padded. Emulated; not yet run on a Phoenix."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import LimitError

COLUMNS, ROWS = 4, 4  # of cores
CORE_BYTES = 64 * 1024
STACK_BYTES = 1024  # of a core's data memory
DEPTH = 2  # of every FIFO: one object is filled while the other is used

# Published measurements on Phoenix; they rank tilings and are reported nowhere.
OPS_A_SECOND = 6.76e12
BYTES_A_SECOND = 15e9
# Storing the accumulators after each call, 32 bytes a cycle, takes as long as a depth of 32 at 256 products a cycle.
STORE_DEPTH = 32

# Cores multiply 2 x 2 vector tiles of 4x8x8 at a time, to use each loaded operand twice.
M_STEP, K_STEP, N_STEP = 8, 8, 16


@dataclass(frozen=True)
class Tiling:
    """A core's tile is m x k times k x n; `rows`, `columns` and `depth` count the array's tiles in the padded GEMM."""

    m: int
    k: int
    n: int
    rows: int
    columns: int
    depth: int

    @property
    def padded(self) -> tuple[int, int, int]:
        """M, N and K after padding with zeros."""
        return self.rows * ROWS * self.m, self.columns * COLUMNS * self.n, self.depth * self.k


def core_bytes(m: int, k: int, n: int, out_bytes: int) -> int:
    """Data memory a core needs: its FIFOs' objects, a 32-bit accumulator where the output is narrower, the stack."""
    accumulator = 0 if out_bytes == 4 else m * n * 4
    return DEPTH * (m * k + k * n + m * n * out_bytes) + accumulator + STACK_BYTES


def seconds(tiling: Tiling, out_bytes: int) -> float:
    """The roofline that ranks tilings: A is read again for each column of tiles, B for each row of them."""
    M, N, K = tiling.padded
    moved = M * K * tiling.columns + K * N * tiling.rows + M * N * out_bytes
    return max(2 * M * N * K * (1 + STORE_DEPTH / tiling.k) / OPS_A_SECOND, moved / BYTES_A_SECOND)


def best(M: int, N: int, K: int, out_bytes: int) -> Tiling:
    """The fastest tiling that fits; of equals the one with the fewest kernel calls."""
    if min(M, N, K) < 1:
        raise LimitError("positive shape", f"a GEMM of {M} x {K} times {K} x {N} has nothing to compute")
    found = []
    for m in range(M_STEP, 136, M_STEP):
        for n in range(N_STEP, 264, N_STEP):
            room = CORE_BYTES - core_bytes(m, 0, n, out_bytes)
            most = room // (DEPTH * (m + n)) // K_STEP * K_STEP
            if most < K_STEP:
                continue
            depth = -(-K // most)
            k = -(-K // (depth * K_STEP)) * K_STEP
            tiling = Tiling(m, k, n, -(-M // (ROWS * m)), -(-N // (COLUMNS * n)), depth)
            calls = tiling.rows * tiling.columns * tiling.depth
            found.append((seconds(tiling, out_bytes), calls, m, n, tiling))
    return min(found)[-1]

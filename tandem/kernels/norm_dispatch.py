"""How norms are dispatched on a GPU."""

from __future__ import annotations

from tandem.errors import DeviceError
from tandem.kernels.dispatch import Dispatch, Gpu, compiled_scalars
from tandem.kernels.kernel import Counts, Scalars
from tandem.kernels.matmul_dispatch import coopmat_reg_tiles

MAX_COLUMNS_OF_THREAD = 32  # columns per thread in norm.slang: 8 groups of 4
FINISH_THREADS = 128  # threads of a workgroup of norm_finish, each with 4 columns


def norm(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """One workgroup per row. With few rows, more threads per row hide its latency."""
    rows = counts["rows" if scalars["use_rows"] else "tokens"]
    dim, max_threads = int(scalars["dim"]), gpu.workgroup_invocations
    few = max(64, 1 << (-(-dim // 12) - 1).bit_length())
    threads = min(few if rows <= 64 else 512 if dim >= 4096 else 256, max_threads)
    while threads * MAX_COLUMNS_OF_THREAD < dim and threads < max_threads:
        threads *= 2
    if threads * MAX_COLUMNS_OF_THREAD < dim:
        raise DeviceError(
            f"{gpu.name} normalises at most {MAX_COLUMNS_OF_THREAD * threads} columns, not {dim}: use the device cpu"
        )
    threads = gpu.choices.of("norm", scalars, rows).get("threads", threads)
    strides = (dim, *(int(scalars[f"{name}_stride"]) for name in ("x", "add", "out")))
    # Groups of 4 columns per thread.
    column_groups = 2 if 8 * threads >= dim else 3 if 12 * threads >= dim else 8
    aligned = all(n % 4 == 0 for n in strides)
    # The next matmul may read the activations as float16 from scratch memory, besides int8 (expand.py).
    tiles = coopmat_reg_tiles(dim, rows, gpu) if scalars["out_q8"] and aligned else 0
    added, out_q8, use_rows = (int(scalars[n] > 0) for n in ("add_stride", "out_q8", "use_rows"))
    constants = (threads, int(aligned), tiles, added, out_q8, use_rows)
    return Dispatch(rows, shader=f"norm_{column_groups}", constants=constants, scratch="w" if tiles else "")


def norm_finish(scalars: Scalars, counts: Counts, gpu: Gpu) -> Dispatch:
    """Many workgroups divide the one row."""
    constants = (FINISH_THREADS, 1, 0, 1, int(scalars["out_q8"]), 0, int(scalars["rows_per_sum"]))
    return Dispatch(
        -(-int(scalars["dim"]) // (4 * FINISH_THREADS)),
        shader="norm_spread",
        constants=constants,
        compiled_scalars=compiled_scalars(gpu),
    )

"""Weights from the file's rows to panels (repack.c), over several threads; every device keeps the same panels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tandem import native
from tandem.devices.device import Bytes, Piece
from tandem.errors import DeviceError
from tandem.kernels.abi import PANEL_ROWS
from tandem.kernels.panels import LAYOUTS
from tandem.native import ffi

REPACK_BYTES = 1 << 20  # a thread's share: large enough to hide the call, small enough to balance


def repack_all(pieces: Sequence[tuple[Piece, int]]) -> None:
    """Pieces and the addresses of their place 0, in one call and this thread: others may call it at the same time."""
    jobs = ffi.new("repack_job[]", len(pieces))
    for job, (piece, address) in zip(jobs, pieces, strict=True):
        job.layout, job.rows, job.columns = _name(piece.tensor.dtype), len(piece.rows), piece.columns
        job.file = ffi.cast("uint8_t *", piece.rows.ctypes.data)
        job.out = ffi.cast("uint8_t *", address)
        job.first_panel, job.run, job.period = piece.first, piece.run, piece.period
    if native.load().tandem_repack_all(jobs, len(pieces)):
        raise DeviceError(f"no panels for {pieces[0][0].tensor.dtype}: report this as a bug")


@cache
def _name(layout: str) -> Any:
    return ffi.new("char[]", layout.encode())


class Repacker:
    def __init__(self, threads: int) -> None:
        from concurrent.futures import ThreadPoolExecutor  # takes 4 ms, and the CPU device does without it

        self._library = native.load()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="repack")

    def repack(
        self, layout: str, rows: Bytes, columns: int, target: Bytes, first: int, run: int, period: int
    ) -> None:
        """One piece into memory of the host's, over several threads."""
        step = max(1, REPACK_BYTES // LAYOUTS[layout].matrix_bytes(PANEL_ROWS, columns)) * PANEL_ROWS
        source, out = rows.ctypes.data, ffi.cast("uint8_t *", target.ctypes.data)

        def part(begin: int) -> None:
            start = ffi.cast("uint8_t *", source + begin * rows.strides[0])
            count = min(step, len(rows) - begin)
            self._library.tandem_repack(
                layout.encode(), start, count, columns, out, first + begin // PANEL_ROWS, run, period
            )

        if len(rows) <= step:
            part(0)
        else:
            list(self._threads.map(part, range(0, len(rows), step)))

    def close(self) -> None:
        self._threads.shutdown()

"""Repacks rows of GGUF blocks into panels (repack.c), for every device that stores weights in panels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tandem import native
from tandem.devices.device import Bytes, WeightRows
from tandem.errors import DeviceError
from tandem.kernels.abi import PANEL_ROWS
from tandem.kernels.panels import LAYOUTS
from tandem.native import ffi

# Bytes that a thread repacks at a time: large enough to hide the call, small enough to balance.
REPACK_BYTES = 1 << 20


def repack_all(rows: Sequence[tuple[WeightRows, int]]) -> None:
    """Repacks rows to the addresses of their place 0, in one C call on this thread. Several threads may call it."""
    jobs = ffi.new("repack_job[]", len(rows))
    for job, (each, address) in zip(jobs, rows, strict=True):
        job.layout, job.rows, job.columns = _name(each.tensor.dtype), len(each.rows), each.columns
        job.file = ffi.cast("uint8_t *", each.rows.ctypes.data)
        job.out = ffi.cast("uint8_t *", address)
        job.first_panel, job.run, job.period = each.first, each.run, each.period
    if native.load().tandem_repack_all(jobs, len(rows)):
        raise DeviceError(f"no panels for {rows[0][0].tensor.dtype}: report this as a bug")


@cache
def _name(layout: str) -> Any:
    return ffi.new("char[]", layout.encode())


class Repacker:
    def __init__(self, threads: int) -> None:
        # Imported late: it takes 4 ms, and the CPU device does not need it.
        from concurrent.futures import ThreadPoolExecutor

        self._library = native.load()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="repack")

    def repack(
        self, layout: str, rows: Bytes, columns: int, target: Bytes, first: int, run: int, period: int
    ) -> None:
        """Repacks rows into host memory, on several threads."""
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

"""Weights from the file's rows to panels (repack.c), over several threads; every device keeps the same panels."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tandem.devices.cpu import library
from tandem.devices.cpu.library import ffi
from tandem.devices.device import Bytes
from tandem.kernels.panels import LANES, LAYOUTS

REPACK_BYTES = 4 << 20  # a thread's share: large enough to hide the call, small enough to balance


class Repacker:
    def __init__(self, threads: int) -> None:
        self._library = library.load()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="repack")

    def repack(
        self, layout: str, rows: Bytes, columns: int, target: Bytes, first: int, run: int, period: int
    ) -> None:
        """As Device.repack, into memory of the host's."""
        step = max(1, REPACK_BYTES // LAYOUTS[layout].matrix_bytes(LANES, columns)) * LANES
        source, out = rows.ctypes.data, ffi.cast("uint8_t *", target.ctypes.data)

        def part(begin: int) -> None:
            start = ffi.cast("uint8_t *", source + begin * rows.strides[0])
            count = min(step, len(rows) - begin)
            self._library.tandem_repack(
                layout.encode(), start, count, columns, out, first + begin // LANES, run, period
            )

        if len(rows) <= step:
            part(0)
        else:
            list(self._threads.map(part, range(0, len(rows), step)))

    def close(self) -> None:
        self._threads.shutdown()

"""What this machine can do at most: bytes read and int8 operations done in a second."""

from __future__ import annotations

from tandem.bench.bandwidth import HostReads
from tandem.bench.roofline import host_ops

READ = 1e9  # bytes a measurement reads at least


class Limits:
    """Both limits over all threads together.

    `nbytes` are read again and again, as a model's weights are: what stays in the caches between steps counts.
    """

    def __init__(self, threads: int, nbytes: float) -> None:
        self._threads, self._reads = threads, HostReads(threads, int(nbytes))

    def read_gb_per_s(self) -> float:
        return self._reads.rate(READ) / 1e9

    def int8_gop_per_s(self) -> float:
        """0: not known for this CPU."""
        return host_ops(self._threads) / 1e9

"""What this machine can do at most: bytes read and int8 operations done in a second."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tandem.bench.bandwidth import HostReads

SOURCE = r"""
#include <immintrin.h>
// Operations done by `rounds` turns of 16 independent int8 dot products; 0 where there is no such instruction.
long multiply(long rounds) {
#ifdef __AVX512VNNI__
    __m512i sum[16], a = _mm512_set1_epi32((int)rounds), b = _mm512_set1_epi32(0x01020304);
    for (int j = 0; j < 16; j++) sum[j] = _mm512_set1_epi32(j);
    for (long i = 0; i < rounds; i++)
        for (int j = 0; j < 16; j++) sum[j] = _mm512_dpbusd_epi32(sum[j], a, b);
    for (int j = 1; j < 16; j++) sum[0] = _mm512_xor_si512(sum[0], sum[j]);
    __asm__ volatile("" : : "v"(sum[0]));
    return rounds * 16 * 64 * 2;
#else
    return 0;
#endif
}
"""
TURNS = 10_000_000
READ = 1e9  # bytes a measurement reads at least


class Limits:
    """Both limits over all threads together.

    `nbytes` are read again and again, as a model's weights are: what stays in the caches between steps counts.
    """

    def __init__(self, threads: int, nbytes: float) -> None:
        self._library, self._threads = _compile(), threads
        self._reads = HostReads(threads, int(nbytes))

    def read_gb_per_s(self) -> float:
        return self._reads.rate(READ) / 1e9

    def int8_gop_per_s(self) -> float:
        """The best of a few; 0: this CPU has no int8 dot product."""
        operations = self._library.multiply(1) * TURNS * self._threads
        seconds = [_together(self._threads, lambda i: self._library.multiply(TURNS)) for _ in range(5)]
        return float(operations / min(seconds) / 1e9)


def _compile() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "limits.c"), Path(folder, "limits.so")
        source.write_text(SOURCE)
        subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", target, source], check=True)
        library = ctypes.CDLL(str(target))
    library.multiply.argtypes, library.multiply.restype = [ctypes.c_long], ctypes.c_long
    return library


def _together(threads: int, work: Callable[[int], object]) -> float:
    """Seconds until all threads have done their share; C calls run without the interpreter's lock."""
    team = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    started = time.perf_counter()
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    return time.perf_counter() - started

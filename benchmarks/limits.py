"""What this machine can do at most: bytes read and int8 operations done in a second, measured by a few lines of C."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

SOURCE = r"""
#include <immintrin.h>
typedef unsigned long long lanes __attribute__((vector_size(64)));

unsigned long long read_all(const lanes *data, long count) {
    lanes sum[8] = {0};
    for (long i = 0; i + 8 <= count; i += 8)
        for (int j = 0; j < 8; j++) sum[j] ^= data[i + j];
    for (int j = 1; j < 8; j++) sum[0] ^= sum[j];
    return sum[0][0];
}

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


def measure(threads: int, nbytes: float, repeats: int = 7) -> dict[str, float]:
    """{"read_gb_per_s", "int8_gop_per_s"}: the best of the repeats, over all threads together; 0: not known.

    `nbytes` are read again and again, as a model's weights are: what stays in the caches between steps counts.
    """
    share = int(nbytes / threads) // 512 * 512
    with tempfile.TemporaryDirectory() as folder:
        library = _compile(Path(folder))
        buffers = [np.ones(share + 64, np.uint8) for _ in range(threads)]
        starts = [-(-buffer.ctypes.data // 64) * 64 for buffer in buffers]
        passes = max(1, int(1e9 / nbytes))
        reading = [
            _together(threads, lambda i: [library.read_all(starts[i], share // 64) for _ in range(passes)])
            for _ in range(repeats)
        ]
        operations = library.multiply(1) * TURNS * threads
        working = [_together(threads, lambda i: library.multiply(TURNS)) for _ in range(repeats)]
    return {
        "read_gb_per_s": share * threads * passes / min(reading) / 1e9,
        "int8_gop_per_s": operations / min(working) / 1e9,
    }


def _compile(folder: Path) -> ctypes.CDLL:
    source, target = folder / "limits.c", folder / "limits.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", target, source], check=True)
    library = ctypes.CDLL(str(target))
    library.read_all.argtypes, library.read_all.restype = [ctypes.c_void_p, ctypes.c_long], ctypes.c_ulonglong
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


if __name__ == "__main__":
    print(measure(threads=2, nbytes=1e9))

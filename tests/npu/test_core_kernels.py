"""The cores' C++ kernels, built with a stand-in for the AIE API, equal the emulator's. Not yet run on a Phoenix."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.devices.npu import emit, kernels
from tandem.devices.npu.plan import OUTPUTS, ROUNDINGS, plan_gemm
from tandem.devices.npu.tiling import WEIGHTS, Tiling

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
BUILDS = [
    *((Tiling(8, 8, 16, 1, 1, 1), "int8", output) for output in OUTPUTS),
    (Tiling(24, 40, 48, 1, 1, 1), "int8", "int16"),
    (Tiling(8, 16, 16, 1, 1, 1), "int4", "int32"),
    (Tiling(24, 48, 48, 1, 1, 1), "int4", "int8"),
]
Built = tuple[Any, Tiling, str, str]


@pytest.fixture(scope="module", params=BUILDS, ids=str)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    tiling, weights, output = request.param
    plan = plan_gemm(*tiling.padded, output, weights=weights, tiling=tiling)
    library = tmp_path_factory.mktemp("npu") / "gemm.so"
    stand_in = Path(__file__).parent / "stand_in"
    options = ["-std=c++20", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{stand_in}"]
    subprocess.run(
        [COMPILER, *options, *emit.kernel_options(plan), str(emit.KERNEL_SOURCE), "-o", str(library)],
        check=True,
    )
    return ctypes.CDLL(str(library)), tiling, weights, output


def pointer(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def test_multiply(built: Built) -> None:
    library, t, weights, _ = built
    rng = np.random.default_rng(3)
    sizes = (t.m * t.k, t.k * t.n * WEIGHTS[weights].bits // 8)
    a, b = (rng.integers(-128, 128, size, dtype=np.int8).view(np.uint32) for size in sizes)
    ours, theirs = np.zeros(t.m * t.n, np.uint32), np.full(t.m * t.n, 7, np.uint32)
    library.zero(pointer(theirs))
    for _ in range(2):
        kernels.multiply(a, b, ours, t.m, t.k, t.n, weights)
        library.multiply(pointer(a), pointer(b), pointer(theirs))
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_store(built: Built, rounding: str) -> None:
    library, t, _, output = built
    if output == "int32":
        return  # kernels add up in the output itself, and store nothing
    ends = np.array([-(2**31), 2**31 - 1, -1, 0, 1, -384, -128, 128, 384], np.int64)
    sums = np.resize(np.concatenate([np.arange(-600, 600, 7), ends]), t.m * t.n).astype(np.int32)
    for shift in (0, 1, 2, 8, 15):
        got = np.zeros(t.m * t.n, output)
        getattr(library, f"store_{rounding.replace(' ', '_')}")(pointer(sums), pointer(got), shift)
        assert np.array_equal(got, kernels.narrow(sums, output, shift, rounding))

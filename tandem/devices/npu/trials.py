"""What an owner's NPU is asked to show: exact results, and how fast. Import it only where detect() is content.

Emulated; not yet run on a Phoenix: the figures that come out are the first of their kind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.devices.npu.compile import Tools, compile_configuration, compile_instructions
from tandem.devices.npu.kernels import narrow
from tandem.devices.npu.operands import c_of_words, words_of_a, words_of_b
from tandem.devices.npu.plan import GemmPlan, plan_gemm
from tandem.devices.npu.runtime import GemmJob, Npu
from tandem.errors import TandemError

Data = dict[str, Any]
Shape = tuple[int, int, int]
CHAIN = 16  # GEMMs, four of them in flight at a time


def attempts(tools: Tools, cache: Path, shapes: Sequence[Shape], rounds: int) -> Data:
    """Each by itself: one that fails does not keep the others from being tried."""
    small, *large = shapes
    kinds = [("int8", "int32"), ("int8", "int8"), ("int4", "int32")]
    where = tools, cache
    return {
        "smoke": [_tried(smoke, _plan(small, *kind), *where) for kind in kinds],
        "dispatch": _tried(dispatch, _plan(small), *where, rounds),
        "gemm": [_tried(rate, _plan(shape, *kind), *where, rounds) for shape in large for kind in kinds],
    }


def _plan(shape: Shape, weights: str = "int8", output: str = "int32") -> GemmPlan:
    return plan_gemm(*shape, output, weights=weights, shift=0 if output == "int32" else 7)


def _tried(attempt: Callable[..., Data], *args: Any) -> Data:
    try:
        return attempt(*args)
    except (TandemError, RuntimeError, OSError) as error:
        return {"error": str(error)}


def smoke(plan: GemmPlan, tools: Tools, cache: Path) -> Data:
    """Random numbers, and those at the ends of their range: every bit must be NumPy's."""
    rng = np.random.default_rng(1)
    low, high = (-8, 8) if plan.weights == "int4" else (-128, 128)
    a = rng.integers(-128, 128, (plan.M, plan.K), np.int8)
    b = rng.integers(low, high, (plan.K, plan.N), np.int8)
    a[0], b[:, 0] = -128, low
    begun = time.perf_counter()
    with _opened(plan, tools, cache) as npu:
        opened = time.perf_counter() - begun
        job = _job(npu, plan, a, b)
        npu.chain([job]).start().result()
        job.c.sync_from_device()
        found = c_of_words(plan, job.c.bytes.view(np.uint32))
        wrong = int(np.count_nonzero(found != _expected(plan, a, b)))
    return {**_named(plan), "exact": wrong == 0, "wrong": wrong, "of": found.size, "open_s": opened}


def dispatch(plan: GemmPlan, tools: Tools, cache: Path, rounds: int) -> Data:
    """A GEMM that takes next to no time: alone, and among others."""
    with _opened(plan, tools, cache) as npu:
        one = npu.chain([_zeros(npu, plan)])
        many = npu.chain([_zeros(npu, plan) for _ in range(CHAIN)])
        alone, together = ([chain.start().result() for _ in range(rounds)] for chain in (one, many))
    return {**_named(plan), "seconds": alone, "of_chain": CHAIN, "chain_seconds": together}


def rate(plan: GemmPlan, tools: Tools, cache: Path, rounds: int) -> Data:
    """Operations of the GEMM that was asked for, and the bytes that its plan moves, in a second."""
    with _opened(plan, tools, cache) as npu:
        chain = npu.chain([_zeros(npu, plan)])
        seconds = [chain.start().result() for _ in range(1 + rounds)][1:]
    a, b, c = plan.argument_bytes
    moved = a * plan.tiling.columns + b * plan.tiling.rows + c
    each = median(seconds)
    return {
        **_named(plan),
        "seconds": seconds,
        "ops_per_s": 2 * plan.M * plan.N * plan.K / each,
        "bytes_per_s": moved / each,
    }


def _opened(plan: GemmPlan, tools: Tools, cache: Path) -> Npu:
    npu = Npu(compile_configuration(plan, tools, cache), plan)
    npu.load(plan, compile_instructions(plan, tools, cache))
    return npu


def _job(npu: Npu, plan: GemmPlan, a: npt.NDArray[np.int8], b: npt.NDArray[np.int8]) -> GemmJob:
    job = _zeros(npu, plan)
    for buffer, words in ((job.a, words_of_a(plan, a)), (job.b, words_of_b(plan, b))):
        buffer.bytes[:] = words.view(np.uint8)
        buffer.sync_to_device()
    return job


def _zeros(npu: Npu, plan: GemmPlan) -> GemmJob:
    a, b, c = (npu.allocate(size, i) for i, size in enumerate(plan.argument_bytes))
    for buffer in (a, b):
        buffer.bytes[:] = 0
        buffer.sync_to_device()
    return GemmJob(plan, a, b, c)


def _expected(
    plan: GemmPlan, a: npt.NDArray[np.int8], b: npt.NDArray[np.int8]
) -> npt.NDArray[np.signedinteger]:
    sums = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int32)  # exact: far below 2^53
    return sums if plan.output == "int32" else narrow(sums, plan.output, plan.shift, plan.rounding)


def _named(plan: GemmPlan) -> Data:
    t = plan.tiling
    return {
        "shape": [plan.M, plan.N, plan.K],
        "weights": plan.weights,
        "output": plan.output,
        "tile": [t.m, t.k, t.n],
        "padded": list(t.padded),
    }

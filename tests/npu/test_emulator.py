"""The emulated GEMM equals NumPy's, bit by bit; what goes wrong in a plan is an error with the tile's name."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from tandem.devices.npu.array import Descriptor, Lock, Set, Tile, Use, Wait, Write
from tandem.devices.npu.emulator import EmulatedArray, Order, emulate
from tandem.devices.npu.kernels import narrow
from tandem.devices.npu.operands import c_of_words, pack_int4, unpack_int4, words_of_a, words_of_b
from tandem.devices.npu.plan import ROUNDINGS, GemmPlan, plan_gemm, plan_resident
from tandem.devices.npu.tiling import Tiling
from tandem.errors import EmulationError, ProgramError

Matrix = npt.NDArray[np.int8]


def inputs(plan: GemmPlan, seed: int = 0) -> tuple[Matrix, Matrix]:
    rng = np.random.default_rng(seed)
    a, b = (
        np.frombuffer(rng.bytes(rows * columns), np.int8).reshape(rows, columns)
        for rows, columns in ((plan.M, plan.K), (plan.K, plan.N))
    )
    return a, b >> 4 if plan.weights == "int4" else b


def matmul(a: Matrix, b: Matrix) -> npt.NDArray[np.int64]:
    """a x b in whole numbers: float32 holds the sums of 512 products exactly."""
    total = np.zeros((len(a), b.shape[1]), np.int64)
    for k in range(0, len(b), 512):
        total += (a[:, k : k + 512].astype(np.float32) @ b[k : k + 512].astype(np.float32)).astype(np.int64)
    return total


def narrowed(value: int, shift: int, rounding: str, low: int, high: int) -> int:
    """One output, by the book: exact division, then the rounding's rule, then saturation."""
    whole, rest = divmod(value, 2**shift)
    up = {"floor": False, "half up": 2 * rest >= 2**shift, "half even": 2 * rest > 2**shift}[rounding]
    up = up or (rounding == "half even" and 2 * rest == 2**shift and whole % 2 == 1)
    return min(max(whole + (shift > 0 and up), low), high)


def equal(plan: GemmPlan, order: Order = "upstream", seed: int = 0) -> None:
    a, b = inputs(plan, seed)
    want = matmul(a, b)
    if plan.output != "int32":
        limits = np.iinfo(plan.output)
        exact = np.vectorize(lambda x: narrowed(int(x), plan.shift, plan.rounding, limits.min, limits.max))
        want = exact(want)
    assert np.array_equal(emulate(plan, a, b, order), want)


def test_hundreds_of_shapes() -> None:
    """300 of them: sizes from 1 up, in every residue of the tiles, with the parts in every order."""
    rng = random.Random(7)
    orders: tuple[Order, ...] = ("upstream", "downstream", 1, 2, 3)
    for i in range(300):
        M, N, K = (rng.choice((rng.randint(1, 40), rng.randint(1, 400))) for _ in range(3))
        equal(plan_gemm(M, N, K), orders[i % len(orders)], seed=i)


def test_int4_weights() -> None:
    """100 shapes with weights of four bits: vector tiles are twice as deep, and two weights share a byte."""
    rng = random.Random(11)
    orders: tuple[Order, ...] = ("upstream", "downstream", 4)
    for i in range(100):
        M, N, K = (rng.choice((rng.randint(1, 40), rng.randint(1, 400))) for _ in range(3))
        output = ("int32", "int8", "int16")[i % 3]
        plan = plan_gemm(M, N, K, output, weights="int4", shift=0 if output == "int32" else 5)
        equal(plan, orders[i % len(orders)], seed=i)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("order", ["upstream", "downstream", 6])
def test_one_configuration_for_many_shapes(weights: str, order: Order) -> None:
    """One dispatch after the other on an array that is configured once, with odd and even numbers of objects."""
    shapes = [(40, 90, 50), (1, 300, 70), (70, 16, 200), (40, 90, 50), (130, 33, 16)]
    plans = plan_resident(shapes, "int16", weights=weights, shift=3)
    assert len({plan.configuration for plan in plans}) == 1
    assert len({plan.tiling.depth for plan in plans}) > 1
    array = EmulatedArray(plans[0], order)
    for i, plan in enumerate(plans):
        a, b = inputs(plan, i)
        got = c_of_words(plan, array.dispatch(plan, words_of_a(plan, a), words_of_b(plan, b)))
        assert np.array_equal(got, narrow(matmul(a, b).astype(np.int32), "int16", 3, "half even"))


@pytest.mark.fast
def test_another_configuration_is_refused() -> None:
    array, other = EmulatedArray(SMALL), plan_gemm(40, 40, 40, tiling=Tiling(8, 8, 16, 2, 1, 5))
    a, b = inputs(other)
    with pytest.raises(EmulationError, match="configured for another tile"):
        array.dispatch(other, words_of_a(other, a), words_of_b(other, b))
    with pytest.raises(EmulationError, match="words"):
        array.dispatch(SMALL, words_of_a(other, a), words_of_b(other, b))


@pytest.mark.fast
def test_int4_is_packed_and_unpacked() -> None:
    numbers = np.arange(-8, 8, dtype=np.int8).reshape(2, 8)
    assert pack_int4(numbers)[0, 0] == np.array(0x98, np.uint8).view(np.int8)  # -8, then -7 in the upper half
    assert np.array_equal(unpack_int4(pack_int4(numbers)), numbers)
    plan = plan_gemm(8, 16, 16, weights="int4")
    with pytest.raises(ProgramError, match="do not fit"):
        words_of_b(plan, np.full((16, 16), 8, np.int8))


def test_forced_tilings() -> None:
    """More tiles in each direction than a small shape would get: rings wrap, tasks wait, chunks of 64 columns begin."""
    for tiling in (
        Tiling(8, 8, 16, 9, 1, 1),
        Tiling(8, 16, 16, 1, 67, 1),
        Tiling(16, 8, 32, 2, 3, 5),
        Tiling(8, 24, 16, 5, 2, 2),
        Tiling(8, 16, 16, 1, 67, 1, c_objects=1),
        Tiling(16, 8, 32, 3, 3, 5, c_objects=1),
    ):
        M, N, K = tiling.padded
        for order in ("upstream", "downstream", 5):
            equal(plan_gemm(M - 1, N - 3, K - 2, tiling=tiling), order)  # type: ignore[arg-type]


@pytest.mark.parametrize("output", ["int8", "int16"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_narrow_outputs(output: str, rounding: str) -> None:
    for shift in (0, 1, 7, 12):
        equal(plan_gemm(20, 50, 70, output, shift=shift, rounding=rounding), seed=shift)


def test_rounding_and_saturation_at_the_ends() -> None:
    values = [
        -(2**31),
        -1025,
        -1024,
        -385,
        -384,
        -129,
        -128,
        -3,
        -2,
        -1,
        0,
        1,
        2,
        3,
        127,
        128,
        384,
        1024,
        2**31 - 1,
    ]
    for output in ("int8", "int16"):
        limits = np.iinfo(output)
        for shift in (0, 1, 2, 8, 31):
            for rounding in ROUNDINGS:
                got = narrow(np.array(values, np.int32), output, shift, rounding)
                assert got.tolist() == [narrowed(v, shift, rounding, limits.min, limits.max) for v in values]


# Outputs and inputs of Gemma 3 27B's matrices: queries, keys and values, attention's output, gate and up, down.
GEMMA_27B = [(4096, 5376), (2048, 5376), (5376, 4096), (21504, 5376), (5376, 21504)]


@pytest.mark.parametrize(("N", "K"), GEMMA_27B)
def test_gemma_3_27b(N: int, K: int) -> None:
    equal(plan_gemm(3, N, K))


def test_gemma_3_27b_in_int4() -> None:
    equal(plan_gemm(3, 2048, 5376, weights="int4"))


SMALL = plan_gemm(160, 128, 32, tiling=Tiling(8, 16, 16, 5, 2, 2))


def fails(plan: GemmPlan, word: str, tile: str, order: Order = "upstream") -> None:
    with pytest.raises(EmulationError, match=word) as error:
        emulate(plan, *inputs(plan), order)
    assert error.value.tile.startswith(tile)


def with_descriptor(old: Descriptor, new: Descriptor) -> GemmPlan:
    return replace(SMALL, descriptors=tuple(new if d == old else d for d in SMALL.descriptors))


@pytest.mark.fast
def test_errors_name_the_tile() -> None:
    core = next(d for d in SMALL.descriptors if d.tile == Tile(1, 3))
    name = "core (1, 3)"
    fails(with_descriptor(core, replace(core, offset=2)), "unaligned", name)
    fails(with_descriptor(core, replace(core, length=core.length + 1)), "over-long", name)
    fails(with_descriptor(core, replace(core, offset=4)), "runs past the end", name)
    fails(with_descriptor(core, replace(core, sizes=(8,), length=8)), "each word", name)
    assert core.acquire and core.release
    fails(with_descriptor(core, replace(core, acquire=None)), "overrun|is left at", name)
    fails(with_descriptor(core, replace(core, release=None)), "deadlock", "core")
    fails(with_descriptor(core, replace(core, acquire=Use(core.acquire.lock, 3))), "deadlock", "core")
    locks = tuple(replace(x, initial=1) if x == Lock(Tile(1, 3), 1, 0) else x for x in SMALL.locks)
    fails(replace(SMALL, locks=locks), "overrun", name, "downstream")


@pytest.mark.fast
def test_errors_of_the_runtime_sequence() -> None:
    hasty = tuple(c for c in SMALL.sequence if not isinstance(c, Wait))
    fails(replace(SMALL, sequence=hasty), "rewritten|overrun", "shim")
    unwritten = tuple(c for c in SMALL.sequence if not isinstance(c, Write))
    fails(replace(SMALL, sequence=unwritten), "never written", "shim")
    fails(replace(SMALL, sequence=SMALL.sequence[:-1]), "left in its queue", "shim")
    fails(replace(SMALL, sequence=(*SMALL.sequence, SMALL.sequence[-1])), "deadlock", "core")
    with pytest.raises(ProgramError, match="give int8"):
        emulate(SMALL, *reversed(inputs(SMALL)))


@pytest.mark.fast
def test_errors_of_parameters() -> None:
    silent = tuple(c for c in SMALL.sequence if not isinstance(c, Set))
    fails(replace(SMALL, sequence=silent), "depth was never written", "core")
    for value in (1, 3):
        wrong = (
            *(replace(c, value=value) for c in SMALL.sequence[:1] if isinstance(c, Set)),
            *SMALL.sequence[1:],
        )
        fails(replace(SMALL, sequence=wrong), "deadlock|left", "")

"""Each limit of a Phoenix NPU: a plan one past it is refused with that limit's name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem.devices.npu.array import Descriptor, Kind, Lock, Port, Push, Set, Start, Tile, Write, words
from tandem.devices.npu.constraints import all_descriptors, check
from tandem.devices.npu.plan import OUTPUTS, GemmPlan, plan_gemm
from tandem.devices.npu.tiling import (
    CORE_BYTES,
    DATA_BYTES,
    STACK_BYTES,
    WEIGHTS,
    Tiling,
    best,
    core_bytes,
    resident,
)
from tandem.errors import LimitError

pytestmark = pytest.mark.fast

PLAN = plan_gemm(64, 128, 96, tiling=Tiling(8, 32, 16, 2, 2, 3))
CORE, MEMORY, SHIM = Tile(1, 3), Tile(2, 1), Tile(0, 0)
Change = Callable[[Descriptor], Descriptor]


def refused(plan: GemmPlan | Callable[[], GemmPlan], limit: str) -> None:
    """By the checks; one that is not made yet by the planner, which asks them."""
    with pytest.raises(LimitError) as error:
        check(plan() if callable(plan) else plan)
    assert error.value.limit == limit, error.value
    assert limit in str(error.value)


def changed(tile: Tile, change: Change) -> GemmPlan:
    """The plan with the first descriptor of a tile changed."""
    if tile.kind is Kind.SHIM:
        i = next(i for i, c in enumerate(PLAN.sequence) if isinstance(c, Write) and c.descriptor.tile == tile)
        command = PLAN.sequence[i]
        assert isinstance(command, Write)
        new = Write(change(command.descriptor))
        return replace(PLAN, sequence=(*PLAN.sequence[:i], new, *PLAN.sequence[i + 1 :]))
    i = next(i for i, d in enumerate(PLAN.descriptors) if d.tile == tile)
    new_one = change(PLAN.descriptors[i])
    return replace(PLAN, descriptors=(*PLAN.descriptors[:i], new_one, *PLAN.descriptors[i + 1 :]))


def view(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Change:
    return lambda d: replace(d, sizes=sizes, strides=strides, length=words(sizes))


def test_the_plan_itself_is_within_all() -> None:
    check(PLAN)


@pytest.mark.parametrize(("tile", "most"), [(CORE, 16), (MEMORY, 48), (SHIM, 16)], ids=str)
def test_descriptors(tile: Tile, most: int) -> None:
    refused(changed(tile, lambda d: replace(d, number=most)), f"{tile.kind.value} descriptors")


@pytest.mark.parametrize(("tile", "most"), [(CORE, 3), (MEMORY, 4), (SHIM, 3)], ids=str)
def test_dimensions(tile: Tile, most: int) -> None:
    check(changed(tile, view((2,) * most, (1,) * most)))
    refused(changed(tile, view((2,) * (most + 1), (1,) * (most + 1))), f"{tile.kind.value} dimensions")


@pytest.mark.parametrize(("tile", "bits"), [(CORE, 8), (MEMORY, 10), (SHIM, 10)], ids=str)
def test_wraps(tile: Tile, bits: int) -> None:
    check(changed(tile, view((2**bits - 1, 2), (1, 1))))
    refused(changed(tile, view((2**bits, 2), (1, 1))), f"{tile.kind.value} wrap")


@pytest.mark.parametrize(("tile", "bits"), [(CORE, 13), (MEMORY, 17), (SHIM, 20)], ids=str)
def test_steps(tile: Tile, bits: int) -> None:
    """The field holds the step less one."""
    check(changed(tile, view((4, 2), (1, 2**bits))))
    refused(changed(tile, view((4, 2), (1, 2**bits + 1))), f"{tile.kind.value} step")
    refused(changed(tile, lambda d: replace(d, iterations=2, step=2**bits + 1)), f"{tile.kind.value} step")


@pytest.mark.parametrize(("tile", "most"), [(CORE, 2), (MEMORY, 6), (SHIM, 2)], ids=str)
@pytest.mark.parametrize("out", [False, True], ids=["in", "out"])
def test_channels(tile: Tile, most: int, out: bool) -> None:
    start = Start(Port(tile, out, most), PLAN.starts[0].first)
    refused(replace(PLAN, starts=(*PLAN.starts, start)), f"{tile.kind.value} channels")


@pytest.mark.parametrize("tile", [CORE, MEMORY, SHIM], ids=str)
@pytest.mark.parametrize("byte", [1, 2, 3])
def test_granularity(tile: Tile, byte: int) -> None:
    refused(changed(tile, lambda d: replace(d, offset=byte)), "4-byte granularity")


def test_granularity_of_buffers() -> None:
    first = PLAN.buffers[0]
    refused(
        replace(PLAN, buffers=(replace(first, bytes=first.bytes - 1), *PLAN.buffers[1:])),
        "4-byte granularity",
    )


@pytest.mark.parametrize("tile", [CORE, MEMORY, SHIM], ids=str)
def test_iteration(tile: Tile) -> None:
    check(changed(tile, lambda d: replace(d, iterations=64, step=1)))
    refused(changed(tile, lambda d: replace(d, iterations=65, step=1)), "iteration")


def test_repeat() -> None:
    i = next(i for i, c in enumerate(PLAN.sequence) if isinstance(c, Push))
    push = PLAN.sequence[i]
    assert isinstance(push, Push)
    for repeat, fine in ((255, True), (256, False)):
        plan = replace(
            PLAN, sequence=(*PLAN.sequence[:i], replace(push, repeat=repeat), *PLAN.sequence[i + 1 :])
        )
        if fine:
            check(plan)
        else:
            refused(plan, "repeat")


def test_core_transfer_words() -> None:
    check(changed(CORE, view((16_383,), (1,))))
    refused(changed(CORE, view((16_384,), (1,))), "core transfer words")


def test_core_memory() -> None:
    """Of 64 KB with stack and static data: 8 x 80 x 256 in int32 fits, eight deeper does not."""
    assert core_bytes(8, 80, 256, 4) <= CORE_BYTES < core_bytes(8, 88, 256, 4)
    plan_gemm(32, 1024, 80, tiling=Tiling(8, 80, 256, 1, 1, 1))
    refused(lambda: plan_gemm(32, 1024, 88, tiling=Tiling(8, 88, 256, 1, 1, 1)), "core memory")
    last = max((b for b in PLAN.buffers if b.tile == CORE), key=lambda b: b.offset)
    grown = replace(last, bytes=CORE_BYTES - last.offset + 4)
    refused(replace(PLAN, buffers=(*(b for b in PLAN.buffers if b != last), grown)), "core memory")


def test_core_stack() -> None:
    """Upstream's kernels take 0xD00 bytes from the start of a core's memory; buffers begin behind them."""
    first = min((b for b in PLAN.buffers if b.tile == CORE), key=lambda b: b.offset)
    assert first.offset == STACK_BYTES == 0xD00
    lower = replace(first, offset=first.offset - 4)
    refused(replace(PLAN, buffers=(lower, *(b for b in PLAN.buffers if b != first))), "core stack")


def test_core_static_data() -> None:
    """The linker puts what a program keeps of its own behind the last buffer."""
    last = max((b for b in PLAN.buffers if b.tile == CORE), key=lambda b: b.offset)
    most = CORE_BYTES - DATA_BYTES - last.offset
    others = [b for b in PLAN.buffers if b != last]
    check(replace(PLAN, buffers=(*others, replace(last, bytes=most)), fifos=()))
    refused(replace(PLAN, buffers=(*others, replace(last, bytes=most + 4)), fifos=()), "core static data")


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("output", OUTPUTS)
def test_every_plan_leaves_room_for_stack_and_static_data(weights: str, output: str) -> None:
    """Shapes, and configurations for two of them."""
    rng = random.Random(3)
    for _ in range(8):
        shapes = [
            tuple(rng.choice((64, 512, 4096, 21504)) - rng.randint(0, 63) for _ in range(3)) for _ in "ab"
        ]
        tilings = [best(*shapes[0], OUTPUTS[output], weights), *resident(shapes, OUTPUTS[output], weights)]
        for t in tilings:
            bits = WEIGHTS[weights].bits
            assert core_bytes(t.m, t.k, t.n, OUTPUTS[output], bits, t.c_objects) <= CORE_BYTES
            plan = (
                plan_gemm(*t.padded, output, weights=weights, tiling=t) if t.rows * t.columns < 64 else PLAN
            )
            used = [(b.offset, b.offset + b.bytes) for b in plan.buffers if b.tile == CORE]
            assert min(used)[0] >= 0xD00 and max(used)[1] <= CORE_BYTES - DATA_BYTES


def test_memory_tile_memory() -> None:
    last = max((b for b in PLAN.buffers if b.tile == MEMORY), key=lambda b: b.offset)
    grown = replace(last, bytes=512 * 1024 - last.offset + 4)
    refused(replace(PLAN, buffers=(*(b for b in PLAN.buffers if b != last), grown)), "memory tile memory")


@pytest.mark.parametrize("tile", [Tile(4, 2), Tile(0, 6), Tile(-1, 2)], ids=str)
def test_four_by_four_cores(tile: Tile) -> None:
    program = replace(PLAN.programs[0], tile=tile)
    refused(replace(PLAN, programs=(*PLAN.programs, program)), "4 x 4 cores")


def test_program_memory() -> None:
    check(replace(PLAN, program_bytes=16 * 1024))
    refused(replace(PLAN, program_bytes=16 * 1024 + 1), "program memory")


@pytest.mark.parametrize(("tile", "most"), [(CORE, 16), (MEMORY, 64), (SHIM, 16)], ids=str)
def test_locks(tile: Tile, most: int) -> None:
    refused(replace(PLAN, locks=(*PLAN.locks, Lock(tile, most, 0))), "locks")


def test_lock_values() -> None:
    refused(replace(PLAN, locks=(*PLAN.locks, Lock(CORE, 15, 64))), "lock values")


def test_descriptors_of_a_memory_tiles_channel() -> None:
    """Even channels use the first 24, odd ones the others."""
    start = next(s for s in PLAN.starts if s.port == Port(MEMORY, False, 0))
    other = Start(Port(MEMORY, False, 1), start.first)
    starts = tuple(other if s.port == other.port else s for s in PLAN.starts)
    refused(replace(PLAN, starts=starts), "descriptors of a channel")


def test_accumulator() -> None:
    """131,071 products of -128 x -128 are the most that add up in 32 bits."""
    plan_gemm(32, 64, 131_064, tiling=Tiling(8, 8, 16, 1, 1, 16_383))
    refused(lambda: plan_gemm(32, 64, 131_072, tiling=Tiling(8, 8, 16, 1, 1, 16_384)), "accumulator")


def test_accumulator_of_int4() -> None:
    """Sixteen times as deep, for the weights are a sixteenth."""
    tiling = Tiling(8, 16, 16, 1, 1, 131_071)
    plan_gemm(32, 64, 2_097_136, weights="int4", tiling=tiling)
    deeper = replace(tiling, depth=131_072)
    refused(lambda: plan_gemm(32, 64, 2_097_152, weights="int4", tiling=deeper), "accumulator")


@pytest.mark.parametrize(
    ("weights", "tile"),
    [
        ("int8", (4, 8, 16)),
        ("int8", (8, 4, 16)),
        ("int8", (8, 12, 16)),
        ("int8", (8, 8, 8)),
        ("int8", (0, 8, 16)),
        ("int4", (8, 8, 16)),
    ],
    ids=str,
)
def test_vector_tiles(weights: str, tile: tuple[int, int, int]) -> None:
    """4 x 8 x 8, with int4 weights 4 x 16 x 8, two by two."""
    tiling = Tiling(*tile, 1, 1, 1)
    refused(lambda: plan_gemm(8, 8, 8, weights=weights, tiling=tiling), "vector tile")


@pytest.mark.parametrize(
    "wrong", [Set(MEMORY, 0, 1), Set(CORE, 2, 1), Set(CORE, 0, 0), Set(CORE, 0, 2**31)], ids=str
)
def test_parameters(wrong: Set) -> None:
    refused(replace(PLAN, sequence=(wrong, *PLAN.sequence)), "parameters")


def test_depth() -> None:
    fifo = PLAN.fifos[0]
    for i in range(len(fifo.depths)):
        deeper = tuple(depth + (i == j) for j, depth in enumerate(fifo.depths))
        refused(replace(PLAN, fifos=(replace(fifo, depths=deeper), *PLAN.fifos[1:])), "depth")


@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, -1)])
def test_shapes(shape: tuple[int, int, int]) -> None:
    with pytest.raises(LimitError) as error:
        plan_gemm(*shape)
    assert error.value.limit == "positive shape"


@pytest.mark.parametrize(
    ("options", "limit"),
    [({"output": "int4"}, "output"), ({"shift": 3}, "shift"), ({"weights": "int2"}, "weights")],
)
def test_outputs(options: dict[str, str], limit: str) -> None:
    with pytest.raises(LimitError) as error:
        plan_gemm(8, 8, 8, **options)  # type: ignore[arg-type]
    assert error.value.limit == limit


# Hidden size, feed-forward size, query heads, key heads, head size; from the published configurations.
GEMMA = {
    "1b": (1152, 6912, 4, 1, 256),
    "4b": (2560, 10240, 8, 4, 256),
    "12b": (3840, 15360, 16, 8, 256),
    "27b": (5376, 21504, 32, 16, 128),
}


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_and_b_are_read_in_one_run_of_addresses(weights: str) -> None:
    """Row-major, a row of a tile would be one: 40 to 96 bytes, too short for the rate that plans are ranked by."""
    plan = plan_gemm(512, 5376, 4096, weights=weights)
    M, _, K = plan.tiling.padded
    moved = {"A": 0, "B": 0}
    for d in (c.descriptor for c in plan.sequence if isinstance(c, Write)):
        if d.buffer != "C":
            assert len(d.sizes) == 1 and d.strides == (1,) and d.iterations == 1
            moved[d.buffer] += 4 * d.length
    blocks = plan.tiling.rows * -(-plan.tiling.columns // 64)
    assert moved == {"A": blocks // plan.tiling.rows * M * K, "B": plan.tiling.rows * plan.argument_bytes[1]}


@pytest.mark.parametrize("model", GEMMA)
@pytest.mark.parametrize(("weights", "output"), [("int8", "int32"), ("int8", "int8"), ("int4", "int32")])
def test_gemma(model: str, weights: str, output: str) -> None:
    """Every layer of Gemma 3 has a plan within the limits, for a prompt's worth of rows, padded by a fifth at most."""
    hidden, ffn, heads, kv, size = GEMMA[model]
    for N, K in (
        (heads * size, hidden),
        (kv * size, hidden),
        (hidden, heads * size),
        (ffn, hidden),
        (hidden, ffn),
    ):
        plan = plan_gemm(512, N, K, output, weights=weights)
        M, wide, deep = plan.tiling.padded
        assert M * wide * deep <= 1.2 * 512 * N * K
        assert len({d.number for d in all_descriptors(plan) if d.tile == SHIM}) <= 16

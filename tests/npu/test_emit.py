"""The emitted MLIR-AIE text: as it was read and approved, and with the plan's numbers and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.devices.npu.array import Push, Tile, Write
from tandem.devices.npu.emit import emit, emit_sequence, emit_tile
from tandem.devices.npu.plan import plan_gemm
from tandem.devices.npu.tiling import Tiling

pytestmark = pytest.mark.fast

GOLDEN = Path(__file__).parent / "gemm.mlir"
PLAN = plan_gemm(150, 120, 48, "int8", shift=6, tiling=Tiling(8, 16, 16, 5, 2, 3))


def test_golden() -> None:
    """A memory tile, a core and the runtime sequence; the other tiles differ by their numbers alone."""
    parts = (emit_tile(PLAN, Tile(0, 1)), emit_tile(PLAN, Tile(3, 5)), emit_sequence(PLAN))
    assert "\n".join(line for part in parts for line in part) + "\n" == GOLDEN.read_text()


def numbers(text: str, pattern: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, match)) for match in re.findall(pattern, text)]


def listed(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def test_every_buffer_lock_and_stream_is_there() -> None:
    text = emit(PLAN)
    buffers = numbers(text, r"aie\.buffer\(%tile_(\d)_(\d)\) \{.*address = (\d+) : i32\} : memref<(\d+)xi32>")
    assert buffers == sorted(
        ((b.tile.column, b.tile.row, b.offset, b.bytes // 4) for b in PLAN.buffers if b.tile),
        key=lambda row: (row[0], row[1]),
    )
    locks = numbers(text, r"aie\.lock\(%tile_(\d)_(\d), (\d+)\) \{init = (\d+)")
    assert sorted(locks) == sorted((x.tile.column, x.tile.row, x.number, x.initial) for x in PLAN.locks)
    flows = numbers(text, r"aie\.flow\(%tile_(\d)_(\d), DMA : (\d), %tile_(\d)_(\d), DMA : (\d)\)")
    assert flows == [
        (s.tile.column, s.tile.row, s.channel, d.tile.column, d.tile.row, d.channel)
        for r in PLAN.routes
        for s in [r.source]
        for d in r.destinations
    ]


def test_every_descriptor_is_there() -> None:
    text = "\n".join(emit_tile(PLAN, Tile(2, 1)))
    found = re.findall(
        r"use_lock\(%lock_2_1_(\d+), AcquireGreaterEqual, %value(\d+)\)\s+"
        r"aie\.dma_bd\(%(\w+) : memref<\d+xi32> offset = (\d+) len = (\d+)(?: sizes = \[(.*)\] strides = \[(.*)\])?\) "
        r"\{bd_id = (\d+) : i32\}\s+aie\.use_lock\(%lock_2_1_(\d+), Release, %value(\d+)\)\s+aie\.next_bd \^bd(\d+)",
        text,
    )
    mine = {d.number: d for d in PLAN.descriptors if d.tile == Tile(2, 1)}
    assert len(found) == len(mine) == 24
    for lock, value, buffer, offset, length, sizes, strides, number, freed, by, following in found:
        d = mine[int(number)]
        assert d.acquire and d.release
        assert (d.acquire.lock, d.acquire.value) == (int(lock), int(value))
        assert (d.release.lock, d.release.value) == (int(freed), int(by))
        assert (d.offset // 4, d.length, d.next) == (int(offset), int(length), int(following))
        assert re.sub(r"[.@,]", "_", d.buffer) == buffer
        shape = (listed(sizes), listed(strides)) if sizes else ((d.length,), (1,))
        assert (d.sizes[::-1], d.strides[::-1]) == shape
    assert set(numbers(text, r"%value(\d+) = arith\.constant (\d+)")) == {(1, 1)}


def test_every_task_is_there() -> None:
    text = "\n".join(emit_sequence(PLAN))
    tasks = re.findall(
        r"dma_bd\(%([ABC]) : \S+ offset = (\d+) len = (\d+) sizes = \[(.*)\] strides = \[(.*)\]\) \{bd_id = (\d+)"
        r"[^}]*\}\s+aie\.end\s+\} \{(.*)repeat_count = (\d+)",
        text,
    )
    pushes = [c for c in PLAN.sequence if isinstance(c, Push)]
    written = {}
    expected = []
    for c in PLAN.sequence:
        if isinstance(c, Write):
            written[c.descriptor.tile, c.descriptor.number] = c.descriptor
        elif isinstance(c, Push):
            expected.append(written[c.port.tile, c.descriptor])
    for (name, offset, length, sizes, strides, number, token, repeat), push, d in zip(
        tasks, pushes, expected, strict=True
    ):
        assert (name, int(offset) * 4, int(length), int(number)) == (d.buffer, d.offset, d.length, d.number)
        assert (int(repeat), "issue_token = true" in token) == (push.repeat, push.token)
        outer, *inner = zip(listed(sizes), listed(strides), strict=True)
        assert outer == (d.iterations, d.step if d.iterations > 1 else 0)
        assert [pair for pair in inner[::-1] if pair != (1, 0)] == list(zip(d.sizes, d.strides, strict=True))


def test_descriptors_are_free_before_they_are_written_again() -> None:
    """As the compiler follows it: a task holds its descriptor until it is awaited or freed."""
    held: dict[tuple[str, str], str] = {}
    tile = task = ""
    for line in emit_sequence(PLAN):
        if found := re.search(r"(%task\d+) = aiex\.dma_configure_task\((%tile_\d_\d)", line):
            task, tile = found.groups()
        elif found := re.search(r"bd_id = (\d+)", line):
            assert (tile, found[1]) not in held
            held[tile, found[1]] = task
        elif found := re.search(r"dma_(?:await|free)_task\((%task\d+)\)", line):
            del held[next(key for key, value in held.items() if value == found[1])]
    assert len(held) == 4 * 4 * 2  # the last A and B of four blocks, which nothing follows


@pytest.mark.parametrize("depth", range(1, 8))
def test_cores_take_their_objects_in_turn(depth: int) -> None:
    """The text's loops, unrolled: two output tiles, with the objects of a and b alternating across both."""
    plan = plan_gemm(32, 64, 16 * depth, tiling=Tiling(8, 16, 16, 1, 1, depth))
    lines = [line.strip() for line in emit_tile(plan, Tile(0, 2))]
    pairs = int(next(line for line in lines if line.startswith("%pairs")).split()[3])
    calls: list[str] = []
    loop: list[str] | None = None
    for line in lines:
        if line.startswith("scf.for %pair"):
            loop = []
        elif line == "}" and loop is not None:
            calls, loop = calls + loop * pairs, None
        elif found := re.search(r"@multiply\(%A_(\d)_\w+, %B_(\d)_\w+, %C_(\d)", line):
            (calls if loop is None else loop).append("".join(found.groups()))
    assert calls == [f"{i % 2}{i % 2}{i // depth}" for i in range(2 * depth)]

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
PLAN = plan_gemm(60, 120, 48, "int8", shift=6, tiling=Tiling(8, 16, 16, 2, 2, 3))


def test_golden() -> None:
    """A memory tile, a core and the runtime sequence; the other tiles differ by their numbers alone."""
    parts = (emit_tile(PLAN, Tile(0, 1)), emit_tile(PLAN, Tile(3, 5)), emit_sequence(PLAN))
    assert "\n".join(line for part in parts for line in part) + "\n" == GOLDEN.read_text()


def numbers(text: str, pattern: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, match)) for match in re.findall(pattern, text)]


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
        r"use_lock\(%lock_2_1_(\d+), AcquireGreaterEqual, (\d+)\)\s+"
        r"aie\.dma_bd\(%(\w+) : memref<\d+xi32>, (\d+), (\d+)(?:, \[(.*)\])?\) "
        r"\{bd_id = (\d+) : i32, next_bd_id = (\d+)"
        r".*\s+aie\.use_lock\(%lock_2_1_(\d+), Release, (\d+)\)\s+aie\.next_bd \^bd(\d+)",
        text,
    )
    mine = {d.number: d for d in PLAN.descriptors if d.tile == Tile(2, 1)}
    assert len(found) == len(mine) == 24
    for lock, value, buffer, offset, length, dims, number, following, freed, by, jump in found:
        d = mine[int(number)]
        assert d.acquire and d.release
        assert (d.acquire.lock, d.acquire.value, d.release.lock, d.release.value) == tuple(
            map(int, (lock, value, freed, by))
        )
        assert (d.offset // 4, d.length, d.next, d.next) == tuple(map(int, (offset, length, following, jump)))
        assert re.sub(r"[.@,]", "_", d.buffer) == buffer
        pairs = numbers(dims, r"<size = (\d+), stride = (\d+)>") or [(d.length, 1)]
        assert pairs == list(zip(d.sizes, d.strides, strict=True))[::-1]


def test_every_task_is_there() -> None:
    text = "\n".join(emit_sequence(PLAN))
    tasks = re.findall(
        r"dma_bd\(%([ABC]) .*?, (\d+), (\d+), \[(.*)\]\) "
        r"\{bd_id = (\d+)[^}]*\}\s+aie\.end\s+\} \{(.*)repeat_count = (\d+)",
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
    for (name, offset, length, dims, number, token, repeat), push, d in zip(
        tasks, pushes, expected, strict=True
    ):
        assert (name, int(offset) * 4, int(length), int(number)) == (d.buffer, d.offset, d.length, d.number)
        assert (int(repeat), "issue_token = true" in token) == (push.repeat, push.token)
        outer, *inner = numbers(dims, r"<size = (\d+), stride = (\d+)>")
        assert outer == (d.iterations, d.step if d.iterations > 1 else 0)
        assert [pair for pair in inner[::-1] if pair != (1, 0)] == list(zip(d.sizes, d.strides, strict=True))


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

"""The emitted MLIR-AIE text: as it was read and approved, and with the plan's numbers and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tandem.devices.npu.array import Push, Set, Tile, Write
from tandem.devices.npu.emit import emit, emit_configuration, emit_sequence, emit_tile
from tandem.devices.npu.plan import plan_gemm, plan_resident
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


@pytest.mark.parametrize("tile", sorted({d.tile for d in PLAN.descriptors}), ids=str)
def test_every_descriptor_is_there(tile: Tile) -> None:
    text, at = "\n".join(emit_tile(PLAN, tile)), f"{tile.column}_{tile.row}"
    found = re.findall(
        rf"use_lock\(%lock_{at}_(\d+), AcquireGreaterEqual, %value(\d+)\)\s+"
        r"aie\.dma_bd\(%(\w+) : memref<\d+xi32> offset = (\d+) len = (\d+)(?: sizes = \[(.*)\] strides = \[(.*)\])?\) "
        rf"\{{bd_id = (\d+) : i32\}}\s+aie\.use_lock\(%lock_{at}_(\d+), Release, %value(\d+)\)\s+"
        r"aie\.next_bd \^bd(\d+)",
        text,
    )
    mine = {d.number: d for d in PLAN.descriptors if d.tile == tile}
    assert len(found) == len(mine) == (24 if tile.row == 1 else 6)
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


def test_every_parameter_is_there() -> None:
    text = "\n".join(emit_sequence(PLAN))
    found = numbers(text, r"rtp_write\(@parameters_(\d)_(\d), (\d), %p(\d+)\) : i32")
    sets = [c for c in PLAN.sequence if isinstance(c, Set)]
    assert found == [(c.tile.column, c.tile.row, c.parameter, c.value) for c in sets] and len(found) == 32
    assert all(name == value for name, value in numbers(text, r"%p(\d+) = arith\.constant (\d+) : i32"))
    assert text.index("rtp_write(@parameters_3_5, 1") < text.index("dma_start_task")  # before any data


def test_plans_of_one_tile_share_their_configuration() -> None:
    plans = plan_resident([(64, 200, 80), (200, 64, 300)], "int8", shift=5)
    texts = [emit(plan) for plan in plans]
    assert emit_configuration(plans[0]) == emit_configuration(plans[1])
    heads = [text[: text.index("    aie.runtime_sequence")] for text in texts]
    assert heads[0] == heads[1] and texts[0] != texts[1]
    assert emit_configuration(plans[0]).startswith(heads[0])


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


def run_core(lines: list[str], words: list[int], outputs: int) -> list[str]:
    """What a core's text does for a number of output tiles: its loops, selections and loads carried out."""
    events: list[str] = []
    values: dict[str, Any] = {}

    def value(name: str) -> Any:
        return values.get(name, name.removeprefix("%"))

    def run(at: int) -> tuple[int, list[Any]]:
        """From a line to the end of its region; what the region yields."""
        while not lines[at].startswith(("}", "aie.end")):
            line = lines[at]
            if found := re.match(r"(%\w+) = arith\.constant (\w+)", line):
                values[found[1]] = (
                    {"true": 1, "false": 0}.get(found[2]) if found[2].isalpha() else int(found[2])
                )
            elif found := re.match(r"(%\w+) = arith\.select (%\w+), (%\w+), (%\w+)", line):
                values[found[1]] = value(found[3] if value(found[2]) else found[4])
            elif found := re.match(r"(%\w+) = arith\.xori (%\w+), (%\w+)", line):
                values[found[1]] = value(found[2]) ^ value(found[3])
            elif found := re.match(r"(%\w+) = memref\.load %parameters_\w+\[(%\w+)\]", line):
                values[found[1]] = words[value(found[2])]
            elif found := re.match(r"(%\w+) = arith\.index_cast (%\w+)", line):
                values[found[1]] = value(found[2])
            elif found := re.match(r"aie\.use_lock\(%lock_\d_\d_(\d), (\w+),", line):
                events.append(f"{found[2][:7].lower()} {found[1]}")
            elif found := re.match(r"func\.call @(\w+)\((.*?)\) :", line):
                events.append(f"{found[1]} {' '.join(str(value(name)) for name in found[2].split(', '))}")
            elif found := re.match(
                r"%(\w+)(?::\d)? = scf\.for %\w+ = (%\w+) to (%\w+) .*iter_args\((.*?)\)", line
            ):
                carried = [pair.split(" = ") for pair in found[4].split(", ")]
                state = [value(start) for _, start in carried]
                times = min(value(found[3]), outputs) - value(found[2])
                end = next(i for i in range(at, len(lines)) if lines[i] == "}" and depth[i] == depth[at])
                for _ in range(times):
                    values.update(zip((name for name, _ in carried), state, strict=True))
                    state = run(at + 1)[1]
                values[f"%{found[1]}"], at = state[0], end
            elif found := re.match(r"scf\.yield (.*) :", line):
                return at, [value(name) for name in found[1].split(", ")]
            else:
                raise AssertionError(f"unknown: {line}")
            at += 1
        return at, []

    depth, level = [], 0
    for line in lines:
        level -= line.startswith("}")
        depth.append(level)
        level += line.endswith("{")
    begin = next(i for i, line in enumerate(lines) if "= aie.core" in line)
    run(begin + 1)
    return events


@pytest.mark.parametrize("depth", range(1, 8))
@pytest.mark.parametrize("output", ["int32", "int8"])
@pytest.mark.parametrize("c_objects", [1, 2])
def test_cores_do_what_the_emulator_does(depth: int, output: str, c_objects: int) -> None:
    """The text of a core, carried out, takes locks, objects and kernels in the order of CoreProgram."""
    plan = plan_gemm(32, 64, 16 * depth, output, shift=0, tiling=Tiling(8, 16, 16, 1, 1, depth, c_objects))
    lines = [line.strip() for line in emit_tile(plan, Tile(0, 2))]
    p = next(p for p in plan.programs if p.tile == Tile(0, 2))
    outputs = 8  # as many as the deepest loop has turns, at least
    expected, at = [], 0
    for i in range(outputs):
        c = f"C_{i % c_objects}_0_2"
        sums = "accumulator_0_2" if p.accumulator else c
        for k in range(depth):
            operands = (p.a, p.b) if k else (p.a, p.b, p.c)
            expected += [f"acquire {operand.acquire.lock}" for operand in operands]
            expected += [] if k else [f"zero {sums}"]
            expected += [f"multiply A_{at % 2}_0_2 B_{at % 2}_0_2 {sums}"]
            expected += [f"release {operand.release.lock}" for operand in (p.a, p.b)]
            at += 1
        expected += [f"store_half_even {sums} {c} 0"] if p.accumulator else []
        expected.append(f"release {p.c.release.lock}")
    assert run_core(lines, [depth, 0], outputs) == expected

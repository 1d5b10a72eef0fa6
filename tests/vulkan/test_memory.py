"""Which part of an arena goes into which heap: only the plan, without a device."""

from __future__ import annotations

import pytest

from tandem.devices.vulkan.device import scatter
from tandem.devices.vulkan.memory import (
    COLD,
    DEVICE_LOCAL,
    HOST_CACHED,
    HOST_READS,
    HOST_VISIBLE,
    HOST_WRITES,
    HOT,
    ArenaPart,
    plan,
    split_arena,
)
from tandem.errors import DoesNotFitError
from tests.vulkan.machines import ALL_MAPPED, GB, SHARED, SMALL_WINDOW, SOFTWARE

pytestmark = pytest.mark.fast
MACHINES = (SMALL_WINDOW, ALL_MAPPED, SHARED, SOFTWARE)


def free(machine):  # type: ignore[no-untyped-def]
    return [float(heap.nbytes) for heap in machine.heaps]


def test_parts_cover_an_arena_and_split_no_tensor() -> None:
    tensors = {(i * 100, i * 100 + 90): HOT for i in range(20)}
    parts = split_arena("weights", 2000, tensors, 450)
    assert [part.begin for part in parts] == [0] + [part.end for part in parts[:-1]]
    assert parts[-1].end == 2000 and all(part.nbytes <= 500 for part in parts)
    assert all(part.begin % 100 == 0 for part in parts)


def test_tensors_that_share_bytes_stay_together() -> None:
    parts = split_arena("activations", 300, {(0, 100): HOT, (50, 200): HOT, (150, 300): HOT}, 120)
    assert parts == [ArenaPart("activations", 0, 300, HOT)]


def test_uses_are_kept_apart() -> None:
    parts = split_arena("output", 300, {(0, 200): HOT, (256, 300): HOST_READS}, 1000)
    assert [(part.begin, part.end, part.use) for part in parts] == [(0, 256, HOT), (256, 300, HOST_READS)]


def test_a_tensor_larger_than_a_part_is_a_part() -> None:
    tensors = {(0, 100): HOT, (100, 1100): HOT, (1100, 1200): HOT}
    assert [part.nbytes for part in split_arena("weights", 1200, tensors, 300)] == [100, 1000, 100]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_each_use_gets_the_memory_it_needs(machine) -> None:  # type: ignore[no-untyped-def]
    parts = [
        ArenaPart("step", 0, 10**6, HOST_WRITES),
        ArenaPart("output", 0, 10**6, HOST_READS),
        ArenaPart("kv", 0, GB // 2, HOT),
    ]
    step, output, kv = plan(parts, machine, free(machine), None)
    assert step.type.flags & HOST_VISIBLE and step.type.flags & DEVICE_LOCAL
    assert output.type.flags & HOST_VISIBLE and output.type.flags & HOST_CACHED
    assert kv.type.flags & DEVICE_LOCAL and machine.heaps[kv.type.heap].nbytes >= 2 * GB
    assert bool(kv.type.flags & HOST_VISIBLE) == (machine is not SMALL_WINDOW)


def test_what_is_cold_spills_first_and_a_limit_counts() -> None:
    parts = [
        ArenaPart("kv", 0, 3 * GB, HOT),
        ArenaPart("weights", 0, 3 * GB, HOT),
        ArenaPart("weights", 3 * GB, 6 * GB, COLD),
    ]
    spilled = [placed.spilled for placed in plan(parts, SMALL_WINDOW, free(SMALL_WINDOW), None)]
    assert spilled == [False, False, True]
    limited = plan(parts, SMALL_WINDOW, free(SMALL_WINDOW), 4 * GB)
    assert [placed.spilled for placed in limited] == [False, True, True]
    assert all(SMALL_WINDOW.heaps[placed.type.heap].device_local is not placed.spilled for placed in limited)


def test_a_software_device_has_only_one_heap_to_spill_to() -> None:
    placed = plan([ArenaPart("weights", 0, GB, HOT)], SOFTWARE, free(SOFTWARE), 0)
    assert placed[0].spilled and placed[0].type.heap == 0


def test_what_does_not_fit_is_said_with_numbers() -> None:
    parts = [ArenaPart("kv", 0, 3 * GB, HOT)] + [
        ArenaPart("weights", 3 * GB * i, 3 * GB * (i + 1), HOT) for i in range(20)
    ]
    with pytest.raises(
        DoesNotFitError, match=r"63\.00 GB .*kv 3\.00 GB, weights 60\.00 GB.*8\.25 GB .*32\.00 GB of the host"
    ):
        plan(parts, SMALL_WINDOW, free(SMALL_WINDOW), None)
    with pytest.raises(DoesNotFitError, match=r"5\.00 GB is more than .* at once \(4\.00 GB\)"):
        plan([ArenaPart("weights", 0, 5 * GB, HOT)], ALL_MAPPED, free(ALL_MAPPED), None)


@pytest.mark.parametrize(
    ("first", "count", "run", "period"), [(0, 10, 10, 10), (0, 8, 2, 4), (3, 7, 2, 4), (5, 1, 1, 3)]
)
def test_scatter_puts_each_panel_in_its_place(first: int, count: int, run: int, period: int) -> None:
    places = {}
    for at, to, n in scatter(first, count, run, period):
        places |= {at + i: to + i for i in range(n)}
    assert places == {p - first: p // run * period + p % run for p in range(first, first + count)}

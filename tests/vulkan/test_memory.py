"""What goes into which heap, decided on paper: no device is touched."""

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
    Run,
    cut,
    plan,
)
from tandem.errors import DoesNotFitError
from tests.vulkan.machines import ALL_MAPPED, GB, SHARED, SMALL_WINDOW, SOFTWARE

pytestmark = pytest.mark.fast
MACHINES = (SMALL_WINDOW, ALL_MAPPED, SHARED, SOFTWARE)


def free(machine):  # type: ignore[no-untyped-def]
    return [float(heap.nbytes) for heap in machine.heaps]


def test_runs_cover_an_arena_and_cut_no_tensor() -> None:
    tensors = {(i * 100, i * 100 + 90): HOT for i in range(20)}
    runs = cut("weights", 2000, tensors, 450)
    assert [run.begin for run in runs] == [0] + [run.end for run in runs[:-1]]
    assert runs[-1].end == 2000 and all(run.nbytes <= 500 for run in runs)
    assert all(run.begin % 100 == 0 for run in runs)


def test_tensors_that_share_bytes_stay_together() -> None:
    runs = cut("activations", 300, {(0, 100): HOT, (50, 200): HOT, (150, 300): HOT}, 120)
    assert runs == [Run("activations", 0, 300, HOT)]


def test_uses_are_kept_apart() -> None:
    runs = cut("output", 300, {(0, 200): HOT, (256, 300): HOST_READS}, 1000)
    assert [(run.begin, run.end, run.use) for run in runs] == [(0, 256, HOT), (256, 300, HOST_READS)]


def test_a_tensor_larger_than_a_run_is_a_run() -> None:
    assert [run.nbytes for run in cut("weights", 1200, {(0, 100): HOT, (100, 1100): HOT, (1100, 1200): HOT}, 300)] == [
        100, 1000, 100,
    ]  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_each_use_gets_the_memory_it_needs(machine) -> None:  # type: ignore[no-untyped-def]
    runs = [
        Run("step", 0, 10**6, HOST_WRITES),
        Run("output", 0, 10**6, HOST_READS),
        Run("kv", 0, GB // 2, HOT),
    ]
    step, output, kv = plan(runs, machine, free(machine), None)
    assert step.type.flags & HOST_VISIBLE and step.type.flags & DEVICE_LOCAL
    assert output.type.flags & HOST_VISIBLE and output.type.flags & HOST_CACHED
    assert kv.type.flags & DEVICE_LOCAL and machine.heaps[kv.type.heap].nbytes >= 2 * GB
    assert bool(kv.type.flags & HOST_VISIBLE) == (machine is not SMALL_WINDOW)


def test_what_is_cold_spills_first_and_a_limit_counts() -> None:
    runs = [Run("kv", 0, 3 * GB, HOT), Run("weights", 0, 3 * GB, HOT), Run("weights", 3 * GB, 6 * GB, COLD)]
    spilled = [placed.spilled for placed in plan(runs, SMALL_WINDOW, free(SMALL_WINDOW), None)]
    assert spilled == [False, False, True]
    limited = plan(runs, SMALL_WINDOW, free(SMALL_WINDOW), 4 * GB)
    assert [placed.spilled for placed in limited] == [False, True, True]
    assert all(SMALL_WINDOW.heaps[placed.type.heap].device_local is not placed.spilled for placed in limited)


def test_a_software_device_has_only_one_heap_to_spill_to() -> None:
    placed = plan([Run("weights", 0, GB, HOT)], SOFTWARE, free(SOFTWARE), 0)
    assert placed[0].spilled and placed[0].type.heap == 0


def test_what_does_not_fit_is_said_with_numbers() -> None:
    runs = [Run("kv", 0, 3 * GB, HOT)] + [
        Run("weights", 3 * GB * i, 3 * GB * (i + 1), HOT) for i in range(20)
    ]
    with pytest.raises(
        DoesNotFitError, match=r"63\.00 GB .*kv 3\.00 GB, weights 60\.00 GB.*8\.25 GB .*32\.00 GB of the host"
    ):
        plan(runs, SMALL_WINDOW, free(SMALL_WINDOW), None)
    with pytest.raises(DoesNotFitError, match=r"5\.00 GB is more than .* at once \(4\.00 GB\)"):
        plan([Run("weights", 0, 5 * GB, HOT)], ALL_MAPPED, free(ALL_MAPPED), None)


@pytest.mark.parametrize(
    ("first", "count", "run", "period"), [(0, 10, 10, 10), (0, 8, 2, 4), (3, 7, 2, 4), (5, 1, 1, 3)]
)
def test_scatter_puts_each_panel_in_its_place(first: int, count: int, run: int, period: int) -> None:
    places = {}
    for at, to, n in scatter(first, count, run, period):
        places |= {at + i: to + i for i in range(n)}
    assert places == {p - first: p // run * period + p % run for p in range(first, first + count)}

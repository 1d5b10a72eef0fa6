"""Memory plans and segments for a GPU that shares the host's memory (a Radeon 780M under RADV), without a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.devices.vulkan.capabilities import reserved_vram
from tandem.devices.vulkan.memory import (
    COLD,
    DEVICE_LOCAL,
    HOST_CACHED,
    HOST_READS,
    HOST_VISIBLE,
    HOST_WRITES,
    HOT,
    UNFIT,
    ArenaPart,
    plan,
    usable,
)
from tandem.devices.vulkan.recording import MAX_SEGMENT_SECONDS, RATES, VulkanRecording
from tandem.errors import DoesNotFitError
from tandem.model.synthetic import SyntheticModel
from tests.vulkan.amd import PASSES, lowered
from tests.vulkan.machines import GB, PHOENIX

pytestmark = pytest.mark.fast
FREE = [heap.nbytes - 0.1 * GB for heap in PHOENIX.heaps]
PART = GB // 4


def weights(nbytes: float, use: str = HOT) -> list[ArenaPart]:
    return [ArenaPart("weights", i * PART, (i + 1) * PART, use) for i in range(int(nbytes // PART))]


def test_weights_fill_both_heaps_and_are_written_where_they_lie() -> None:
    """Two thirds of the memory are called the device's; the rest is as fast. All is mapped: nothing is staged."""
    placed = plan(weights(15.5 * GB), PHOENIX, FREE, None)
    assert {p.type.heap for p in placed} == {0, 1} and [p.spilled for p in placed] == sorted(
        p.spilled for p in placed
    )
    assert all(p.type.flags & HOST_VISIBLE and not p.type.flags & (HOST_CACHED | UNFIT) for p in placed)


def test_small_buffers_lie_where_host_and_gpu_reach_them() -> None:
    parts = [
        ArenaPart("step", 0, 10**6, HOST_WRITES),
        ArenaPart("output", 0, 10**5, HOST_READS),
        *weights(GB, COLD),
    ]
    step, output, *rest = plan(parts, PHOENIX, FREE, None)
    assert step.type.flags & DEVICE_LOCAL and step.type.flags & HOST_VISIBLE
    assert output.type.flags & HOST_CACHED
    assert not any(p.type.flags & UNFIT for p in (step, output, *rest))


def test_more_than_the_gpu_may_map_is_refused() -> None:
    with pytest.raises(DoesNotFitError, match=r"20\.00 GB .* 780M has 10\.70 GB .* 5\.30 GB of the host's"):
        plan(weights(20 * GB), PHOENIX, FREE, None)


def test_all_of_a_shared_memory_counts_as_fast_and_what_the_firmware_keeps_too() -> None:
    assert usable(PHOENIX, FREE, 30 * GB, None) == (sum(FREE), sum(FREE))
    assert usable(PHOENIX, FREE, 9 * GB, None) == (9 * GB, 9 * GB)  # the host has no more
    assert usable(PHOENIX, FREE, 30 * GB, 4 * GB) == (4 * GB, sum(FREE))
    # By a setting of the firmware: the host sees 24 GB of its 32.
    kept = replace(PHOENIX, reserved_vram=8 * GB)
    assert usable(kept, FREE, 5 * GB, None) == (13 * GB, 13 * GB)


def test_what_the_firmware_keeps_is_read_from_the_card_that_is_meant(tmp_path: Path) -> None:
    for i, (device, nbytes) in enumerate(((0x744C, 24 * GB), (0x15BF, GB // 2))):
        card = tmp_path / f"card{i}" / "device"
        card.mkdir(parents=True)
        for name, text in (
            ("vendor", "0x1002"),
            ("device", f"{device:#x}"),
            ("mem_info_vram_total", f"{nbytes}"),
        ):
            (card / name).write_text(text + "\n")
    (tmp_path / "card1-eDP-1" / "device").mkdir(parents=True)
    assert reserved_vram(0x1002, 0x15BF, tmp_path) == GB // 2
    assert reserved_vram(0x8086, 0x15BF, tmp_path) == 0


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (64, 64), (512, 1)])
def test_no_submission_of_the_27b_comes_near_a_reset(tokens: int, rows: int) -> None:
    """Kernels give a job 10 s. By the rates assumed a segment takes 0.2; a launch that alone takes more, 2 at most."""
    program = lowered(SyntheticModel("gemma-3-27b:q4_0"), PASSES)
    counts = {"tokens": tokens, "rows": rows, "work": rows}
    recording: Any = SimpleNamespace(device=SimpleNamespace(capabilities=PHOENIX), program=program)
    bounds = VulkanRecording._cut(recording, program.launches, counts)
    assert [first for first, _ in bounds] == [0, *(last for _, last in bounds[:-1])]
    bytes_s, ops_s = RATES["integrated"]
    for first, last in bounds:
        costs = [launch.cost(counts) for launch in program.launches[first:last]]
        seconds = sum(max(cost.bytes / bytes_s, cost.ops / ops_s) for cost in costs)
        assert seconds <= (MAX_SEGMENT_SECONDS if last - first > 1 else 2.0)

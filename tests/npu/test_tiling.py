"""What the reserve of a core's memory costs and one object of C saves, by the roofline that ranks tiles: predicted."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from tandem.devices.npu import tiling
from tandem.devices.npu.report import SHAPES
from tandem.devices.npu.tiling import CORE_BYTES, DEPTH, WEIGHTS, Tiling, best, core_bytes, seconds
from tests.npu.test_constraints import GEMMA

KINDS = (("int8", 4), ("int8", 1), ("int4", 4))
MEMORY_TILE = 512 * 1024
DOCS = Path(__file__).parents[2] / "docs/NPU.md"
Plans = list[tuple[str, int, Tiling]]


def plans() -> Plans:
    shapes = [
        (512, N, K)
        for hidden, ffn, heads, kv, size in GEMMA.values()
        for N, K in (
            (heads * size, hidden),
            (kv * size, hidden),
            (hidden, heads * size),
            (ffn, hidden),
            (hidden, ffn),
        )
    ]
    return [(w, out, best(*shape, out, w)) for shape in (*shapes, *SHAPES) for w, out in KINDS]


def changes(before: Plans, after: Plans) -> list[float]:
    """Of the predicted seconds."""
    return [
        seconds(new, out, w) / seconds(old, out, w) - 1
        for (w, out, old), (_, _, new) in zip(before, after, strict=True)
    ]


def filled(found: Plans) -> float:
    """The part of a memory tile that its FIFOs take, in the median."""
    return median(
        DEPTH * (t.m * t.k + t.k * t.n * WEIGHTS[w].bits // 8 + tiling.ROWS * t.m * t.n * out) / MEMORY_TILE
        for w, out, t in found
    )


def test_the_predicted_cost_of_plans_is_as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    now = plans()
    every, tiles = tiling.core_bytes, tiling._tiles
    monkeypatch.setattr(tiling, "_tiles", lambda *args: (t for t in tiles(*args) if t[3] == DEPTH))
    reserved = plans()
    for name, value in (("STACK_BYTES", 992), ("PARAMETER_BYTES", 32), ("DATA_BYTES", 0)):
        monkeypatch.setattr(tiling, name, value)
    before = plans()
    full = sum(every(t.m, t.k, t.n, out, WEIGHTS[w].bits) == CORE_BYTES for w, out, t in before)
    monkeypatch.undo()
    assert all(
        core_bytes(t.m, t.k, t.n, out, WEIGHTS[w].bits, t.c_objects) <= CORE_BYTES for w, out, t in now
    )
    reserve, both = changes(before, reserved), changes(before, now)
    said = " ".join(DOCS.read_text().split())
    for figure in (
        f"over {len(now)} plans",
        f"costs {median(reserve):.1%} in the median and {max(reserve):.1%} at most",
        f"of the plans before, {full} left no byte for static data",
        f"plans take {-median(both):.1%} less in the median",
        f"(from {-min(both):.1%} less to {max(both):.1%} more)",
        f"{filled(now):.0%} full, where they were {filled(before):.0%}",
    ):
        assert figure in said, figure

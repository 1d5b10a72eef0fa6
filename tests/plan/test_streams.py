"""Matmuls in a row without barriers in the table of bytes counted; tests/vulkan/test_streams.py times them."""

from __future__ import annotations

import pytest

from benchmarks import plan_profile


def test_they_come_into_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that has them; one that read what is counted, at the bandwidth of reads, is within the aim."""
    run, best = plan_profile.figures.read("h200"), plan_profile.gpu_read_gb_s()
    made = [{"name": p.name, "us": 1.05 * p.nbytes / best / 1e3} for p in plan_profile.matmuls()]
    monkeypatch.setattr(plan_profile.figures, "read", lambda name: {**run, "streams": made})
    assert all(p.row_us and p.is_read_in(p.row_us, best) for p in plan_profile.matmuls())
    text = plan_profile.counted_table()
    assert "5 of 5 in a row" in text and text.count(", +5% |") == 5
    made[0]["us"] *= 1.2
    assert "4 of 5 in a row" in plan_profile.counted_table() and "**+26%**" in plan_profile.counted_table()

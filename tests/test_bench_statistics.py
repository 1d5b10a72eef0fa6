"""The statistics that benchmarks rest on."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.bench.statistics import ratio_of_medians, summarise

pytestmark = pytest.mark.fast


def test_a_summary_is_not_moved_by_one_odd_round() -> None:
    summary = summarise([10.0, 11.0, 9.0, 10.5, 500.0])
    assert (summary.median, summary.low, summary.high, summary.rounds) == (10.5, 9.0, 500.0, 5)
    assert summary.mad == 0.5


def test_one_round_has_no_spread() -> None:
    assert summarise([3.0]).mad == 0.0
    only = ratio_of_medians([3.0], [2.0])
    assert (only.value, only.low, only.high) == (1.5, 1.5, 1.5)


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for trial in range(200):
        ours, theirs = rng.normal(200, 10, 15), rng.normal(100, 5, 15)
        found = ratio_of_medians(list(ours), list(theirs), resamples=400, seed=trial)
        assert found.low <= found.value <= found.high
        held += found.low <= 2.0 <= found.high
    assert 0.88 <= held / 200 <= 1.0


def test_what_slows_both_sides_of_a_round_does_not_widen_the_interval() -> None:
    slowed = np.array([1.0, 0.5, 0.8, 1.0, 0.6, 0.9, 0.7])
    found = ratio_of_medians(list(300 * slowed), list(100 * slowed))
    assert found.low == pytest.approx(3.0) and found.high == pytest.approx(3.0)


def test_the_same_rounds_give_the_same_interval() -> None:
    ours, theirs = [5.0, 6.0, 7.0, 5.5, 6.5], [2.0, 2.1, 1.9, 2.2, 2.0]
    assert ratio_of_medians(ours, theirs) == ratio_of_medians(ours, theirs)


def test_rounds_must_pair() -> None:
    with pytest.raises(ValueError, match="pairs"):
        ratio_of_medians([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no rounds"):
        summarise([])

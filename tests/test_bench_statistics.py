"""The statistics that benchmarks rest on, and how their rounds are chosen."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.measures import MOST_TRIES, alternate
from benchmarks.workers import Measured
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


def rounds(disturbed: set[int], count: int) -> tuple[list[str], list[float]]:
    """The order of measurements, and the rounds kept, where others disturb some of the peer's."""
    order: list[str] = []

    def side(name: str, i: int) -> Measured:
        order.append(name)
        return Measured(
            seconds=float(i), others=0.5 if name == "peer" and i in disturbed else 0.0, inside=0.0
        )

    pairs = alternate(lambda i: side("ours", i), lambda i: side("peer", i), count)
    assert all(pair.ours.seconds == pair.peer.seconds for pair in pairs), "a pair is of one round"
    return order, [pair.ours.seconds for pair in pairs]


def test_rounds_alternate_after_a_warm_up() -> None:
    order, kept = rounds(set(), 3)
    assert order == ["ours", "peer", "ours", "peer", "peer", "ours", "ours", "peer"]
    assert kept == [1, 2, 3]


def test_disturbed_rounds_are_replaced_but_not_for_ever() -> None:
    assert rounds({1, 3}, 3)[1] == [2, 4, 5]
    order, kept = rounds(set(range(100)), 3)
    assert len(kept) == 3 and len(order) == 2 * (1 + 3 * MOST_TRIES)

"""The statistics that benchmarks rest on, and how their rounds are chosen."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from benchmarks.measures import MAX_TRIES, alternate
from tandem.bench.peers.worker import WorkerTiming
from tandem.bench.statistics import (
    drift,
    median_interval,
    outliers,
    ratio_of_medians,
    ratio_of_runs,
    summarise,
)

pytestmark = pytest.mark.fast


def test_a_summary_is_not_moved_by_one_odd_round() -> None:
    summary = summarise([10.0, 11.0, 9.0, 10.5, 500.0])
    assert (summary.median, summary.low, summary.high, summary.rounds) == (10.5, 9.0, 500.0, 5)
    assert summary.mad == 0.5


def test_one_round_has_no_spread() -> None:
    assert summarise([3.0]).mad == 0.0
    only = ratio_of_medians([3.0], [2.0])
    assert (only.value, only.low, only.high) == (1.5, 1.5, 1.5)


KNOWN = {
    "normal": lambda rng, n: rng.normal(10, 1, n),
    "exponential": lambda rng, n: rng.exponential(3, n),
    "lognormal": lambda rng, n: rng.lognormal(0, 1, n),
    "uniform": lambda rng, n: rng.uniform(1, 2, n),
}


@pytest.mark.parametrize("name", KNOWN)
def test_spreads_and_intervals_are_scipys(name: str) -> None:
    data = KNOWN[name](np.random.default_rng(3), 31)
    assert summarise(data).mad == pytest.approx(stats.median_abs_deviation(data))
    far = np.abs(data - np.median(data)) > 3.5 * stats.median_abs_deviation(data, scale="normal")
    assert outliers(data) == list(np.flatnonzero(far))
    options = {"method": "percentile", "n_resamples": 20000, "rng": np.random.default_rng(0)}
    theirs = stats.bootstrap((data,), np.median, **options).confidence_interval
    near = np.diff(np.sort(data)).max()  # its ends are rounds, and chance may choose the next one
    assert median_interval(data, resamples=20000) == pytest.approx(tuple(theirs), abs=near)
    other = KNOWN[name](np.random.default_rng(4), 31)

    def ratio(ours: np.ndarray, peer: np.ndarray, axis: int) -> np.ndarray:
        return np.median(ours, axis=axis) / np.median(peer, axis=axis)

    for ours, paired in ((ratio_of_medians, True), (ratio_of_runs, False)):
        theirs = stats.bootstrap((data, other), ratio, paired=paired, **options).confidence_interval
        found = ours(data, other, resamples=20000)
        assert (found.low, found.high) == pytest.approx(tuple(theirs), rel=0.05)


@pytest.mark.parametrize("name", KNOWN)
def test_the_interval_of_a_median_holds_it_about_as_often_as_it_says(name: str) -> None:
    rng = np.random.default_rng(1)
    true = {"normal": 10.0, "exponential": 3 * np.log(2), "lognormal": 1.0, "uniform": 1.5}[name]
    held = 0
    for trial in range(200):
        values = KNOWN[name](rng, 15)
        low, high = median_interval(values, resamples=400, seed=trial)
        assert min(values) <= low <= float(np.median(values)) <= high <= max(values)
        held += low <= true <= high
    assert 0.88 <= held / 200 <= 1.0
    with pytest.raises(ValueError, match="no rounds"):
        median_interval([])


def test_a_planted_outlier_is_found_and_others_are_not() -> None:
    steady = [100.0, 101.0, 99.5, 100.2, 99.8, 100.6]
    assert outliers(steady) == []
    assert outliers([*steady, 80.0]) == [6]
    assert outliers([5.0, 5.0, 5.0, 5.1]) == [3] and outliers([3.0]) == []


def test_drift_is_scipys() -> None:
    data = np.random.default_rng(5).normal(100, 1, 9) - 2 * np.arange(9)
    change, agreement = drift(data)
    assert change == pytest.approx(stats.theilslopes(data).slope * 8 / np.median(data))
    assert agreement == pytest.approx(stats.kendalltau(np.arange(9), data).statistic)
    assert drift([100.0]) == (0.0, 0.0) and drift([10.0, 10.0, 10.0, 10.0, 5.0])[0] == 0.0, (
        "one odd round is no drift"
    )


def test_runs_that_were_not_taken_together() -> None:
    new, old = [110.0, 111.0, 109.0, 110.5, 108.0], [100.0, 99.0, 101.0]
    found = ratio_of_runs(new, old)
    assert 1.05 < found.low < found.value < found.high < 1.13 and found.value == pytest.approx(1.1)
    with pytest.raises(ValueError, match="no rounds"):
        ratio_of_runs([], old)


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

    def side(name: str, i: int) -> WorkerTiming:
        order.append(name)
        return WorkerTiming(
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
    assert len(kept) == 3 and len(order) == 2 * (1 + 3 * MAX_TRIES)

"""Robust statistics of the rounds of a measurement: median, spread, outliers, drift, and bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 4000
SIGMA = 1.4826  # ratio of the standard deviation to the median absolute deviation of a normal distribution
MAX_DEVIATION = 3.5  # estimated standard deviations from the median, above which a value is an outlier
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Summary:
    median: float
    low: float  # minimum
    high: float  # maximum
    mad: float  # median absolute deviation
    rounds: int


def summarise(values: Sequence[float]) -> Summary:
    data = np.asarray(values, np.float64)
    if not len(data):
        raise ValueError("no rounds to summarise")
    median = float(np.median(data))
    mad = float(np.median(np.abs(data - median)))
    return Summary(median, float(data.min()), float(data.max()), mad, len(data))


def outliers(values: Sequence[float]) -> list[int]:
    """Indices of values far from the median, by the median absolute deviation (Iglewicz and Hoaglin)."""
    summary = summarise(values)
    return [
        i
        for i, value in enumerate(values)
        if abs(value - summary.median) > MAX_DEVIATION * SIGMA * summary.mad
    ]


def drift(values: Sequence[float]) -> tuple[float, float]:
    """The relative change from the first round to the last by the Theil-Sen line, which outliers do not bend, and
    Kendall's tau (1: all rounds rise, -1: all fall, 0: no trend)."""
    pairs = [(i, j) for j in range(len(values)) for i in range(j)]
    if not pairs:
        return 0.0, 0.0
    slopes = [(values[j] - values[i]) / (j - i) for i, j in pairs]
    return (
        float(np.median(slopes)) * (len(values) - 1) / summarise(values).median,
        float(np.mean(np.sign(slopes))),
    )


def median_interval(
    values: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """A 95% bootstrap interval of the median. With few rounds it is coarse, and never wider than their range."""
    if not len(values):
        raise ValueError("no rounds to summarise")
    return _middle_95(_medians(np.asarray(values, np.float64), np.random.default_rng(seed), resamples))


@dataclass(frozen=True)
class Ratio:
    value: float
    low: float  # of the interval
    high: float


def ratio_of_medians(
    ours: Sequence[float], theirs: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> Ratio:
    """median(ours) / median(theirs) with a 95% bootstrap interval.

    Round i of both was measured at about the same time, so rounds are resampled in pairs: what slows the machine for a
    while slows both. With few rounds the interval is coarse, and never wider than their range.
    """
    if len(ours) != len(theirs) or not len(ours):
        raise ValueError(f"{len(ours)} and {len(theirs)} rounds do not make pairs")
    pairs = np.array([ours, theirs], np.float64)  # [2, rounds]
    medians = _medians(pairs, np.random.default_rng(seed), resamples)  # [2, resamples]
    middle = np.median(pairs, axis=1)
    return Ratio(float(middle[0] / middle[1]), *_middle_95(medians[0] / medians[1]))


def ratio_of_runs(
    new: Sequence[float], old: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> Ratio:
    """median(new) / median(old) with a 95% bootstrap interval, for rounds that were measured at different times."""
    rng, data = np.random.default_rng(seed), [np.asarray(values, np.float64) for values in (new, old)]
    if not all(map(len, data)):
        raise ValueError("no rounds to compare")
    sampled = [_medians(values, rng, resamples) for values in data]
    return Ratio(float(np.median(data[0]) / np.median(data[1])), *_middle_95(sampled[0] / sampled[1]))


def _medians(data: Array, rng: np.random.Generator, resamples: int) -> Array:
    """Medians of bootstrap samples of the rounds (the last axis); each sample has the same rounds in every row."""
    sampled = rng.integers(0, data.shape[-1], (resamples, data.shape[-1]))
    return np.asarray(np.median(data[..., sampled], axis=-1))


def _middle_95(sampled: Array) -> tuple[float, float]:
    low, high = np.percentile(sampled, [2.5, 97.5])
    return float(low), float(high)

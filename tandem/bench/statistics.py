"""What rounds of a measurement say: the middle, the spread, and how sure a ratio is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Summary:
    median: float
    low: float  # the smallest
    high: float  # the largest
    mad: float  # median distance from the median: a spread that one odd round does not move
    rounds: int


def summarise(values: Sequence[float]) -> Summary:
    data = np.asarray(values, np.float64)
    if not len(data):
        raise ValueError("no rounds to summarise")
    median = float(np.median(data))
    mad = float(np.median(np.abs(data - median)))
    return Summary(median, float(data.min()), float(data.max()), mad, len(data))


def median_interval(
    values: Sequence[float], *, confidence: float = 0.95, resamples: int = 4000, seed: int = 0
) -> tuple[float, float]:
    """A bootstrap interval of the median. With few rounds it is coarse: at most as wide as the rounds themselves."""
    if not len(values):
        raise ValueError("no rounds to summarise")
    data = np.asarray(values, np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(data), (resamples, len(data)))
    tail = 50 * (1 - confidence)
    low, high = np.percentile(np.median(data[drawn], axis=1), [tail, 100 - tail])
    return float(low), float(high)


@dataclass(frozen=True)
class Ratio:
    value: float
    low: float  # of the interval
    high: float


def ratio_of_medians(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> Ratio:
    """median(ours) / median(theirs) with a bootstrap interval.

    Round i of both was measured at about the same time, so rounds are drawn in pairs: what slows the machine for a
    while slows both. With few rounds the interval is coarse, and at most as wide as the rounds themselves.
    """
    if len(ours) != len(theirs) or not len(ours):
        raise ValueError(f"{len(ours)} and {len(theirs)} rounds do not make pairs")
    pairs = np.array([ours, theirs], np.float64)  # [2, rounds]
    drawn = np.random.default_rng(seed).integers(0, len(ours), (resamples, len(ours)))
    medians = np.median(pairs[:, drawn], axis=2)  # [2, resamples]
    tail = 50 * (1 - confidence)
    low, high = np.percentile(medians[0] / medians[1], [tail, 100 - tail])
    middle = np.median(pairs, axis=1)
    return Ratio(float(middle[0] / middle[1]), float(low), float(high))

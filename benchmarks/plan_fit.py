"""Fits the planner's calibration to measured rows, and cross-validates it.

A predicted time is the launch overhead plus, for each kind of work, its time at the full rate divided by the share that
kernels reach. So the reciprocals of the shares follow from linear least squares of relative errors, linearised at those
in use: repeat it until they stay. Rows with errors above 10% have a lower weight, and no share may exceed 1.

python -m benchmarks.plan_fit     prints the calibration for hardware.toml
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.plan_profile import launch_us
from benchmarks.plan_rows import Row, cpu_rows, gpu_rows, lavapipe_rows

Floats = NDArray[np.float64]
Kinds = Sequence[tuple[str, ...]]  # names of factors that are one: a kind of work each
CPU: Kinds = (
    ("dot_memory", "matrix_memory", "attention_memory"),
    ("dot_ops", "matrix_ops"),
    ("attention_ops",),
)
GPU: Kinds = (
    ("dot_memory",),
    ("dot_ops",),
    ("matrix_memory",),
    ("matrix_ops",),
    ("attention_memory",),
    ("attention_ops",),
)
SOFTWARE: Kinds = (
    ("dot_memory",),
    ("matrix_memory", "attention_memory"),
    ("dot_ops", "matrix_ops", "attention_ops"),
)
TOLERATED = 0.1  # relative error above which a row has a lower weight
ITERATIONS = 30
LITTLE = 1e-3  # relative change of a rate for a numerical derivative


def shares(rows: Sequence[Row], kinds: Kinds) -> Floats:
    """Of the time measured: launches, then each kind of work at the whole rate. By the planner itself."""
    return np.array([_shares(row, kinds) for row in rows])


def _shares(row: Row, kinds: Kinds) -> list[float]:
    """Near the factors in use: where the longer of two works counts, that is the one which does there."""
    used = row.hardware.calibration

    def seconds(slower: tuple[str, ...] = ()) -> float:
        factors = {name: getattr(used, name) / (1 + LITTLE) for name in slower}
        return row.seconds(replace(row.hardware, calibration=replace(used, **factors)))

    whole = seconds()
    works = [(seconds(kind) - whole) / LITTLE for kind in kinds]
    at_whole_rate = [work * float(getattr(used, kind[0])) for work, kind in zip(works, kinds, strict=True)]
    return [part * row.measured / row.tokens for part in (whole - sum(works), *at_whole_rate)]


def fit(shares: Floats) -> Floats:
    """The factor of each kind of work that explains the rows best."""
    launches, works = shares[:, 0], shares[:, 1:]
    weights, slower = np.ones(len(shares)), np.ones(works.shape[1])
    for _ in range(ITERATIONS):
        slower = _solve(works * weights[:, None], (1 - launches) * weights)
        off = launches + works @ slower - 1
        weights = (1 + (off / TOLERATED) ** 2) ** -0.25
    return 1 / slower


def _solve(a: Floats, b: Floats) -> Floats:
    """Least squares with every unknown at least 1: those that would be below are held there."""
    free = np.ones(a.shape[1], bool)
    while True:
        found = np.ones(a.shape[1])
        found[free] = np.linalg.lstsq(a[:, free], b - a[:, ~free].sum(axis=1), rcond=None)[0]
        if (found >= 1).all():
            return found
        free &= found > 1


def errors(shares: Floats, factors: Floats) -> Floats:
    """Of the predicted rates."""
    found: Floats = 1 / (shares[:, 0] + shares[:, 1:] @ (1 / factors)) - 1
    return found


def held_out(rows: Sequence[Row], kinds: Kinds, of: Callable[[Row], str]) -> Floats:
    """Of each row, its error by factors that were fitted only to rows of which `of` says something else."""
    known, groups = shares(rows, kinds), np.array([of(row) for row in rows])
    found = np.zeros(len(rows))
    for group in np.unique(groups):
        here = groups == group
        found[here] = errors(known[here], fit(known[~here]))
    return found


def main() -> None:
    sources = (("cpu", cpu_rows(), CPU), ("gpu", gpu_rows(), GPU), ("software", lavapipe_rows(), SOFTWARE))
    for name, rows, kinds in sources:
        known = shares(rows, kinds)
        factors = fit(known)
        print(f"[calibration.{name}]")
        if name == "gpu":
            each = ", ".join(f"{kernel} = {us:.1f}" for kernel, us in launch_us().items())
            print(
                f"launch_us = {{ {each} }}  # of the profile; put them there first, then fit the rest again"
            )
        for kind, factor in zip(kinds, factors, strict=True):
            print(*(f"{part} = {factor:.3g}" for part in kind), sep="\n")
        off = np.abs(errors(known, factors))
        print(f"# off by {np.median(off):.1%} in the middle, {off.max():.1%} at most\n")


if __name__ == "__main__":
    main()

"""Slips in `route` and `combine` are outside the tolerance of their cases: a wrong expert, weight or order shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from tandem.bench.kernel_checks import assert_matches
from tandem.kernels import combine, route
from tandem.kernels.experts import slots_of
from tandem.kernels.kernel import Array, Case

pytestmark = pytest.mark.fast


def route_cases() -> Iterator[tuple[Case, dict[str, Array]]]:
    """Those in which a token uses several experts, but not all."""
    for case in route.cases(np.random.default_rng(1)):
        if 1 < case.scalars["used"] < case.scalars["experts"]:
            yield case, route.reference(case.arrays, case.scalars, case.counts)


def another_expert(case: Case, out: dict[str, Array]) -> None:
    unused = set(range(int(case.scalars["experts"]))) - set(out["chosen"][0].tolist())
    out["chosen"][0, -1] = min(unused)


def other_order(name: str, case: Case, out: dict[str, Array]) -> None:
    out[name][0, :2] = out[name][0, 1::-1]


def not_normalised(case: Case, out: dict[str, Array]) -> None:
    normalise = 1 - case.scalars["normalise"]
    other = route.reference(case.arrays, {**case.scalars, "normalise": normalise}, case.counts)
    out["weights"] = other["weights"]


ROUTE: dict[str, Callable[[Case, dict[str, Array]], None]] = {
    "another expert": another_expert,
    "experts in another order than their weights": lambda case, out: other_order("chosen", case, out),
    "weights in another order": lambda case, out: other_order("weights", case, out),
    "weights are not normalised, or are": not_normalised,
    "a weight is too large": lambda case, out: out["weights"].__setitem__(
        (0, 0), 1.001 * out["weights"][0, 0]
    ),
}


@pytest.mark.parametrize("slip", ROUTE)
def test_a_slip_in_route_is_noticed(slip: str) -> None:
    found = list(route_cases())
    assert len(found) >= 4
    for case, expected in found:
        wrong = {name: array.copy() for name, array in expected.items()}
        ROUTE[slip](case, wrong)
        if all((wrong[name] == expected[name]).all() for name in expected):
            continue  # equal weights in another order
        with pytest.raises(AssertionError):
            assert_matches(case, wrong, expected)


def with_other_slots(case: Case) -> Case:
    groups = case.arrays["groups"].copy()
    slots = slots_of(groups, case.scalars, case.counts["tokens"])
    slots[0, :2] = slots[0, 1::-1]
    return replace(case, arrays={**case.arrays, "groups": groups})


def without(name: str, case: Case) -> Case:
    return replace(case, arrays={key: array for key, array in case.arrays.items() if key != name})


COMBINE: dict[str, Callable[[Case], Case]] = {
    "weights of other experts": with_other_slots,
    "all experts weigh the same": lambda case: replace(
        case, arrays={**case.arrays, "weights": np.ones_like(case.arrays["weights"])}
    ),
    "no shared expert": lambda case: without("shared", case),
    "no gate of the shared expert": lambda case: without("gate", case),
}


@pytest.mark.parametrize("slip", COMBINE)
def test_a_slip_in_combine_is_noticed(slip: str) -> None:
    noticed = 0
    for case in combine.cases(np.random.default_rng(1)):
        changed = COMBINE[slip](case)
        absent = changed.arrays.keys() == case.arrays.keys() and "no " in slip
        if case.scalars["used"] < 2 or absent:
            continue
        expected, wrong = (combine.reference(c.arrays, c.scalars, c.counts) for c in (case, changed))
        with pytest.raises(AssertionError):
            assert_matches(case, wrong, expected)
        noticed += 1
    assert noticed

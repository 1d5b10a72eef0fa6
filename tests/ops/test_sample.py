"""Sampling: tokens follow the distribution, filters keep what they should, strange input does no harm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem import native
from tandem.kernels.abi import LOGIT_ADJUSTMENT, SAMPLING_PARAMETERS, SAMPLING_RESULT
from tandem.kernels.kernel import Array
from tandem.kernels.sample import KERNEL, make_case, uniform
from tests.ops.harness import assert_matches, run_once

pytestmark = pytest.mark.fast

SUPPORTED = [isa for isa in native.ISAS if native.load().tandem_isa_supported(isa.encode())]
LOGITS = np.array([1.0, 0.5, 2.0, -1.0, 2.0, 0.0, -3.0, 1.5, 0.5, -0.5])


def results(logits: Array, wanted: Sequence[Mapping[str, Any]], isa: str) -> Array:
    return run_once(KERNEL, isa, make_case("", logits, wanted), False)["out"]


def sample_tokens(n: int, isa: str, logits: Array = LOGITS, **wanted: Any) -> Array:
    """n tokens of one request."""
    tokens: Array = results(logits, [{**wanted, "counter": i} for i in range(n)], isa)["token"]
    return tokens


def softmax(x: Array) -> Array:
    weights = np.exp(x - x.max())
    return np.asarray(weights / weights.sum())


def chi_square(tokens: Array, shares: Array) -> float:
    """Of the counts against the shares; tokens with share 0 must not occur."""
    counts = np.bincount(tokens, minlength=len(shares))
    assert counts[shares == 0].sum() == 0
    expected = len(tokens) * shares[shares > 0]
    return float(((counts[shares > 0] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("isa", SUPPORTED)
@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        ({}, range(10)),
        ({"temperature": 2.0}, range(10)),
        ({"temperature": 0.5}, range(10)),
        ({"top_k": 4}, (2, 4, 7, 0)),
        ({"top_k": 5}, (2, 4, 7, 0, 1)),  # of two equal ones the first
        ({"top_p": 0.5}, (2, 4)),  # 0.29, 0.29, 0.18, 0.11, ...
        ({"top_p": 0.7}, (2, 4, 7)),
        ({"top_p": 0.3}, (2, 4)),
        ({"top_p": 0.25}, (2,)),
        ({"min_p": 0.5}, (2, 4, 7)),
        ({"min_p": 1.0}, (2, 4)),
        ({"top_k": 4, "top_p": 0.7}, (2, 4, 7)),  # shares of the four: 0.34, 0.34, 0.20, 0.12
        ({"top_k": 7, "top_p": 0.95, "min_p": 0.2, "temperature": 1.5}, (2, 4, 7, 0, 1, 8)),
        ({"adjustments": [(2, 0, -np.inf), (6, 0, 4.0)]}, (0, 1, 3, 4, 5, 6, 7, 8, 9)),
    ],
    ids=str,
)
def test_sampled_tokens_follow_the_distribution(
    wanted: dict[str, Any], kept: Sequence[int], isa: str
) -> None:
    """Chi-square of 2,000 tokens with 9 degrees of freedom or fewer: above 34 once in 10,000 tries."""
    x = LOGITS.copy()
    for token, _, bias in wanted.get("adjustments", []):
        x[token] += bias
    x[[t for t in range(10) if t not in kept]] = -np.inf
    shares = softmax(x / wanted.get("temperature", 1.0))
    assert chi_square(sample_tokens(2000, isa, **wanted, seed=12345), shares) < 34
    by_seed = results(LOGITS, [{**wanted, "seed": seed} for seed in range(2000)], isa)["token"]
    assert chi_square(by_seed, shares) < 34


@pytest.mark.parametrize("isa", SUPPORTED)
def test_sampling_from_a_large_vocabulary(isa: str) -> None:
    """Each tenth of 20,000 tokens with the share that is its weight."""
    x = np.random.default_rng(0).standard_normal(20_000)
    tokens = sample_tokens(400, isa, x, seed=7)
    assert chi_square(tokens // 2_000, softmax(x).reshape(10, -1).sum(axis=1)) < 34
    assert len(set(tokens)) > 350


@pytest.mark.parametrize("isa", SUPPORTED)
def test_a_sample_depends_on_seed_and_counter_alone(isa: str) -> None:
    tokens = sample_tokens(64, isa, seed=2**63 + 5, top_p=0.95)
    backwards = [{"seed": 2**63 + 5, "counter": i, "top_p": 0.95} for i in range(64)[::-1]]
    assert (tokens == results(LOGITS, backwards, isa)["token"][::-1]).all()
    assert (tokens != sample_tokens(64, isa, seed=2**63 + 6, top_p=0.95)).any()


def test_random_numbers_are_uniform() -> None:
    u = np.array([uniform(seed, counter) for seed in (0, 1, 2**64 - 1) for counter in range(2000)])
    assert u.min() >= 0 and u.max() < 1 and len(set(u)) == len(u)
    assert chi_square((u * 10).astype(int), np.full(10, 0.1)) < 34


@pytest.mark.parametrize("isa", SUPPORTED)
def test_penalties(isa: str) -> None:
    """Positive logits are divided, others multiplied; frequency counts, presence does not; count 0: bias alone."""
    top = {"temperature": 0, "top_logprobs": 3}
    after = {
        (): 2,
        (
            ("repeat_penalty", 2.0),
            ("adjustments", ((2, 1, 0.0), (4, 1, 0.0))),
        ): 7,  # 2.0 -> 1.0 twice, 1.5 stays
        (("repeat_penalty", 2.0), ("adjustments", ((2, 0, 0.0), (4, 3, 0.0)))): 2,
        (("presence_penalty", 0.4), ("adjustments", ((2, 5, 0.0),))): 4,
        (("presence_penalty", 0.4), ("adjustments", ((2, 5, 0.0), (4, 1, 0.0)))): 2,  # 1.6 and 1.6
        (("frequency_penalty", 0.4), ("adjustments", ((2, 2, 0.0), (4, 1, 0.0)))): 4,  # 1.2 and 1.6
        (("adjustments", ((9, 0, 3.0),)),): 9,
        (("adjustments", ((2, 0, -np.inf), (4, 0, -np.inf))),): 7,
        (("repeat_penalty", 0.5), ("adjustments", ((7, 1, 0.0),))): 7,
    }
    rows = results(LOGITS, [{**top, **dict(some)} for some in after], isa)
    assert rows["token"].tolist() == list(after.values())
    expected = np.log(softmax(LOGITS))  # of the logits as they came
    np.testing.assert_allclose(rows["logprob"], expected[rows["token"]], rtol=1e-5)
    assert (rows["top_ids"][:, :3] == [2, 4, 7]).all()
    np.testing.assert_allclose(rows["top_logprobs"][:, :3], [expected[[2, 4, 7]]] * len(rows), rtol=1e-5)


@pytest.mark.parametrize("isa", SUPPORTED)
def test_careless_adjustments_do_no_harm(isa: str) -> None:
    """Out of order or outside of the vocabulary: passed over, at worst, with the logits untouched."""
    case = make_case("", LOGITS, [{"temperature": 0, "adjustments": [(1, 0, 0.0)] * 4}])
    adjustments = np.array(
        [(8, 1, 0.0, 0), (-4, 1, 1.0, 0), (2**30, 1, 1.0, 0), (10, 1, 9.0, 0)], LOGIT_ADJUSTMENT
    )
    careless = replace(case, arrays={**case.arrays, "adjustments": adjustments})
    assert run_once(KERNEL, isa, careless, False)["out"]["token"].tolist() == [2]


@pytest.mark.parametrize("isa", SUPPORTED)
def test_any_row_and_parameters(isa: str) -> None:
    """Random rows, with ties and strange numbers, against the reference."""
    rng = np.random.default_rng(11)
    for _ in range(60):
        vocab = int(rng.integers(1, 300))
        x = rng.standard_normal(vocab) * rng.choice([0.1, 1, 10])
        x = np.round(x) if rng.random() < 0.3 else x
        for strange in (np.nan, -np.inf, np.inf):
            if rng.random() < 0.3:
                x[rng.integers(0, vocab, 3)] = strange
        wanted = []
        for _ in range(8):
            choices: dict[str, list[float]] = {
                "temperature": [0, 0.3, 1, 5],
                "top_k": [0, 1, 3, 50],
                "top_p": [1, 0.9, 0.31],
                "min_p": [0, 0.03, 0.7],
                "top_logprobs": [-1, 0, 5, 20],
                "repeat_penalty": [1, 1.2],
                "frequency_penalty": [0, 0.3],
            }
            some: dict[str, Any] = {name: rng.choice(values) for name, values in choices.items()}
            tokens = np.unique(rng.integers(0, vocab, 10)).tolist()
            some["adjustments"] = [
                (t, int(rng.integers(0, 3)), float(rng.choice([0, 1, -np.inf]))) for t in tokens
            ]
            wanted.append({**some, "seed": int(rng.integers(2**63))})
        case = make_case("", x, wanted)
        expected = KERNEL.reference(case.arrays, case.scalars, case.counts)
        assert_matches(case, run_once(KERNEL, isa, case, False), expected)


def test_records_have_the_sizes_of_step_inputs() -> None:
    assert (SAMPLING_PARAMETERS.itemsize, LOGIT_ADJUSTMENT.itemsize, SAMPLING_RESULT.itemsize) == (
        64,
        16,
        256,
    )

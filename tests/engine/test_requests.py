"""Requests that cannot be served are refused with a sentence that says what to do, and leave nothing behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tandem.engine.params import SamplingParams
from tandem.errors import ContextError, RequestError
from tandem.program.step_inputs import MAX_BIASES
from tests.engine.simulation import VOCAB, SimulatedEngine

pytestmark = pytest.mark.fast


def make(batch: int = 2, context: int = 64) -> SimulatedEngine:
    return SimulatedEngine(windows=(0,), blocks=(1000,), context=context, batch=batch, tokens=512)


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "problem"),
    [
        ([], {}, RequestError, "the prompt is empty: give at least one token"),
        ([1] * 64, {}, ContextError, "64 tokens and the context holds 64, .*shorten it, or"),
        ([1] * 1000, {}, ContextError, "1000 tokens and the context holds 64"),
        ([1, VOCAB], {}, RequestError, "a token id is outside 0 to 999"),
        ([1, -1], {}, RequestError, "a token id is outside 0 to 999"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, RequestError, "logit_bias names a token outside 0 to 999"),
        ([1], {"logit_bias": {-1: 1.0}}, RequestError, "logit_bias names a token outside"),
    ],
)
def test_refused(prompt: list[int], params: dict[str, Any], kind: type[Exception], problem: str) -> None:
    engine = make()
    with pytest.raises(kind, match=problem):
        engine.submit(prompt, SamplingParams(**params))
    assert engine.step() == []
    engine.check_idle()


def test_too_many_biases() -> None:
    engine = SimulatedEngine(windows=(0,), blocks=(9,), context=64, batch=1, tokens=64)
    engine.model.config.vocab = 2 * MAX_BIASES  # type: ignore[misc]
    engine.submit([1], SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES), 1.0)))
    with pytest.raises(RequestError, match=f"{MAX_BIASES + 1} entries: give {MAX_BIASES} at most"):
        engine.submit([1], SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES + 1), 1.0)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repeat_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": float("nan")},
        {"logprobs": -1},
        {"logprobs": 21},
        {"stop": ("",)},
        {"logit_bias": {1: float("nan")}},
        {"max_tokens": None},
        {"max_tokens": 2.5},
        {"max_tokens": True},
        {"temperature": "x"},
        {"temperature": None},
        {"temperature": 1e39},
        {"top_k": 1.5},
        {"seed": 1.5},
        {"logprobs": 1.5},
        {"stop": 5},
        {"stop": [str(i) for i in range(129)]},
        {"stop": ["a", 5]},
        {"ignore_eos": "no"},
        {"logit_bias": {"1": 1.0}},
        {"logit_bias": {1: "a"}},
        {"logit_bias": [1]},
        {"logit_bias": np.array([1, 2])},
        {"stop": np.array([1, 2])},
        {"choices": np.array([1, 2])},
    ],
    ids=str,
)
def test_parameters_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong)).split("_")[0]):
        SamplingParams(**wrong)


def test_parameters_at_their_limits() -> None:
    SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0, logprobs=0, stop=())
    SamplingParams(temperature=100, top_k=10**6, top_p=1e-6, min_p=1, repeat_penalty=0.5, logprobs=20)
    assert SamplingParams(stop="end").stop == ("end",)
    none = SamplingParams(stop=None, logit_bias=None, seed=None, logprobs=None)  # type: ignore[arg-type]
    assert none == SamplingParams()
    SamplingParams(logit_bias={1: float("-inf"), 2: 5}, max_tokens=np.int64(3), temperature=np.float32(0.5))  # type: ignore[arg-type]


def test_a_top_k_beyond_every_vocabulary() -> None:
    engine = make()
    engine.submit([1], SamplingParams(top_k=2**40, temperature=1.0))
    engine.step()
    assert engine.inputs.params[0, 1] == 2**31 - 1


def test_the_longest_prompt_gets_one_token() -> None:
    engine = make()
    sequence = engine.submit([1] * 63, SamplingParams(max_tokens=5))
    engine.run(sequence)
    assert (len(sequence.generated), sequence.finish_reason) == (1, "length")


def test_the_same_seed_is_written_whatever_its_sign_or_size() -> None:
    """Seeds are 64 bits; what the kernel gets does not depend on the row or on the batch."""
    for seed in (0, 1, -1, 2**63, 2**64 + 5, np.int64(-7)):
        engine = make()
        engine.submit([1], SamplingParams(seed=5))
        sequence = engine.submit([2, 3], SamplingParams(seed=seed))  # type: ignore[arg-type]
        engine.step()
        low, high = engine.inputs.params[1, 7:9].astype("uint32").tolist()
        assert high << 32 | low == int(seed) % 2**64 == sequence.request.seed


def test_history_and_bias_of_every_row_have_room() -> None:
    """A batch full of long histories and biases loses none of them: penalties do not depend on the batch."""
    engine = SimulatedEngine(windows=(0,), blocks=(1000,), context=1024, batch=8, tokens=8192)
    params = SamplingParams(repeat_penalty=1.1, logit_bias=dict.fromkeys(range(5), 2.0), max_tokens=3)
    sequences = [engine.submit([(i + j) % VOCAB for j in range(1000)], params) for i in range(8)]
    engine.run(*sequences[:1])
    for row, sequence in enumerate(sequences):
        first, count = engine.inputs.params[row, 10:12]
        adjustments = engine.inputs.adjustments[first : first + count]
        biases = adjustments.view(np.float32)[:, 2]
        history = dict.fromkeys(range(VOCAB), 1)
        for token in sequence.tokens[1000:-1]:
            history[token] += 1
        assert adjustments[:, :2].tolist() == sorted([token, count] for token, count in history.items())
        assert {int(e[0]) for e, bias in zip(adjustments, biases, strict=True) if bias == 2.0} == set(
            range(5)
        )

"""Log-probabilities of prompts, Python functions that change logits, and requests with nothing left to choose from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem import LLM
from tandem.errors import RequestError
from tests.cli.tiny_model import write_tiny_model

PROMPT = "A prompt of more than sixteen tokens, so that it has full blocks."


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("parameters") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, threads=1, context=512, batch=5, device="cpu") as llm:
        yield llm


def log_softmax(logits: Any) -> Any:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def test_prompt_logprobs_are_those_of_the_logits(llm: LLM) -> None:
    ids = llm.tokenize(PROMPT)
    expected = log_softmax(llm.logits(ids))
    found = llm.generate(PROMPT, max_tokens=3, prompt_logprobs=2, logprobs=0)
    assert found.prompt_logprobs and found.prompt_logprobs[0] is None
    assert [one.id for one in found.prompt_logprobs[1:] if one] == ids[1:]
    for position, one in enumerate(found.prompt_logprobs[1:]):
        assert one and one.logprob == pytest.approx(expected[position, ids[position + 1]], abs=1e-4)
        best = np.argsort(-expected[position], kind="stable")[:2]
        assert [logprob for _, _, logprob in one.top] == pytest.approx(expected[position, best], abs=1e-4)
    plain = llm.generate(PROMPT, max_tokens=3)
    assert found.token_ids == plain.token_ids and plain.prompt_logprobs is None


def test_prompt_logprobs_beside_others_and_again(llm: LLM) -> None:
    """Rows are few, others have theirs, and what the cache holds of the prompt is no reason to say less."""
    alone = llm.generate(PROMPT, max_tokens=2, prompt_logprobs=0).prompt_logprobs
    streams = [llm.stream(f"{i} others", max_tokens=30, ignore_eos=True) for i in range(3)]
    for stream in streams:
        next(stream)
    again = llm.generate([PROMPT, PROMPT], max_tokens=2, prompt_logprobs=0)
    for result in again:
        assert result.prompt_logprobs and alone
        assert [one and one.logprob for one in result.prompt_logprobs] == pytest.approx(
            [one and one.logprob for one in alone], abs=1e-4
        )
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]


def test_a_logits_processor_changes_only_its_request(llm: LLM) -> None:
    plain = llm.generate(["one", "two"], max_tokens=12, ignore_eos=True)
    seen: list[list[int]] = []

    def count_up(tokens: list[int], logits: Any) -> Any:
        seen.append(tokens)
        changed = np.full_like(logits, -np.inf)
        changed[65 + len(tokens) % 26] = 0.0
        return changed

    streams = [llm.stream(prompt, max_tokens=12, ignore_eos=True) for prompt in ("one", "two")]
    slow = llm.stream("x", max_tokens=12, logits_processor=count_up, logprobs=1, temperature=1.0)
    ids: list[list[int]] = [[], [], []]
    for _ in range(13):
        for found, stream in zip(ids, (*streams, slow), strict=True):
            found += [token.id for token in [next(stream, None)] if token]
    assert ids[:2] == [result.token_ids for result in plain]
    assert ids[2] == [65 + len(tokens) % 26 for tokens in seen] and len(seen) == 12
    assert seen[-1][-11:] == ids[2][:11], "it is given the tokens so far"


def test_a_logits_processor_that_does_nothing(llm: LLM) -> None:
    for params in (
        {},
        {"temperature": 0.8, "seed": 3, "top_k": 30},
        {"repeat_penalty": 1.3, "logit_bias": {66: 3.0}},
    ):
        common: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, **params}
        slow = llm.generate("x", logits_processor=lambda tokens, logits: None, **common)
        assert slow.token_ids == llm.generate("x", **common).token_ids


@pytest.mark.parametrize(
    ("processor", "problem"),
    [
        (lambda tokens, logits: 1 / 0, r"the logits processor failed: ZeroDivisionError"),
        (lambda tokens, logits: logits[:3], r"the logits processor made \(3,\) of"),
        (lambda tokens, logits: "no", r"the logits processor failed: ValueError"),
        (lambda tokens, logits: logits * np.nan, "the logits processor leaves no token"),
        (5, "logits_processor must be a function"),
    ],
    ids=["raises", "shape", "type", "nothing left", "no function"],
)
def test_a_failing_logits_processor_fails_only_its_request(llm: LLM, processor: Any, problem: str) -> None:
    other = llm.stream("one", max_tokens=20, ignore_eos=True)
    first = next(other)
    with pytest.raises(RequestError, match=problem):
        llm.generate("x", logits_processor=processor)
    ids = [first.id, *(token.id for token in other)]
    assert ids == llm.generate("one", max_tokens=20, ignore_eos=True).token_ids
    assert llm.engine.cache.free_blocks == llm.engine.cache.blocks


def test_all_tokens_banned(llm: LLM) -> None:
    everything = dict.fromkeys(range(llm.config["vocab"]), float("-inf"))
    with pytest.raises(RequestError, match="logit_bias bans every token: leave one"):
        llm.generate("x", logit_bias=everything)
    some = {token: bias for token, bias in everything.items() if token not in llm.tokenizer.eos_ids}
    with pytest.raises(RequestError, match="logit_bias bans every token: leave one"):
        llm.generate("x", logit_bias=some, min_tokens=2)
    assert llm.generate("x", logit_bias=some).finish_reason == "stop"


def test_a_constraint_whose_tokens_are_all_banned(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    digits = {token: float("-inf") for token in range(ord("0"), ord("9") + 1)}
    with pytest.raises(RequestError, match="logit_bias bans every token that the output constraint allows"):
        llm.generate("x", regex="[0-9]{3}", logit_bias=digits)

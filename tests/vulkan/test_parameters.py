"""Tests of tests/engine/test_parameters.py on a GPU: rows of logits come from its memory, two steps are in flight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import LLM
from tests.engine.test_parameters import (
    path,
    test_a_constraint_whose_tokens_are_all_banned,
    test_a_failing_logits_processor_fails_only_its_request,
    test_a_logits_processor_changes_only_its_request,
    test_a_logits_processor_that_does_nothing,
    test_prompt_logprobs_are_those_of_the_logits,
    test_prompt_logprobs_beside_others_and_again,
)

__all__ = [
    "path",
    "test_a_constraint_whose_tokens_are_all_banned",
    "test_a_failing_logits_processor_fails_only_its_request",
    "test_a_logits_processor_changes_only_its_request",
    "test_a_logits_processor_that_does_nothing",
    "test_prompt_logprobs_are_those_of_the_logits",
    "test_prompt_logprobs_beside_others_and_again",
]


@pytest.fixture(scope="module")
def llm(path: Path, lavapipe: str) -> Iterator[LLM]:
    with LLM(path, context=512, batch=5, device=lavapipe) as llm:
        yield llm

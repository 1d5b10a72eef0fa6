"""Tests of tests/engine/test_parameters.py on a GPU: rows of logits come from its memory, two steps are in flight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import LLM
from tests.engine.test_parameters import (
    path,
    test_a_form_of_which_everything_is_banned,
    test_a_processor_changes_logits_of_its_request_alone,
    test_a_processor_that_does_nothing_changes_nothing,
    test_a_processor_that_fails_fails_its_request_alone,
    test_prompt_logprobs_are_those_of_the_logits,
    test_prompt_logprobs_beside_others_and_again,
)

__all__ = [
    "path",
    "test_a_form_of_which_everything_is_banned",
    "test_a_processor_changes_logits_of_its_request_alone",
    "test_a_processor_that_does_nothing_changes_nothing",
    "test_a_processor_that_fails_fails_its_request_alone",
    "test_prompt_logprobs_are_those_of_the_logits",
    "test_prompt_logprobs_beside_others_and_again",
]


@pytest.fixture(scope="module")
def llm(path: Path, lavapipe: str) -> Iterator[LLM]:
    with LLM(path, context=512, batch=5, device=lavapipe) as llm:
        yield llm

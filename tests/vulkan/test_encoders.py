"""Models that embed and rank texts give on a GPU what they give on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from tandem import LLM
from tests.models.encoder_texts import QUERY, TEXTS
from tests.models.test_encoders import GOLDENS, golden, pooled


@pytest.mark.parametrize("name", ["bert", "nomic-bert", "modern-bert"])
def test_vectors_equal_those_of_transformers(name: str, lavapipe: str) -> None:
    expected = np.array([pooled(hidden, "mean") for _, hidden in golden(name)])
    with LLM(GOLDENS / f"{name}.gguf", device=lavapipe, kv="f32") as llm:
        assert np.abs(llm.embed(TEXTS) - expected).max() < 1e-5


def test_scores_equal_those_of_transformers(lavapipe: str) -> None:
    expected = [float(scores[0]) for _, scores in golden("bert-rank")]
    with LLM(GOLDENS / "bert-rank.gguf", device=lavapipe, kv="f32") as llm:
        assert np.abs(llm.rerank(QUERY, TEXTS) - expected).max() < 1e-5

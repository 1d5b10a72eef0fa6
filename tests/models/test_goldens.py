"""The engine agrees with transformers on tiny models of every architecture, in float32 throughout."""

from __future__ import annotations

import numpy as np
import pytest

from tandem import LLM
from tests.models.reference import Capture, ReferenceModel
from tests.models.test_reference import GOLDENS, NAMES, golden_prompts

pytestmark = pytest.mark.fast


def load(name: str) -> LLM:
    return LLM(GOLDENS / f"{name}.gguf", device="cpu", threads=2, context=128, kv="f32")


@pytest.mark.parametrize("name", NAMES)
def test_engine_equals_transformers(name: str) -> None:
    with load(name) as llm:
        for ids, logits in golden_prompts(name):
            assert np.abs(llm.logits(ids) - logits).max() < 1e-4


@pytest.mark.parametrize(
    "name",
    [
        "gemma3-pattern3",
        "gemma2",
        "llama",
        "qwen2",
        "qwen3",
        "qwen3moe",
        "qwen2moe",
        "olmoe",
        "olmo2",
        "glm4",
        "gemma4",
        "gemma4-shared",
        "deepseek-v3",
        "qwen35",
        "qwen3next",
        "lfm2",
    ],
)
def test_intermediates_equal_the_reference(name: str) -> None:
    """The first layer to differ says where a model went wrong."""
    [*_, (ids, _)] = golden_prompts(name)
    expected: Capture = {}
    ReferenceModel(GOLDENS / f"{name}.gguf").logits(ids, expected)
    with load(name) as llm:
        # Some are fused.
        names = [intermediate for intermediate in expected if intermediate in llm.intermediates]
        captured = llm.capture(ids, names)
    assert {"blk.0.attn_out", "blk.0.ffn_out", "blk.0.out", "blk.1.out", "result_norm"} <= captured.keys()
    for intermediate in names:
        assert np.abs(captured[intermediate] - expected[intermediate]).max() < 1e-4, intermediate

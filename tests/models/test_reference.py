"""The NumPy reference agrees with transformers, so that it can judge the engine on real models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.llama_cpp import LlamaCpp
from tests.models.reference import Array, ReferenceModel

GOLDENS = Path(__file__).parent / "goldens"
NAMES = sorted(path.stem for path in GOLDENS.glob("*.gguf"))

pytestmark = pytest.mark.fast


def golden_prompts(name: str) -> Iterator[tuple[list[int], Array]]:
    """A golden model's prompts (ids [tokens]), and logits [tokens, vocabulary] from transformers."""
    with np.load(GOLDENS / f"{name}.npz") as golden:
        for key in golden.files:
            if key.startswith("ids_"):
                yield golden[key].tolist(), golden[key.replace("ids", "logits")]


@pytest.mark.parametrize("name", NAMES)
def test_reference_equals_transformers(name: str) -> None:
    model = ReferenceModel(GOLDENS / f"{name}.gguf")
    for ids, logits in golden_prompts(name):
        assert np.abs(model.logits(ids) - logits).max() < 1e-4


# It does not look at the windows of the first three; for the last see below.
DIFFERENT_IN_LLAMA_CPP = ("mistral-window", "phi3-long", "exaone4-window", "gpt-oss")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in DIFFERENT_IN_LLAMA_CPP])
def test_llama_cpp_reads_the_same_model(name: str) -> None:
    """The files are what llama.cpp's converter would write; its KV is float16, hence the wider tolerance."""
    model = LlamaCpp(GOLDENS / f"{name}.gguf", context=64)
    for ids, logits in golden_prompts(name):
        assert np.abs(np.concatenate(list(model.logits(ids))) - logits).max() < 0.05
    model.close()


def test_llama_cpp_rounds_the_pairs_of_yarn() -> None:
    """In gpt-oss, transformers does not."""
    ours, model = ReferenceModel(GOLDENS / "gpt-oss.gguf"), LlamaCpp(GOLDENS / "gpt-oss.gguf", context=64)
    ours.whole_pairs = True
    for ids, _ in golden_prompts("gpt-oss"):
        assert np.abs(np.concatenate(list(model.logits(ids))) - ours.logits(ids)).max() < 0.05
    model.close()


@pytest.mark.parametrize(
    ("name", "key", "wrong"),
    [
        ("gemma3-pattern6", "attention.sliding_window", 9),
        ("gemma3-pattern6", "attention.sliding_window_pattern", 5),
        ("gemma3-pattern6", "rope.scaling.factor", 1.0),
        ("gemma3-pattern6", "rope.freq_base_swa", 1e6),
        ("gemma3-pattern6", "attention.layer_norm_rms_epsilon", 1e-6),
        ("gemma3-pattern3", "attention.sliding_window_pattern", 6),
        ("gemma3-pattern3", "rope.freq_base_swa", 1e4),
        ("gemma3-pattern3", "final_logit_softcapping", 0.0),
        ("gemma3-pattern-array", "attention.sliding_window_pattern", 6),
        ("gemma3-global", "attention.sliding_window", 8),
        ("gemma2", "attention.sliding_window", 7),
        ("gemma2", "attention.sliding_window_pattern", 1),
        ("gemma2", "attn_logit_softcapping", 50.0),
        ("gemma2", "final_logit_softcapping", 30.0),
        ("llama", "rope.freq_base", 1e6),
        ("llama-linear-biased", "rope.scaling.factor", 1.0),
        ("llama-yarn", "rope.scaling.type", "linear"),
        ("llama-yarn", "rope.scaling.original_context_length", 256),
        ("mistral-window", "attention.sliding_window", 9),
        ("qwen2", "attention.layer_norm_rms_epsilon", 1e-6),
        ("olmo3", "attention.sliding_window", 7),
        ("olmo3", "rope.scaling.type", "none"),
        ("phi3-long", "rope.scaling.original_context_length", 256),
        ("phi3-long", "rope.scaling.attn_factor", 1.0),
        ("granite", "embedding_scale", 1.0),
        ("granite", "residual_scale", 1.0),
        ("granite", "attention.scale", 8**-0.5),
        ("granite", "logit_scale", 1.0),
        ("glm4", "rope.dimension_count", 16),
        ("cohere2", "logit_scale", 1.0),
        ("cohere2", "attention.sliding_window_pattern", 4),
        ("exaone4-window", "attention.sliding_window_pattern", 4),
        ("starcoder2", "attention.layer_norm_epsilon", 1e-6),
        ("stablelm", "rope.dimension_count", 16),
        ("qwen3-yarn", "rope.scaling.type", "none"),
        ("mistral3", "rope.scaling.yarn_log_multiplier", 0.0),
        ("mistral3", "attention.temperature_scale", 0.0),
        ("gpt-oss", "attention.sliding_window", 7),
        ("gpt-oss", "attention.sliding_window_pattern", 3),
        ("glm4moe", "expert_weights_scale", 1.0),
        ("deepseek-v2-lite", "rope.scaling.yarn_log_multiplier", 0.0),
        ("deepseek-v2-lite", "expert_weights_norm", True),
        ("deepseek-v3", "expert_group_used_count", 1),
        ("deepseek-v3", "expert_gating_func", 1),
        ("deepseek-v3", "expert_weights_scale", 1.0),
        ("glm4moe-lite", "rope.freq_base", 1e4),
        ("gemma4", "attention.sliding_window", 7),
        ("gemma4", "rope.freq_base_swa", 1e6),
        ("gemma4", "rope.freq_base", 1e4),
        ("gemma4", "final_logit_softcapping", 0.0),
        ("gemma4-moe", "expert_used_count", 2),
        ("lfm2", "rope.freq_base", 1e4),
        ("lfm2moe", "expert_used_count", 2),
        ("granitehybrid", "residual_scale", 1.0),
        ("granitehybrid", "rope.scaling.finetuned", True),
        ("granitehybrid-moe", "expert_used_count", 1),
        ("nemotron_h_moe", "expert_weights_scale", 1.0),
        ("nemotron_h_moe", "expert_used_count", 2),
        ("falcon-h1", "rope.freq_base", 1e4),
    ],
)
def test_goldens_tell_right_from_wrong(name: str, key: str, wrong: Any) -> None:
    """A model that misreads one key is far outside the tolerance: the goldens do test that key."""
    model = ReferenceModel(GOLDENS / f"{name}.gguf")
    model.metadata[f"{model.architecture}.{key}"] = wrong
    model.read_sizes()
    [*_, (ids, logits)] = golden_prompts(name)
    assert np.abs(model.logits(ids) - logits).max() > 0.005


@pytest.mark.parametrize("name", NAMES)
def test_goldens_tell_a_missing_tensor(name: str) -> None:
    """Every tensor that a loader could overlook moves the logits."""
    [*_, (ids, logits)] = golden_prompts(name)
    names = ReferenceModel(GOLDENS / f"{name}.gguf").tensors
    for tensor in filter(
        re.compile(r"(blk\.0\..*(norm|bias|sinks|exp_probs)|output|rope_freqs)").match, names
    ):
        model = ReferenceModel(GOLDENS / f"{name}.gguf")
        del model.tensors[tensor]
        assert np.abs(model.logits(ids) - logits).max() > 0.005, tensor


@pytest.mark.parametrize("name", ["gemma3-27b", "gemma2-27b"])
def test_goldens_tell_the_attention_scale(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceModel, "score_scale", lambda model: model.head_size**-0.5)
    [*_, (ids, logits)] = golden_prompts(name)
    assert np.abs(ReferenceModel(GOLDENS / f"{name}.gguf").logits(ids) - logits).max() > 0.005

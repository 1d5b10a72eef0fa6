"""Gemma 4 beyond its logits: batches, saved conversations, int8 keys, several devices, and files that contradict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem import LLM
from tandem.errors import DeviceError, ModelFileError
from tandem.model.architectures import gemma4
from tests.models.llama_cpp import LlamaCpp
from tests.models.mixtures import copy
from tests.models.test_reference import GOLDENS, golden_prompts

pytestmark = pytest.mark.fast
NAMES = ["gemma4", "gemma4-moe", "gemma4-shared"]


def load(name: str, **options: Any) -> LLM:
    return LLM(GOLDENS / f"{name}.gguf", **({"device": "cpu", "threads": 2, "context": 128} | options))


@pytest.mark.parametrize("name", NAMES)
def test_batches_and_saved_conversations_do_not_change_the_output(name: str, tmp_path: Path) -> None:
    prompts = [ids for ids, _ in golden_prompts(name)]
    with load(name, batch=8) as llm:
        alone = [llm.generate([ids], max_tokens=8, temperature=0, logprobs=0)[0] for ids in prompts]
        together = llm.generate(prompts * 3, max_tokens=8, temperature=0, logprobs=0)
        llm.save(prompts[-1], tmp_path / "state")
    for i, result in enumerate(together):
        assert result.token_ids == alone[i % 3].token_ids
        assert [t.logprob for t in result.logprobs] == [t.logprob for t in alone[i % 3].logprobs]
    with load(name) as llm:
        llm.restore(tmp_path / "state")
        again = llm.generate([prompts[-1]], max_tokens=8, temperature=0)[0]
    assert again.token_ids == alone[-1].token_ids


@pytest.mark.parametrize("name", NAMES)
def test_int8_keys_and_values_are_near(name: str) -> None:
    [*_, (ids, logits)] = golden_prompts(name)
    with load(name, kv="q8") as llm:
        assert np.abs(llm.logits(ids) - logits).mean() < 0.02


@pytest.mark.parametrize("name", ["gemma4", "gemma4-moe"])
def test_layers_on_two_devices(name: str) -> None:
    [*_, (ids, logits)] = golden_prompts(name)
    with load(name, device="cpu,cpu", kv="f32") as llm:
        assert np.abs(llm.logits(ids) - logits).max() < 1e-4


def test_layers_that_share_keys_stay_on_one_device() -> None:
    with pytest.raises(DeviceError, match="name one device"):
        load("gemma4-shared", device="cpu,cpu")


def test_merges_are_scores_of_pieces() -> None:
    """As llama.cpp encodes: merges in place of SentencePiece's scores, bytes for what has no piece."""
    other = LlamaCpp(GOLDENS / "gemma4.gguf", context=64)
    with load("gemma4") as llm:
        for text in ("the the", "  the\n\nthethe he", "e\u00e9 \U0001f600 th", "", " ", "ttheh<eos>"):
            assert llm.tokenizer.encode(text) == other.tokenize(text)
            assert llm.tokenizer.decode(llm.tokenizer.encode(text)) == text
        assert llm.tokenizer.encode("the the") == [2, 262, 264, 266]
    other.close()


SLIPS = {
    "values are not normed": ("norm_heads", lambda b, x, *_: x),
    "layers are not scaled": ("scale", lambda b, x, factor, name: x),
    "the first embedding for each layer": (
        "slice",
        lambda b, x, begin, end, name: b._emit("slice", [x], [name], begin=0, end=end - begin)[0],
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_changes_the_logits(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, wrong = SLIPS[slip]
    monkeypatch.setattr(gemma4.Builder, method, wrong)
    [*_, (ids, logits)] = golden_prompts("gemma4-shared")
    with load("gemma4-shared", kv="f32") as llm:
        assert np.abs(llm.logits(ids) - logits).max() > 1e-2


def test_experts_without_their_scales_change_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = gemma4.blocks.Routing
    monkeypatch.setattr(gemma4.blocks, "Routing", lambda *a, **k: kept(*a, **(k | {"expert_scales": None})))
    [*_, (ids, logits)] = golden_prompts("gemma4-moe")
    with load("gemma4-moe", kv="f32") as llm:
        assert np.abs(llm.logits(ids) - logits).max() > 1e-2


@pytest.mark.parametrize(
    ("key", "wrong", "problem"),
    [
        ("attention.shared_kv_layers", 4, "find no keys and values"),
        ("attention.shared_kv_layers", 3, "find no keys and values"),
        ("attention.head_count_kv", [1, 1], "not 4 sizes"),
        ("attention.head_count_kv", [1, 1, 0, 1], "not 4 sizes"),
        ("attention.head_count_kv", [3, 1, 3, 1], "not a multiple of 3"),
        ("attention.head_count_kv", [1, 1, 2, 1], "find no keys and values"),
        ("feed_forward_length", [64, 64, 64, 128], "the metadata asks for"),
        ("embedding_length_per_layer_input", 7, "is not even"),
        ("embedding_length_per_layer_input", 1024, "is not a size"),
        ("rope.dimension_count_swa", 17, "cannot rotate"),
        ("rope.dimension_count_swa", 64, "cannot rotate"),
    ],
)
def test_files_that_contradict_themselves(key: str, wrong: Any, problem: str, tmp_path: Path) -> None:
    path = copy(
        GOLDENS / "gemma4-shared.gguf", tmp_path / "m.gguf", {f"gemma4.{key}": wrong}, lambda *named: [named]
    )
    with pytest.raises(ModelFileError, match=problem) as error:
        LLM(path, device="cpu")
    assert "\n" not in str(error.value)

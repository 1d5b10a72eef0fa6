"""Mixtures of experts: real weights, slips in routing, batches, and bad files. test_goldens.py has the tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem import LLM
from tandem.devices.cpu.device import CPUDevice
from tandem.engine.engine import Engine
from tandem.errors import ModelFileError
from tandem.model.architectures import blocks
from tandem.model.synthetic import SyntheticModel
from tandem.program.graph import Routing
from tests.models.llama_cpp import LlamaCpp
from tests.models.mixtures import Array, as_dense, as_mixture, copy, mixture_keys, with_mxfp4_experts
from tests.models.reference import ReferenceModel
from tests.models.test_reference import GOLDENS, golden_prompts
from tests.packages import model_path

TEXT = "The difference between a list and a tuple in Python is that a list can be changed, while a tuple"
PROMPTS = [TEXT, "Once upon a time", "1, 2, 3, 4,", "The capital of France is"]


def load(path: Path, **options: Any) -> LLM:
    return LLM(path, device="cpu", threads=2, context=256, kv="f32", **options)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """SmolLM2 with float16 weights, and the same as a mixture. (Activations of 8 bits would amplify the rounding of
    sums that are added in another order.)"""
    folder, source = tmp_path_factory.mktemp("mixture"), model_path("smollm2")
    dense = copy(source, folder / "dense.gguf", {}, as_dense)
    mixture = copy(source, folder / "mixture.gguf", mixture_keys(1536), as_mixture)
    with load(dense) as a, load(mixture) as b:
        yield a, b


def test_a_mixture_equals_the_dense_model_that_it_was_made_of(pair: tuple[LLM, LLM]) -> None:
    dense, mixture = pair
    for prompt in PROMPTS:
        ids = dense.tokenizer.encode(prompt)
        assert np.abs(dense.logits(ids) - mixture.logits(ids)).max() < 1e-3


def test_a_mixture_writes_what_the_dense_model_writes(pair: tuple[LLM, LLM]) -> None:
    a, b = ([r.token_ids for r in llm.generate(PROMPTS, max_tokens=24, temperature=0)] for llm in pair)
    assert a == b


@pytest.mark.fast
@pytest.mark.parametrize(
    "name", ["qwen3moe", "qwen2moe", "mixtral", "olmoe", "gpt-oss", "glm4moe", "gemma4-moe", "deepseek-v3"]
)
def test_batches_do_not_change_a_mixtures_output(name: str) -> None:
    """Bit for bit: a prompt alone, in chunks, and beside others that use the same experts."""
    prompts = [ids for ids, _ in golden_prompts(name)]
    with LLM(GOLDENS / f"{name}.gguf", device="cpu", threads=2, context=128, batch=8) as llm:
        alone = [llm.generate([ids], max_tokens=8, temperature=0, logprobs=0)[0] for ids in prompts]
        together = llm.generate(prompts * 3, max_tokens=8, temperature=0, logprobs=0)
    for i, result in enumerate(together):
        assert result.token_ids == alone[i % len(prompts)].token_ids
        assert [t.logprob for t in result.logprobs] == [t.logprob for t in alone[i % len(prompts)].logprobs]


@pytest.mark.fast
def test_gpt_oss_in_mxfp4_is_as_near_as_in_llama_cpp(tmp_path: Path) -> None:
    """Both round activations of experts to 8 bits. (YaRN rounded as llama.cpp does would be another model.)"""
    path = copy(GOLDENS / "gpt-oss.gguf", tmp_path / "mxfp4.gguf", {}, with_mxfp4_experts)
    [_, (ids, _), *_] = golden_prompts("gpt-oss")
    reference, other = ReferenceModel(path), LlamaCpp(path, context=64)
    with load(path) as llm:
        ours = np.abs(llm.logits(ids) - reference.logits(ids)).mean()
    reference.whole_pairs = True
    theirs = np.abs(np.concatenate(list(other.logits(ids))) - reference.logits(ids)).mean()
    other.close()
    assert ours < 1.1 * theirs


SLIPS = {
    "one expert too few": lambda r: r._replace(used=r.used - 1),
    "weights are not normalised, or are": lambda r: r._replace(normalise=not r.normalise),
    "weights are scaled": lambda r: r._replace(scale=0.9),
    "sigmoid in place of softmax": lambda r: r._replace(sigmoid=True),
    "half of the experts are left out": lambda r: r._replace(expert_groups=2, groups_used=1),
}


@pytest.mark.fast
@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_routing_changes_the_logits(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the comparison with transformers would notice it."""
    monkeypatch.setattr(blocks, "Routing", lambda *a, **k: SLIPS[slip](Routing(*a, **k)))
    [*_, (ids, logits)] = golden_prompts("qwen2moe")
    with LLM(GOLDENS / "qwen2moe.gguf", device="cpu", threads=2, context=128, kv="f32") as llm:
        assert np.abs(llm.logits(ids) - logits).max() > 1e-2


def without(unwanted: str, name: str, values: Array) -> Iterator[tuple[str, Array]]:
    if name != unwanted:
        yield name, values


def ragged(name: str, values: Array) -> Iterator[tuple[str, Array]]:
    yield name, values[:-1] if "up_exps" in name else values


KEYS = {
    "expert_count": (0, 7, 9, 2**31 - 1, 2**31),
    "expert_used_count": (0, 9, 2**31),
    "expert_feed_forward_length": (0, 31, 64, 2**31),
    "expert_shared_feed_forward_length": (0, 63, 2**31),
}


@pytest.mark.fast
@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in KEYS.items() for value in values])
def test_wrong_sizes_are_errors(tmp_path: Path, key: str, value: int) -> None:
    bad = copy(GOLDENS / "qwen2moe.gguf", tmp_path / "bad.gguf", {f"qwen2moe.{key}": value}, as_dense)
    with pytest.raises(ModelFileError):
        load(bad)


@pytest.mark.fast
@pytest.mark.parametrize("part", ["gate_inp", "gate_exps", "down_exps", "up_shexp", "gate_inp_shexp"])
def test_missing_and_ragged_experts_are_errors(tmp_path: Path, part: str) -> None:
    missing = partial(without, f"blk.1.ffn_{part}.weight")
    with pytest.raises(ModelFileError, match=r"missing|shape"):
        load(copy(GOLDENS / "qwen2moe.gguf", tmp_path / "missing.gguf", {}, missing))
    with pytest.raises(ModelFileError, match="shape"):
        load(copy(GOLDENS / "qwen2moe.gguf", tmp_path / "ragged.gguf", {}, ragged))


@pytest.mark.parametrize(("skew", "least", "most"), [(0.0, 29, 44), (2.0, 1, 28)])
def test_tokens_of_a_synthetic_mixture_choose_experts_uniformly_or_skewed(
    skew: float, least: int, most: int
) -> None:
    """8 tokens that choose 6 of 64 experts each are expected to use 35."""
    model = SyntheticModel("granite-4-h-tiny:q4_0", layers=2, skew=skew)
    device = CPUDevice(threads=2)
    try:
        engine = Engine.load(model, device, context=32, batch=1)
        ids = np.random.default_rng(1).integers(0, model.config.vocab, 8).tolist()
        parts = list(engine.captured(ids, ["blk.1.ffn_router"]))
    finally:
        device.close()
    logits = np.concatenate([part["blk.1.ffn_router"] for part in parts])
    chosen = np.argsort(-logits, axis=1)[:, : model.config.experts_used]
    assert least <= len(np.unique(chosen)) <= most

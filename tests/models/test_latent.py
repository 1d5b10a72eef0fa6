"""Latent attention: its cache is the latent alone, and bad files are errors. test_goldens.py has its logits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem import LLM
from tandem.errors import ModelFileError
from tandem.kernels.abi import KV_BLOCK
from tandem.kernels.panels import panel_layout
from tandem.model.synthetic import SyntheticModel
from tandem.program.fuse import PASSES
from tests.models.mixtures import as_dense, copy
from tests.models.test_reference import GOLDENS, golden_prompts
from tests.program.programs import build_with

pytestmark = pytest.mark.fast


def test_the_cache_has_576_numbers_of_a_token() -> None:
    """512 of the latent and 64 of the key, in float16; DeepSeek V2 Lite has 16 heads of 192 and 128."""
    model = SyntheticModel("deepseek-v2-lite", layers=2)
    layouts = model.layouts(panel_layout)
    program = build_with(model.config, layouts, PASSES, tokens=4, rows=1, context=10 * KV_BLOCK, kv="f16")
    assert program.arena_bytes["kv"] == 2 * 10 * KV_BLOCK * 2 * 576


@pytest.mark.parametrize("kv", ["f16", "q8"])
def test_latents_are_kept_shared_and_saved_like_keys_and_values(tmp_path: Path, kv: str) -> None:
    """The prefix cache, batches and a saved state change no bit; in int8 the tokens are near enough to be the same."""
    [*_, (ids, _)] = golden_prompts("glm4moe-lite")
    path = GOLDENS / "glm4moe-lite.gguf"
    with LLM(path, device="cpu", threads=2, context=128, batch=4, kv=kv) as llm:
        first, *others = llm.generate([ids] * 4, max_tokens=8, temperature=0, logprobs=0)
        again = llm.generate([ids], max_tokens=8, temperature=0, logprobs=0)[0]
        assert again.usage.cached_tokens == len(ids) // KV_BLOCK * KV_BLOCK - KV_BLOCK * (
            len(ids) % KV_BLOCK == 0
        )
    for result in (*others, again):
        assert [(t.id, t.logprob) for t in result.logprobs] == [(t.id, t.logprob) for t in first.logprobs]


KEYS = {
    "attention.kv_lora_rank": (0, 15, 17, 2000, 2**31),
    "attention.q_lora_rank": (0, 19, 2**31),
    "attention.key_length_mla": (0, 8, 31, 2**31),
    "attention.value_length_mla": (0, 15, 2**31),
    "rope.dimension_count": (0, 7, 32, 34, 2**31),
    "expert_group_count": (0, 3, 9, 2**31),
    "expert_group_used_count": (0, 5, 2**31),
    "expert_shared_count": (2, 2**31),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in KEYS.items() for value in values])
def test_wrong_sizes_are_errors(tmp_path: Path, key: str, value: int) -> None:
    bad = copy(GOLDENS / "deepseek-v3.gguf", tmp_path / "bad.gguf", {f"deepseek2.{key}": value}, as_dense)
    with pytest.raises(ModelFileError):
        LLM(bad, device="cpu", threads=1, context=128)

"""The prefix cache on disk with devices other than one CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem import LLM
from tandem.settings import read_settings
from tests.models.test_reference import GOLDENS


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the disk cache alone: pipelines that are compiled already stay where they are."""
    settings = read_settings()._replace(pipelines=tmp_path)
    monkeypatch.setattr("tandem.engine.llm.read_settings", lambda: settings)


PROMPT = [(7 * i) % 250 + 3 for i in range(115)]


@pytest.mark.parametrize(
    ("name", "kv", "options"),
    [
        ("gemma3-pattern3", "f16", {}),
        ("llama", "q8", {}),
        ("qwen35", "f16", {}),
        ("llama", "f16", {"gpu_memory": 100_000}),
        ("gemma3-pattern3", "f32", {"with": "cpu"}),
    ],
)
def test_a_restart_computes_a_prompt_no_second_time(
    name: str,
    kv: str,
    options: dict[str, Any],
    lavapipe: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = f"{lavapipe},{options['with']}" if "with" in options else lavapipe
    options = {key: value for key, value in options.items() if key != "with"}
    answers = []
    for restart in range(3):
        disk = None if restart == 0 else "10M"
        with LLM(
            GOLDENS / f"{name}.gguf", device=device, context=144, batch=2, kv=kv, disk_cache=disk, **options
        ) as llm:
            answers.append(llm.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True).token_ids)
            stats = llm.stats().disk
            assert (stats.restored_tokens if stats else 0) == (112 if restart == 2 else 0)
    assert answers[0] == answers[1] == answers[2]


def test_evicted_blocks_come_back_to_a_gpu(lavapipe: str) -> None:
    """Two steps are in flight, and memory holds one prompt."""
    prompts = [[(k * i) % 250 + 3 for i in range(115)] for k in (3, 7, 11)]
    options: dict[str, Any] = {"device": lavapipe, "context": 144, "batch": 1}
    with LLM(GOLDENS / "llama.gguf", **options) as llm:
        expected = [llm.generate(prompt, max_tokens=8, temperature=0).token_ids for prompt in prompts]
        one = llm.program.arena_bytes["kv"] / llm.engine.cache.blocks[0] * 10
    with LLM(GOLDENS / "llama.gguf", kv_memory=one, disk_cache="10M", **options) as llm:
        for _ in range(3):
            for prompt, ids in zip(prompts, expected, strict=True):
                assert llm.generate(prompt, max_tokens=8, temperature=0).token_ids == ids
        stats = llm.stats().disk
        assert stats and stats.hits >= 3 and not stats.damaged

"""A model's own draft head (MTP) on the Vulkan device: its drafts are those of the definition, and change no token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem import LLM
from tandem.engine.load_options import DRAFT_HEAD, NO_DRAFT
from tandem.engine.params import SamplingParams
from tests.engine.simulation import FixedCost
from tests.models.draft_heads import write_with_draft_head
from tests.models.reference import ReferenceModel

RANDOM = np.random.default_rng(7)
PROMPTS = [RANDOM.integers(0, 260, length).tolist() for length in (40, 1, 17, 70)]


@pytest.mark.parametrize("name", ["qwen35", "glm4moe"])
def test_drafts_are_those_of_the_definition(lavapipe: str, name: str, tmp_path: Path) -> None:
    path = write_with_draft_head(tmp_path / "tiny.gguf", name)
    reference, ids = ReferenceModel(path), PROMPTS[0]
    with LLM(path, device=lavapipe, context=256, batch=4, kv="f32", draft=DRAFT_HEAD) as llm:
        head = llm.engine.draft_head
        assert head
        sequence = llm.engine.submit(ids, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
        for _ in range(12):
            llm.engine.step()
            [draft] = head.propose([(sequence, 3)])
            assert draft == reference.draft(sequence.tokens, 3)
        llm.engine.cancel(sequence)


def test_drafts_change_no_token(lavapipe: str, tmp_path: Path) -> None:
    path, answers = write_with_draft_head(tmp_path / "tiny.gguf", "qwen35"), []
    for device, draft in (("cpu", NO_DRAFT), (lavapipe, DRAFT_HEAD), (lavapipe, None)):
        with LLM(path, device=device, context=256, batch=4, kv="f32", draft=draft) as llm:
            speculator = llm.engine.scheduler.speculator
            assert bool(speculator) is (draft == DRAFT_HEAD)
            assert len(llm.engine.step_slots) == (2 if device == lavapipe and not speculator else 1)
            if speculator:
                speculator.cost_model = FixedCost(0.001)
            found = llm.generate(PROMPTS, max_tokens=40, temperature=0, ignore_eos=True)
            answers.append([list(each.token_ids) for each in found])
            assert not speculator or speculator.drafted > 100
    assert answers[0] == answers[1] == answers[2]

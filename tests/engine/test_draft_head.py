"""A model's own draft head (MTP): its logits, and that drafts change no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tandem import LLM
from tandem.engine.draft_head import DraftHead
from tandem.engine.load_options import DRAFT_HEAD, NO_DRAFT
from tandem.engine.params import SamplingParams
from tandem.engine.sequence import Chunk
from tandem.errors import ModelFileError, RequestError
from tandem.model.model import open_model
from tests.engine.simulation import FixedCost
from tests.engine.test_batch_invariance import limit_step
from tests.engine.test_hybrid import requests
from tests.engine.tiny_models import WatchedEngine, opened
from tests.gguf_files import Key, write
from tests.models.draft_heads import GOLDENS, contents, write_with_draft_head
from tests.models.reference import ReferenceModel

FAMILIES = ("qwen35", "qwen35moe", "qwen3next", "glm4moe")


def head_of(engine: WatchedEngine) -> DraftHead:
    assert engine.draft_head and engine.scheduler.speculator
    engine.scheduler.speculator.cost_model = FixedCost(0.001)
    return engine.draft_head


class Watched:
    """The draft head of an engine, which after each step gives the logits that it drafts from."""

    def __init__(self, engine: WatchedEngine) -> None:
        self.head, self.logits = head_of(engine), dict[int, np.ndarray]()
        self.stored, self.head.store = self.head.store, self.store  # type: ignore[method-assign]

    def store(self, chunks: list[Chunk]) -> None:
        self.stored(chunks)
        [chunk] = chunks
        known, tokens = chunk.begin + chunk.count, chunk.sequence.tokens
        if known < len(tokens):
            chunk.sequence.tokens = tokens[: known + 1]
            [[first]] = self.head.propose([(chunk.sequence, 1)])
            chunk.sequence.tokens = tokens
            tensor = self.head.program.values["draft.logits"][1]
            self.logits[known - 1] = self.head.device.read(tensor).view(np.float32)[:266].copy()
            assert first == self.logits[known - 1].argmax()


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_logits_are_those_of_the_definition(name: str, copied: bool, tmp_path: Path) -> None:
    """The text is computed in chunks of 7 tokens, and drafts begin after each."""
    path = write_with_draft_head(tmp_path / "tiny.gguf", name, copied=copied)
    ids = np.random.default_rng(2).integers(0, 260, 50).tolist()
    expected = ReferenceModel(path).draft_logits(ids)
    with opened(path, threads=1, kv="f32", draft_head=True) as engine:
        limit_step(engine, 7)
        watched = Watched(engine)
        engine.run((ids, SamplingParams(max_tokens=1)))
        found = {position: logits for position, logits in watched.logits.items() if position < 49}
        assert list(found) == [6, 13, 20, 27, 34, 41, 48]
        for position, logits in found.items():
            assert np.abs(logits - expected[position]).max() < 1e-4


def test_later_draft_tokens_read_the_hidden_state_of_the_head(tmp_path: Path) -> None:
    """The second row is computed from what the first one gave, as the definition says."""
    path = write_with_draft_head(tmp_path / "tiny.gguf", "qwen35")
    reference, ids = ReferenceModel(path), np.random.default_rng(3).integers(0, 260, 20).tolist()
    with opened(path, threads=1, kv="f32", draft_head=True) as engine:
        head = head_of(engine)
        sequence = engine.submit(ids, SamplingParams(max_tokens=8, ignore_eos=True))
        engine.step()
        [draft] = head.propose([(sequence, 4)])
        assert draft == reference.draft(sequence.tokens, 4)


@pytest.mark.parametrize(("name", "options"), [
    ("qwen35", {}),
    ("qwen35", {"batch": 4, "kv_memory": 99_000}),
    ("qwen35moe", {}),
    ("glm4moe", {}),
])  # fmt: skip
def test_drafts_change_no_token(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    path, random = write_with_draft_head(tmp_path / "tiny.gguf", name), Random(5)
    wanted = [(prompt, replace(params, max_tokens=40, ignore_eos=True)) for prompt, params in requests(6)]
    wanted[2] = (
        wanted[2][0][:1],
        wanted[2][1],
    )  # before its first step, a prompt of one token has no hidden state
    with opened(path, prefix_caching=False) as engine:
        expected = [engine.run(request)[0][0] for request in wanted]
    with opened(path, draft_head=True, **options) as engine:
        head_of(engine)
        for _ in range(2):
            cancelled = engine.submit(*wanted[random.randrange(6)])
            sequences = [engine.submit(*request) for request in wanted]
            for _ in range(random.randrange(3, 20)):
                engine.step()
            engine.cancel(cancelled)
            while any(sequence.finish_reason is None for sequence in sequences):
                engine.step()
            assert [[s.id for s in sequence.generated] for sequence in sequences] == expected
        assert engine.scheduler.speculator and engine.scheduler.speculator.drafted > 100
        assert bool(engine.scheduler.preemptions) == ("kv_memory" in options)
        assert engine.cache.free_blocks == engine.cache.blocks


def test_files_with_a_broken_draft_head(tmp_path: Path) -> None:
    for missing in ("nextn.eh_proj", "nextn.hnorm", "blk.4.attn_k."):
        path = write_with_draft_head(tmp_path / "tiny.gguf", "qwen35", without=missing)
        with pytest.raises(ModelFileError, match=missing):
            open_model(path)
    path = write_with_draft_head(tmp_path / "tiny.gguf", "qwen35", without="nextn.")
    with open_model(path) as model:
        assert not model.config.draft_layers, "a converter left it out"
    keys, tensors = contents(GOLDENS / "qwen35.gguf")
    for count in (4, 10**6, 2**32 - 1):
        key: Key = ("qwen35.nextn_predict_layers", "u32", count)
        with pytest.raises(ModelFileError, match="nextn_predict_layers"):
            open_model(write(tmp_path / "tiny.gguf", [*keys, key], tensors))


def test_the_draft_head_is_the_default_where_a_file_has_one(tmp_path: Path) -> None:
    path = write_with_draft_head(tmp_path / "tiny.gguf", "qwen35")
    options: dict[str, Any] = {"context": 128, "device": "cpu", "threads": 1}
    texts = set[str]()
    for draft, has_head in ((None, True), (DRAFT_HEAD, True), (NO_DRAFT, False)):
        with LLM(path, draft=draft, **options) as llm:
            assert bool(llm.engine.draft_head) is has_head
            assert bool(llm.engine.scheduler.speculator) is has_head
            texts.add(llm.generate("the in the", max_tokens=40, temperature=0).text)
    assert len(texts) == 1
    with LLM(path, prompt_lookup=True, **options) as llm:
        assert not llm.engine.draft_head
    with LLM(path, draft=path, **options) as llm:
        assert llm._draft and not llm._draft.engine.draft_head, "drafts are not speculative themselves"
        assert llm.generate("the in the", max_tokens=40, temperature=0).text in texts
    with pytest.raises(RequestError, match="no draft head"):
        LLM(GOLDENS / "qwen35.gguf", draft=DRAFT_HEAD, **options)


def test_a_saved_conversation_has_the_keys_and_values_of_the_draft_head(tmp_path: Path) -> None:
    path, text = write_with_draft_head(tmp_path / "tiny.gguf", "qwen35"), "the in " * 30
    drafts = []
    for first in (True, False):
        with LLM(path, context=256, device="cpu", threads=1) as llm:
            if not first:
                llm.restore(tmp_path / "state")
            sequence = llm.engine.submit(llm.tokenize(text), SamplingParams(max_tokens=8, temperature=0.0))
            while not sequence.generated:
                llm.engine.step()
            assert llm.engine.draft_head and (sequence.state.cached_prompt_tokens > 0) is not first
            drafts.append(llm.engine.draft_head.propose([(sequence, 4)]))
            while sequence.finish_reason is None:
                llm.engine.step()
            if first:
                llm.save(text, tmp_path / "state")
    assert drafts[0] == drafts[1]

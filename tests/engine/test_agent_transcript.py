"""An agent's requests to a model with recurrent layers: from the second on, next to nothing is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest

from tandem import LLM
from tandem.devices.cpu.device import CPUDevice
from tandem.engine.kv_cache import ANSWER_END, PROMPT_END, REASONS
from tandem.engine.kv_size import context_bytes
from tandem.engine.params import SamplingParams
from tandem.kernels.abi import KV_BLOCK
from tandem.model.config import ModelConfig, Rope
from tandem.model.synthetic import SyntheticModel
from tandem.program.graph import DeltaHeads
from tandem.server.monitoring.metrics import EngineMonitor, _engine_metrics
from tests.engine.agent_transcript import Read, replay, transcript
from tests.engine.tiny_models import WatchedEngine
from tests.models.draft_heads import GOLDENS

VOCAB = 1024
BUDGET = 0.1  # of the KV memory, for checkpoints of the whole transcript
WHOLE = 30000  # tokens
AGAIN = 0.05  # of a prompt: to be computed again, at most
OTHER_SLOTS = 2  # of the running request, and kept free for the next one


def kv_memory(config: ModelConfig, context: int) -> int:
    """Bytes of the keys and values of one context."""
    return context_bytes(config, context // KV_BLOCK, 512, "f16")


@contextmanager
def tiny(context: int, **options: bool) -> Iterator[WatchedEngine]:
    """Narrow, but a state is as large as the keys and values of 1,680 tokens; in Qwen 3.5 0.8B it is 1,536. The KV
    cache holds one context, and there is room for two checkpoints beside it."""
    model, device = SyntheticModel("qwen3.5-0.8b:q8_0", 4), CPUDevice(2)
    model.config = replace(
        model.config, dim=128, ffn_dim=128, q_heads=2, kv_heads=1, head_dim=64, vocab=VOCAB, ropes=(Rope(1e7, 32),),
        delta_heads=DeltaHeads(4, 8, 64, 64, tiled=True), draft_layers=0, trained_context=context,
    )  # fmt: skip
    memory = kv_memory(model.config, context)
    try:
        yield WatchedEngine.load(model, device, context=context, batch=1, kv_memory=memory, **options)
    finally:
        device.close()


def reads(engine: WatchedEngine, turns: int, tokens: int) -> tuple[list[Read], list[list[int]]]:
    """What each turn computed, and all answers."""
    answers = []

    def answer(prompt: list[int], count: int) -> tuple[list[int], int]:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        scheduler = engine.scheduler
        before = scheduler.prompt_tokens - scheduler.cached_prompt_tokens
        [(generated, _)] = engine.run((prompt, params))
        answers.append(generated)
        return generated, scheduler.prompt_tokens - scheduler.cached_prompt_tokens - before

    return list(replay(transcript(turns, tokens, VOCAB), answer)), answers


@pytest.mark.parametrize(
    ("turns", "tokens", "context"),
    [
        (8, 6000, 8192),
        pytest.param(20, WHOLE, 34816, marks=pytest.mark.soak),
    ],
)
def test_turns_go_on_from_checkpoints(turns: int, tokens: int, context: int) -> None:
    with tiny(context) as engine:
        found, answers = reads(engine, turns, tokens)
        states, memory = engine.stats().states, kv_memory(engine.model.config, context)
    assert states
    if tokens == WHOLE:
        assert (states.slots - OTHER_SLOTS) * states.slot_bytes <= BUDGET * memory
    assert found[-1].prompt > 0.9 * tokens
    for number, read in enumerate(found[1:], 2):
        assert read.again <= AGAIN, f"turn {number}: {read}"
    assert sum(states.hits.values()) == turns - 1
    assert states.hits[ANSWER_END] > states.hits[PROMPT_END] > 0
    assert sum(states.kept.values()) > states.evicted > 0, "the budget is not used up"
    with tiny(context, prefix_caching=False) as engine:
        assert reads(engine, turns, tokens)[1] == answers


def test_metrics_say_what_the_policy_chose() -> None:
    with LLM(GOLDENS / "qwen35.gguf", context=256, device="cpu", threads=1) as llm:
        for text in ("the in " * 30, "the in " * 30 + "the", "the in " * 20 + "a"):
            llm.generate(text, max_tokens=4, temperature=0)
        states = llm.stats().states
        monitor = EngineMonitor(llm)
        found = {(name, *labels.values()): value for name, _, _, labels, value in _engine_metrics(monitor)}
        assert states and monitor.snapshot()["states"] == asdict(states)
    assert sum(states.hits.values()) >= 1 and states.kept[PROMPT_END] >= 2
    for reason in REASONS:
        assert found["state_checkpoints_kept", reason] == states.kept[reason]
        assert found["state_checkpoint_hits", reason] == states.hits[reason]
    assert found["state_recomputed_tokens",] == states.recomputed_tokens > 0
    assert found["state_slots",] * found["state_slot_bytes",] == states.slots * states.slot_bytes

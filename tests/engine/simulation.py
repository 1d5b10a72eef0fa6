"""The engine without kernels: steps are checked as a device would see them, and answered by a hash of the context.

Each KV group's cache holds (token, position) where a device holds keys and values. A row's answer depends on all
that each group can see, so a wrong block, slot, position or window changes the tokens. A state slot holds all tokens of
its sequence where a device holds a recurrent state. A step runs as late as it may: when the host waits for it.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from tandem.engine.batch import Batch
from tandem.engine.engine import Engine, StepSlot
from tandem.engine.kv_cache import KVCache
from tandem.engine.prompt_lookup import PromptLookup
from tandem.engine.scheduler import Scheduler
from tandem.engine.sequence import Sequence
from tandem.engine.speculation import Speculator
from tandem.engine.speculation_cost import SpeculationCostModel
from tandem.kernels.abi import (
    KV_BLOCK,
    RESULT_INTS,
    TOKEN_ID,
    TOKEN_POSITION,
    TOKEN_SEQUENCE,
    TOKEN_SLOT,
    TOKEN_SOURCE,
)
from tandem.kernels.states import NO_STATE
from tandem.program.step_inputs import StepInputs, StepLayout, StepLimits

VOCAB = 1000


def answer(visible: list[list[int]], repeats: bool = False) -> int:
    """The next token, from the tokens that each group sees; mostly from the last alone in a text that `repeats`."""
    hashed = zlib.crc32(repr(visible).encode())
    return (3 * visible[0][-1] + 1) % 7 if repeats and hashed % 8 else hashed % VOCAB


def expected(
    prompt: list[int], count: int, windows: tuple[int, ...], repeats: bool = False, states: bool = False
) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        visible = [tokens[-window:] if window else tokens for window in windows] + [tokens] * states
        tokens.append(answer(visible, repeats))
    return tokens[len(prompt) :]


class FixedCost(SpeculationCostModel):
    """A step takes 1 s, and `cost` more for each draft token; exploration is free."""

    def __init__(self, cost: float) -> None:
        super().__init__()
        self.cost = cost

    def is_measured(self, batch_size: int) -> bool:
        return True

    def max_estimated(self, batch_size: int) -> int:
        return 99

    def min_speedup(self, batch_size: int) -> float:
        return 1.0

    def can_explore(self, seconds: float, request_seconds: float) -> bool:
        return True

    def max_cost(self, request_seconds: float) -> float:
        return math.inf

    def prefill_seconds(self, batch_size: int, tokens: int) -> float:
        return 0.0

    def seconds(self, batch_size: int, lengths: list[int]) -> float:
        return 1 + self.cost * sum(lengths)


class SimulatedEngine(Engine):
    """Everything of the engine but the model and the device."""

    def __init__(
        self,
        *,
        windows: tuple[int, ...],
        blocks: tuple[int, ...],
        context: int,
        batch: int,
        tokens: int,
        step_slots: int = 2,
        draft_tokens: int = 0,
        states: int = 0,
    ) -> None:
        self.windows, self.repeats = windows, draft_tokens > 0
        model: Any = SimpleNamespace(config=SimpleNamespace(vocab=VOCAB, trained_context=context))
        rows = batch + draft_tokens
        limits = StepLimits(tokens, rows, batch + 1, -(-context // KV_BLOCK), len(windows))
        layout = StepLayout(limits)
        cache = KVCache(windows, blocks, states)
        self.state_slots: list[list[int] | None] = [None] * states  # the tokens of each state
        speculator = Speculator(PromptLookup(), FixedCost(0.25)) if draft_tokens else None
        scheduler = Scheduler(limits, cache, speculator=speculator)
        self.cells = [np.full((n * KV_BLOCK, 2), -1) for n in blocks]  # (token, position) of each KV slot
        self.steps = self.tokens_computed = 0
        self.pending: deque[SimulatedRecording] = deque()
        self.recordings: list[SimulatedRecording] = []
        for step_slot in range(step_slots):
            memory, results = np.full(layout.nbytes, 0x7F, np.uint8), np.zeros((rows, RESULT_INTS), np.int32)
            self.recordings.append(
                SimulatedRecording(self, step_slot, StepInputs(layout, memory), memory, results)
            )
        self.inputs = self.recordings[0].inputs
        slots = [StepSlot(Batch(r.step_slot, r.inputs, r.results, 4), r) for r in self.recordings]
        nothing: Any = None
        super().__init__(model, nothing, nothing, cache, scheduler, slots, context)

    def run(self, *sequences: Sequence) -> None:
        """Until these are finished; a step that does nothing would be a deadlock."""
        while any(sequence.finish_reason is None for sequence in sequences):
            before = self.steps
            self.step()
            assert self.steps == before + 1, "requests are waiting, and nothing runs"

    def check_idle(self) -> None:
        """Nothing is held when nothing runs."""
        assert self.cache.free_blocks == self.cache.blocks
        if states := self.cache.states:
            assert states.num_free == len(self.state_slots)
        assert not self.scheduler.running and not self.scheduler.waiting
        assert len(self.scheduler._free_table_rows) == self.max_sequences


class SimulatedRecording:
    def __init__(
        self,
        engine: SimulatedEngine,
        step_slot: int,
        inputs: StepInputs,
        memory: np.ndarray,
        results: np.ndarray,
    ) -> None:
        self.engine, self.step_slot, self.inputs, self.memory, self.results = (
            engine,
            step_slot,
            inputs,
            memory,
            results,
        )
        self.kv, self.windows = engine.cells, engine.windows

    def start(self) -> None:
        assert self not in self.engine.pending, "a step is started while its step_slot is in flight"
        self.written = self.memory.copy()
        self.engine.pending.append(self)

    def finish(self) -> None:
        while self in self.engine.pending:
            self.engine.pending.popleft()._run()

    def _run(self) -> None:
        assert (self.memory == self.written).all(), "StepInputs changed while the step was in flight"
        tokens, rows, work = self.inputs.header[:3]
        limits = self.engine.scheduler.limits
        assert 0 < tokens <= limits.tokens and rows <= limits.logits_rows
        self.engine.steps += 1
        self.engine.tokens_computed += int(tokens)
        self._store(self.inputs.tokens[:tokens].copy())
        seen = self._attend(self.inputs.work[:work], tokens)
        if self.engine.state_slots:
            self._advance_states(seen)
        for i, row in enumerate(self.inputs.rows[:rows]):
            self.results[i, 0] = answer(seen[row], self.engine.repeats)

    def _store(self, tokens: np.ndarray) -> None:
        for token in tokens:
            if token[TOKEN_SOURCE]:
                token[TOKEN_ID] = self.engine.recordings[1 - self.step_slot].results[
                    token[TOKEN_SOURCE] - 1, 0
                ]
        self.tokens = tokens
        for group, cells in enumerate(self.kv):
            slots = tokens[:, TOKEN_SLOT + group]
            assert len(set(slots.tolist())) == len(slots), "two tokens share a slot"
            assert (slots >= 0).all() and (slots < len(cells)).all()
            cells[slots] = tokens[:, [TOKEN_ID, TOKEN_POSITION]]

    def _advance_states(self, seen: dict[int, list[list[int]]]) -> None:
        """Chunks run in any order, so none may write a slot that another one uses."""
        slots, used, covered = self.engine.state_slots, list[int](), 0
        before, after = list(slots), {}
        for first, count, source, _ in self.inputs.chunks[: self.inputs.header[2]].tolist():
            if not count:
                continue
            state = list(before[source] or []) if source != NO_STATE else []
            targets = [
                slot for slot in self.inputs.states[first : first + count].tolist() if slot != NO_STATE
            ]
            assert len(set(targets)) == len(targets) and targets, "a chunk writes a slot twice, or none"
            assert not set(targets) & after.keys(), "two chunks write one slot"
            used += {source, *targets} - {NO_STATE}
            for token in range(first, first + count):
                assert len(state) == self.tokens[token][TOKEN_POSITION], "a state of another position"
                state.append(int(self.tokens[token][TOKEN_ID]))
                seen[token].append(list(state))
                if (slot := int(self.inputs.states[token])) != NO_STATE:
                    after[slot] = list(state)
            covered += count
        assert covered == len(seen), "a token is in no chunk"
        for slot, state in after.items():
            assert used.count(slot) == 1, "a chunk writes a slot that another one reads"
            slots[slot] = state

    def _attend(self, work: np.ndarray, tokens: int) -> dict[int, list[list[int]]]:
        """What each row of the step sees, group by group."""
        seen: dict[int, list[list[int]]] = {}
        for first, count, sequence, position, last, *_ in work.tolist():
            assert not last, "text is causal"
            for row in range(count):
                token = self.inputs.tokens[first + row]
                assert (token[TOKEN_SEQUENCE], token[TOKEN_POSITION]) == (sequence, position + row)
                assert first + row not in seen, "two work items have one row"
                seen[first + row] = [
                    self._visible(group, sequence, position + row) for group in range(len(self.windows))
                ]
        assert len(seen) == tokens
        return seen

    def _visible(self, group: int, sequence: int, position: int) -> list[int]:
        window = self.windows[group]
        positions = np.arange(max(0, position - window + 1) if window else 0, position + 1)
        blocks = self.inputs.tables[group][sequence, positions // KV_BLOCK]
        cells = self.kv[group][blocks * KV_BLOCK + positions % KV_BLOCK]
        assert (cells[:, 1] == positions).all(), "the block table leads to another token's place"
        return [int(token) for token in cells[:, 0]]

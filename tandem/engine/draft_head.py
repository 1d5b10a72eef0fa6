"""Drafts tokens with the model's own draft head (MTP): one more layer, which predicts the token after the next one.

Its row for position t has the model's hidden state of token t and the embedding of token t + 1. For a further token,
its own hidden state takes the place of the model's. Keys and values of the layer are in the model's KV blocks. Those of
all tokens are stored, also without drafts, which takes a small part of the layer: so a draft can begin at any time.

The head is a Program of its own in the model's arenas, with the StepInputs of the second step slot: so on a GPU one
step is in flight, not two. The host copies hidden states between the two Programs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tandem.devices.device import Device, Recording, validate_on
from tandem.engine.images import SectionedAngles
from tandem.engine.kv_cache import KVCache
from tandem.engine.sequence import Chunk, Sequence
from tandem.kernels.abi import (
    HEADER_ROWS,
    HEADER_SEQUENCES,
    HEADER_TOKENS,
    HEADER_WORK,
    KV_BLOCK,
    RESULT_INTS,
    SAMPLING_PARAMETERS,
    TOKEN_ID,
    TOKEN_POSITION,
    TOKEN_SEQUENCE,
    TOKEN_SLOT,
    TOKEN_SOURCE,
)
from tandem.kernels.kernel import Array
from tandem.model.architectures.blocks import DRAFT_HIDDEN, DRAFT_INPUT, HIDDEN
from tandem.model.model import Model
from tandem.program.fuse import fuse
from tandem.program.lower import lower
from tandem.program.lowering_base import KVCacheShape
from tandem.program.program import Program, Tensor, arena_in
from tandem.program.step_inputs import KNOWN, StepInputs, StepLayout
from tandem.program.weight_plan import WeightPlan

# Tokens without drafts whose keys and values are stored by one run: it reads weights once.
STORED_TOGETHER = 32
STEP_SLOT = 1  # the model's steps have slot 0
GREEDY = np.zeros(1, SAMPLING_PARAMETERS)
GREEDY["top_p"], GREEDY["repeat_penalty"], GREEDY["top_logprobs"] = 1.0, 1.0, -1


class Computed(NamedTuple):
    """Tokens of a sequence from `position` on, whose keys and values are not stored yet."""

    sequence: Sequence
    admissions: int
    position: int
    hidden: Array  # [tokens, dim]


def lower_draft_head(
    model: Model,
    device: Device,
    context: int,
    passes: tuple[str, ...],
    program: Program,
    weights: WeightPlan,
    layout: StepLayout,
    shape: KVCacheShape,
) -> Program:
    """Lowers the draft head beside the Program of the model's steps."""
    ops = fuse(model.draft_ops(context), weights.layouts, passes)
    head = lower(ops, weights, layout, shape, passes, beside=program)
    program.arena_bytes, program.beside = head.arena_bytes, head
    validate_on(device, head, [head.values[DRAFT_INPUT][1]])
    return head


class DraftHead:
    """Proposes the likeliest tokens of the draft head."""

    cost_coefficient = 0.1  # typical of a layer and the LM head
    # It drafts at any place of a text, and as well at one as at another: a short average would be noise, which in a
    # batch decides whether to draft at all.
    acceptance_window = 64

    def __init__(
        self,
        device: Device,
        model: Program,
        program: Program,
        layout: StepLayout,
        cache: KVCache,
        dim: int,
        angles: SectionedAngles | None = None,
    ) -> None:
        """`model`: the Program of the model's steps; `program`: that of the head. `angles`: as in Batch."""
        self.device, self.program, self.cache, self.dim = device, program, cache, dim
        self._angles = angles
        self._model_hidden, self._hidden = model.values[HIDDEN][1], program.values[DRAFT_HIDDEN][1]
        self._input = program.values[DRAFT_INPUT][1]
        # What the host gives a run: float32 [tokens, stride], of which `dim` columns are used.
        self._given = np.zeros((layout.limits.tokens, self._input.stride), np.float32)
        self._inputs = StepInputs(layout, device.memory(arena_in(STEP_SLOT, "step")))
        self._inputs.params[:] = GREEDY.view(np.int32)
        self._inputs.rows[:] = np.arange(len(self._inputs.rows))
        results = device.memory(arena_in(STEP_SLOT, "results"))[: layout.result_bytes].view(np.int32)
        self._results = results.reshape(-1, RESULT_INTS)
        self._drafting = device.record(program, STEP_SLOT)
        stored = 1 + next(i for i, launch in enumerate(program.launches) if launch.buffers.get("cache"))
        self._storing = device.record(replace(program, launches=program.launches[:stored]), STEP_SLOT)
        self._pending: list[Computed] = []
        # Position and hidden state of the last computed token of each sequence.
        self._last: dict[Sequence, tuple[int, Array]] = {}

    def uncached(self, sequence: Sequence) -> int:
        return 0

    def forget(self, sequence: Sequence) -> None:
        self._last.pop(sequence, None)

    def store(self, chunks: list[Chunk]) -> None:
        """Keeps the hidden states of the tokens that a step of the model has computed and whose next token is known;
        rejected draft tokens have none. Later steps store the keys and values of these tokens."""
        token, hidden = 0, self._read(self._model_hidden, sum(chunk.total for chunk in chunks))
        for chunk in chunks:
            sequence, first = chunk.sequence, token
            token += chunk.total
            count = min(chunk.total, len(sequence.tokens) - 1 - chunk.begin)
            if sequence.state.table_row < 0 or chunk.admissions != sequence.state.admissions or count < 1:
                continue
            states = hidden[first : first + count].copy()
            self._pending.append(Computed(sequence, chunk.admissions, chunk.begin, states))
            self._last[sequence] = chunk.begin + count - 1, states[-1]
        ended = any(chunk.sequence.finish_reason is not None for chunk in chunks)
        if ended or sum(len(computed.hidden) for computed in self._pending) >= STORED_TOGETHER:
            self._store_pending()

    def _store_pending(self) -> None:
        pending, rows = self._pending, 0
        self._pending = []
        for sequence, admissions, position, hidden in pending:
            if sequence.state.table_row < 0 or admissions != sequence.state.admissions:
                continue  # it has ended or was preempted
            if rows + len(hidden) > len(self._given):
                self._run(self._storing, rows)
                rows = 0
            self._write(sequence, rows, position, sequence.tokens[position + 1 :][: len(hidden)])
            self._given[rows : rows + len(hidden), : self.dim] = hidden
            rows += len(hidden)
        if rows:
            self._run(self._storing, rows)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wanted]
        self._store_pending()
        open_drafts = [i for i, each in enumerate(wanted) if self._can_draft(*each)]
        hidden = np.array([self._last[wanted[i][0]][1] for i in open_drafts], np.float32)
        while open_drafts:
            rows = len(open_drafts)
            for row, i in enumerate(open_drafts):
                sequence, draft = wanted[i][0], drafts[i]
                position = len(sequence.tokens) - 2 + len(draft)
                self._write(sequence, row, position, [draft[-1] if draft else sequence.tokens[-1]])
                self._inputs.work[row, :5] = row, 1, sequence.state.table_row, position, 0
            self._given[:rows, : self.dim] = hidden
            self._run(self._drafting, rows, rows)
            for row, i in enumerate(open_drafts):
                drafts[i].append(int(self._results[row, 0]))
            going_on = [row for row, i in enumerate(open_drafts) if len(drafts[i]) < wanted[i][1]]
            hidden = self._read(self._hidden, rows)[going_on]
            open_drafts = [open_drafts[row] for row in going_on]
        return drafts

    def _can_draft(self, sequence: Sequence, count: int) -> bool:
        """Whether its last hidden state is known, and it has KV blocks for a draft."""
        position, hidden = self._last.get(sequence, (-1, None))
        if not count or hidden is None or position != len(sequence.tokens) - 2:
            return False
        return self.cache.reserve(sequence.kv.tables, position + count)

    def _write(self, sequence: Sequence, row: int, position: int, next_tokens: list[int]) -> None:
        """Writes rows of the token table, from `row` on, for positions from `position` on."""
        positions = np.arange(position, position + len(next_tokens))
        rows = self._inputs.tokens[row : row + len(next_tokens)]
        rows[:, TOKEN_ID], rows[:, TOKEN_POSITION] = next_tokens, positions
        if self._angles:
            self._angles.write(self._inputs, row, sequence.images, position, position + len(next_tokens))
        rows[:, TOKEN_SEQUENCE], rows[:, TOKEN_SOURCE] = sequence.state.table_row, KNOWN
        for group, table in enumerate(sequence.kv.tables):
            first, end = table.written[STEP_SLOT], len(table.blocks)
            if first < end:
                self._inputs.tables[group][sequence.state.table_row, first:end] = table.blocks[first:]
                table.written[STEP_SLOT] = end
            blocks = np.array(table.blocks, np.int32)[positions // KV_BLOCK]
            rows[:, TOKEN_SLOT + group] = blocks * KV_BLOCK + positions % KV_BLOCK

    def _run(self, recording: Recording, tokens: int, rows: int = 0) -> None:
        header = self._inputs.header
        header[[HEADER_TOKENS, HEADER_ROWS, HEADER_WORK, HEADER_SEQUENCES]] = tokens, rows, rows, rows
        self.device.write(self._input, self._given[:tokens].reshape(-1).view(np.uint8))
        recording.replay()

    def _read(self, tensor: Tensor, rows: int) -> Array:
        memory = self.device.read(tensor)
        return np.ndarray((rows, self.dim), np.float32, memory, strides=(4 * tensor.stride, 4))

"""Writes a step's chunks into StepInputs and reads what was sampled."""

from __future__ import annotations

from typing import Any

import numpy as np

from tandem.engine.scheduler import Chunk
from tandem.engine.sequence import Sampled, Sequence
from tandem.program.step_inputs import (
    KV_BLOCK,
    TOKEN_ID,
    TOKEN_POSITION,
    TOKEN_SEQUENCE,
    TOKEN_SLOT,
    Ints,
    StepInputs,
)

QUERIES_PER_ITEM = 64  # rows x heads that share a KV head: what the attention kernel takes together
ROWS_PER_ITEM = 16
PARAM_COUNTER, PARAM_FIRST_EDIT, PARAM_EDITS = 9, 10, 11  # fields of a row of sampling parameters
NO_LOGPROBS = -1
RESULT_TOPS, RESULT_TOP_IDS, RESULT_TOP_LOGPROBS = 2, 4, 24  # fields of a result row, after id and logprob


class BatchWriter:
    def __init__(self, inputs: StepInputs, results: Ints, queries_per_kv_head: int) -> None:
        self.inputs, self.results = inputs, results
        self.results_f32 = results.view(np.float32)
        self.rows_per_item = max(1, min(ROWS_PER_ITEM, QUERIES_PER_ITEM // queries_per_kv_head))

    def write(self, chunks: list[Chunk]) -> None:
        token = row = work = edits = 0
        for chunk in chunks:
            self._write_tokens(chunk.sequence, chunk.count, token)
            work = self._write_work(chunk.sequence, chunk.count, token, work)
            token += chunk.count
            if chunk.sampled:
                self.inputs.rows[row] = token - 1
                edits = self._write_params(chunk.sequence, row, edits)
                row += 1
        self.inputs.set_counts(tokens=token, rows=row, work=work)

    def write_all_rows(self, sequence: Sequence, count: int) -> None:
        """One chunk with the logits of every token, not only the last."""
        self._write_tokens(sequence, count, 0)
        work = self._write_work(sequence, count, 0, 0)
        self.inputs.rows[:count] = np.arange(count)
        for row in range(count):
            self._write_params(sequence, row, 0)
        self.inputs.set_counts(tokens=count, rows=count, work=work)

    def read(self, row: int, sequence: Sequence) -> Sampled:
        result: Any = self.results[row]
        if sequence.params.logprobs is None:
            return Sampled(int(result[0]))
        floats, tops = self.results_f32[row], int(result[RESULT_TOPS])
        ids = result[RESULT_TOP_IDS : RESULT_TOP_IDS + tops].tolist()
        logprobs = floats[RESULT_TOP_LOGPROBS : RESULT_TOP_LOGPROBS + tops].tolist()
        return Sampled(int(result[0]), float(floats[1]), tuple(zip(ids, logprobs, strict=True)))

    def _write_tokens(self, sequence: Sequence, count: int, at: int) -> None:
        begin, end = sequence.computed, sequence.computed + count
        for group, table in enumerate(sequence.tables):
            if table.written < len(table.blocks):
                self.inputs.tables[group][sequence.slot, table.written : len(table.blocks)] = table.blocks[
                    table.written :
                ]
                table.written = len(table.blocks)
        tokens = self.inputs.tokens
        if count == 1:
            slots = [
                table.blocks[begin // KV_BLOCK] * KV_BLOCK + begin % KV_BLOCK for table in sequence.tables
            ]
            tokens[at, : TOKEN_SLOT + len(slots)] = [sequence.tokens[begin], begin, sequence.slot, 0, *slots]
            return
        positions = np.arange(begin, end)
        rows = tokens[at : at + count]
        rows[:, TOKEN_ID] = sequence.tokens[begin:end]
        rows[:, TOKEN_POSITION] = positions
        rows[:, TOKEN_SEQUENCE] = sequence.slot
        for group, table in enumerate(sequence.tables):
            blocks = np.array(table.blocks, np.int32)[positions // KV_BLOCK]
            rows[:, TOKEN_SLOT + group] = blocks * KV_BLOCK + positions % KV_BLOCK

    def _write_work(self, sequence: Sequence, count: int, token: int, work: int) -> int:
        for first in range(0, count, self.rows_per_item):
            rows = min(self.rows_per_item, count - first)
            self.inputs.work[work] = (token + first, rows, sequence.slot, sequence.computed + first)
            work += 1
        return work

    def _write_params(self, sequence: Sequence, row: int, first_edit: int) -> int:
        """A row of sampling parameters; returns the next free edit."""
        if sequence.param_row is None:
            sequence.param_row = _param_row(sequence)
        params = self.inputs.params[row]
        params[:] = sequence.param_row
        params[PARAM_COUNTER] = len(sequence.generated)
        edits = sequence.edits
        if len(edits):
            self.inputs.edits[first_edit : first_edit + len(edits)] = edits
            params[PARAM_FIRST_EDIT], params[PARAM_EDITS] = first_edit, len(edits)
        return first_edit + len(edits)


def _param_row(sequence: Sequence) -> Ints:
    p = sequence.params
    row = np.zeros(16, np.int32)
    floats = row.view(np.float32)
    floats[0], row[1], floats[2], floats[3] = p.temperature, min(p.top_k, 2**31 - 1), p.top_p, p.min_p
    floats[4:7] = p.repeat_penalty, p.presence_penalty, p.frequency_penalty
    row[7:9] = np.array([sequence.seed], np.uint64).view(np.int32)
    row[12] = NO_LOGPROBS if p.logprobs is None else p.logprobs
    return row

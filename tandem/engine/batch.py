"""A turn's StepInputs and results: writes a step's chunks and reads what was sampled."""

from __future__ import annotations

from typing import Any

import numpy as np

from tandem.engine.scheduler import Chunk
from tandem.engine.sequence import Sampled, Sequence
from tandem.program.step_inputs import (
    KNOWN,
    KV_BLOCK,
    TOKEN_ID,
    TOKEN_POSITION,
    TOKEN_SEQUENCE,
    TOKEN_SLOT,
    TOKEN_SOURCE,
    Ints,
    StepInputs,
)

QUERIES_PER_ITEM = 64  # rows x heads that share a KV head: what the attention kernel takes together
ROWS_PER_ITEM = 16
PARAM_COUNTER, PARAM_FIRST_EDIT, PARAM_EDITS = 9, 10, 11  # fields of a row of sampling parameters
NO_LOGPROBS = -1
RESULT_TOPS, RESULT_TOP_IDS, RESULT_TOP_LOGPROBS = 2, 4, 24  # fields of a result row, after id and logprob


class Batch:
    def __init__(self, turn: int, inputs: StepInputs, results: Ints, queries_per_kv_head: int) -> None:
        self.turn, self.inputs, self.results = turn, inputs, results
        self.results_f32 = results.view(np.float32)
        self.rows_per_item = max(1, min(ROWS_PER_ITEM, QUERIES_PER_ITEM // queries_per_kv_head))

    def write(self, chunks: list[Chunk]) -> None:
        token = row = work = edits = 0
        for chunk in chunks:
            sequence = chunk.sequence
            self._write_tokens(chunk, token)
            work = self._write_work(chunk, token, work)
            token += chunk.count
            if chunk.sampled:
                self.inputs.rows[row] = token - 1
                edits = self._write_params(sequence, chunk.begin + chunk.count, row, edits)
                sequence.row = row
                row += 1
        self.inputs.set_counts(tokens=token, rows=row, work=work)

    def write_all_rows(self, chunk: Chunk) -> None:
        """One chunk with the logits of every token, not only the last."""
        self._write_tokens(chunk, 0)
        work = self._write_work(chunk, 0, 0)
        self.inputs.rows[: chunk.count] = np.arange(chunk.count)
        for row in range(chunk.count):
            self._write_params(chunk.sequence, chunk.begin + 1 + row, row, 0)
        self.inputs.set_counts(tokens=chunk.count, rows=chunk.count, work=work)

    def read(self, row: int, sequence: Sequence) -> Sampled:
        result: Any = self.results[row]
        if sequence.params.logprobs is None:
            return Sampled(int(result[0]))
        floats, tops = self.results_f32[row], int(result[RESULT_TOPS])
        ids = result[RESULT_TOP_IDS : RESULT_TOP_IDS + tops].tolist()
        logprobs = floats[RESULT_TOP_LOGPROBS : RESULT_TOP_LOGPROBS + tops].tolist()
        return Sampled(int(result[0]), float(floats[1]), tuple(zip(ids, logprobs, strict=True)))

    def _write_tokens(self, chunk: Chunk, at: int) -> None:
        sequence, begin, end = chunk.sequence, chunk.begin, chunk.begin + chunk.count
        self._write_tables(sequence)
        # Only the last can be one that the step before is still sampling.
        known, source = (end, KNOWN) if end <= len(sequence.tokens) else (end - 1, 1 + sequence.row)
        tokens = self.inputs.tokens
        if chunk.count == 1:
            block, place = divmod(begin, KV_BLOCK)
            slots = [table.blocks[block] * KV_BLOCK + place for table in sequence.tables]
            token = sequence.tokens[begin] if known == end else 0
            tokens[at, : TOKEN_SLOT + len(slots)] = [token, begin, sequence.slot, source, *slots]
            return
        positions = np.arange(begin, end)
        rows = tokens[at : at + chunk.count]
        rows[: known - begin, TOKEN_ID] = sequence.tokens[begin:known]
        rows[:, TOKEN_POSITION] = positions
        rows[:, TOKEN_SEQUENCE] = sequence.slot
        rows[:, TOKEN_SOURCE] = KNOWN
        rows[-1, TOKEN_SOURCE] = source
        for group, table in enumerate(sequence.tables):
            blocks = np.array(table.blocks, np.int32)[positions // KV_BLOCK]
            rows[:, TOKEN_SLOT + group] = blocks * KV_BLOCK + positions % KV_BLOCK

    def _write_tables(self, sequence: Sequence) -> None:
        """The entries of the block tables that are new to this turn."""
        for group, table in enumerate(sequence.tables):
            first, end = table.written[self.turn], len(table.blocks)
            if first < end:
                self.inputs.tables[group][sequence.slot, first:end] = table.blocks[first:]
                table.written[self.turn] = end

    def _write_work(self, chunk: Chunk, token: int, work: int) -> int:
        for first in range(0, chunk.count, self.rows_per_item):
            rows = min(self.rows_per_item, chunk.count - first)
            self.inputs.work[work] = (token + first, rows, chunk.sequence.slot, chunk.begin + first)
            work += 1
        return work

    def _write_params(self, sequence: Sequence, position: int, row: int, first_edit: int) -> int:
        """A row of sampling parameters for the token at `position`; returns the next free edit."""
        if sequence.param_row is None:
            sequence.param_row = _param_row(sequence)
        params = self.inputs.params[row]
        params[:] = sequence.param_row
        params[PARAM_COUNTER] = position - len(sequence.prompt)
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

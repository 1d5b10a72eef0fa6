"""A turn's StepInputs and results: writes a step's chunks and reads what was sampled."""

from __future__ import annotations

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
        self._owners = [-1] * len(results)  # whose sampling parameters each row has

    def write(self, chunks: list[Chunk]) -> None:
        """Chunks of one token come first: all of them are written in one go."""
        token = work = next((i for i, chunk in enumerate(chunks) if chunk.total > 1), len(chunks))
        self._write_ones(chunks[:token])
        for chunk in chunks[token:]:
            self._write_tokens(chunk, token)
            work = self._write_work(chunk, token, work)
            token += chunk.total
        self.inputs.set_counts(tokens=token, rows=self._write_rows(chunks), work=work)

    def write_all_rows(self, chunk: Chunk) -> None:
        """One chunk with the logits of every token, not only the last."""
        self._write_tokens(chunk, 0)
        work = self._write_work(chunk, 0, 0)
        self.inputs.rows[: chunk.count] = np.arange(chunk.count)
        for row in range(chunk.count):
            self._write_params(chunk.sequence, row, row, 0)
        self.inputs.set_counts(tokens=chunk.count, rows=chunk.count, work=work)

    def read(self, chunks: list[Chunk]) -> list[list[Sampled]]:
        """What was sampled for each of these: a token, and one after each of its guess's."""
        rows = sum(1 + len(chunk.guess) for chunk in chunks)
        ids, row, found = self.results[:rows, 0].tolist(), 0, []
        for chunk in chunks:
            end, plain = row + 1 + len(chunk.guess), chunk.sequence.params.logprobs is None
            found.append(
                [Sampled(ids[i]) if plain else self._with_logprobs(i, ids[i]) for i in range(row, end)]
            )
            row = end
        return found

    def _with_logprobs(self, row: int, token: int) -> Sampled:
        result, floats = self.results[row], self.results_f32[row]
        tops = int(result[RESULT_TOPS])
        ids = result[RESULT_TOP_IDS : RESULT_TOP_IDS + tops].tolist()
        logprobs = floats[RESULT_TOP_LOGPROBS : RESULT_TOP_LOGPROBS + tops].tolist()
        return Sampled(token, float(floats[1]), tuple(zip(ids, logprobs, strict=True)))

    def _write_ones(self, chunks: list[Chunk]) -> None:
        tokens, work = [], []
        for i, chunk in enumerate(chunks):
            sequence, position = chunk.sequence, chunk.begin
            self._write_tables(sequence)
            block, place = divmod(position, KV_BLOCK)
            slots = [table.blocks[block] * KV_BLOCK + place for table in sequence.tables]
            known = position < len(sequence.tokens)
            token, source = (sequence.tokens[position], KNOWN) if known else (0, 1 + sequence.row)
            tokens.append([token, position, sequence.slot, source, *slots])
            work.append((i, 1, sequence.slot, position))
        if chunks:
            self.inputs.tokens[: len(tokens), : len(tokens[0])] = tokens
            self.inputs.work[: len(work)] = work

    def _write_tokens(self, chunk: Chunk, at: int) -> None:
        sequence, begin, end = chunk.sequence, chunk.begin, chunk.begin + chunk.total
        self._write_tables(sequence)
        tokens = sequence.tokens[begin : begin + chunk.count] + chunk.guess
        # Only the last can be one that the step before is still sampling.
        source = KNOWN if len(tokens) == chunk.total else 1 + sequence.row
        positions = np.arange(begin, end)
        rows = self.inputs.tokens[at : at + chunk.total]
        rows[: len(tokens), TOKEN_ID] = tokens
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
        for first in range(0, chunk.total, self.rows_per_item):
            rows = min(self.rows_per_item, chunk.total - first)
            self.inputs.work[work] = (token + first, rows, chunk.sequence.slot, chunk.begin + first)
            work += 1
        return work

    def _write_rows(self, chunks: list[Chunk]) -> int:
        """Which tokens are sampled, and how; returns their number."""
        ends: list[int] = []  # the last token of each chunk
        draws: list[int] = []  # which of its request
        token = edits = 0
        for chunk in chunks:
            token += chunk.total
            if chunk.sampled:
                sequence = chunk.sequence
                sequence.row = len(ends)
                if sequence.grammar:
                    sequence.grammar.write_mask(self.inputs.masks[sequence.row])
                first = chunk.begin + chunk.count - len(sequence.prompt)
                for i in range(1 + len(chunk.guess)):
                    edits = self._write_params(sequence, first + i, len(ends), edits)
                    ends.append(token - 1 - len(chunk.guess) + i)
                    draws.append(first + i)
        self.inputs.rows[: len(ends)] = ends
        self.inputs.params[: len(ends), PARAM_COUNTER] = draws
        return len(ends)

    def _write_params(self, sequence: Sequence, draw: int, row: int, first_edit: int) -> int:
        """A row of sampling parameters; returns the next free edit."""
        edits = sequence.edits_of(draw)
        if self._owners[row] == sequence.number and not len(edits):
            return first_edit
        if sequence.param_row is None:
            sequence.param_row = _param_row(sequence)
        params = self.inputs.params[row]
        params[:] = sequence.param_row
        self._owners[row] = -1 if len(edits) else sequence.number
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
    row[13] = sequence.grammar is not None
    return row

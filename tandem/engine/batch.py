"""A step_slot's StepInputs and results: writes a step's chunks and reads what was sampled."""

from __future__ import annotations

from collections.abc import Sequence as Items
from struct import Struct

import numpy as np

from tandem.engine.sequence import Chunk, Sampled, Sequence
from tandem.kernels.abi import (
    HEADER_ADJUSTMENTS,
    HEADER_MASKS,
    HEADER_ROWS,
    HEADER_SEQUENCES,
    HEADER_TOKENS,
    HEADER_WORK,
    KV_BLOCK,
    LOGIT_ADJUSTMENT,
    RESULT_INTS,
    SAMPLING_INTS,
    SAMPLING_PARAMETERS,
    SAMPLING_RESULT,
    TOKEN_ID,
    TOKEN_INTS,
    TOKEN_POSITION,
    TOKEN_SEQUENCE,
    TOKEN_SLOT,
    TOKEN_SOURCE,
    WORK_INTS,
    column,
)
from tandem.program.step_inputs import KNOWN, Ints, StepInputs

FOUR = Struct("4i")  # the fields of a token before its slots; those of an entry of the work list
QUERIES_PER_ITEM = 64  # rows x heads that share a KV head: what the attention kernel takes together
MIN_QUERIES = 8  # with much fewer it is slower for each
ROWS_PER_ITEM = 16
NO_LOGPROBS = -1

# Columns of a row of sampling parameters and of a row of results.
COUNTER, FIRST_ADJUSTMENT, ADJUSTMENTS, TOP_LOGPROBS = (
    column(SAMPLING_PARAMETERS, field)
    for field in ("counter", "first_adjustment", "adjustments", "top_logprobs")
)
RESULT_TOP_COUNT, RESULT_TOP_IDS, RESULT_TOP_LOGPROBS = (
    column(SAMPLING_RESULT, field) for field in ("top_count", "top_ids", "top_logprobs")
)

# Sampling parameters that take the highest logit after one adjustment, and the adjustment that makes a token's logit
# the highest.
SCORING = np.zeros(1, SAMPLING_PARAMETERS)
SCORING["top_p"], SCORING["repeat_penalty"], SCORING["adjustments"] = 1.0, 1.0, 1
FORCED = np.zeros(1, LOGIT_ADJUSTMENT)
FORCED["bias"] = 3e38


class Batch:
    def __init__(
        self, step_slot: int, inputs: StepInputs, results: Ints, queries_per_kv_head: int, pieces: int = 1
    ) -> None:
        """`pieces`: items of attention that a chunk is cut into at least, if it is large enough."""
        self.step_slot, self.inputs, self.results = step_slot, inputs, results
        self.results_f32 = results.view(np.float32)
        # A step of few sequences writes and reads single numbers: NumPy would be slower.
        self._header, self._tokens, self._work, self._rows, self._params, self._ids = (
            array.reshape(-1).data
            for array in (inputs.header, inputs.tokens, inputs.work, inputs.rows, inputs.params, results)
        )
        self.rows_per_item = max(1, min(ROWS_PER_ITEM, QUERIES_PER_ITEM // queries_per_kv_head))
        self.min_rows = max(1, min(self.rows_per_item, MIN_QUERIES // queries_per_kv_head))
        self.pieces = pieces
        self._owners = [-1] * len(results)  # whose sampling parameters each row has

    def write(self, chunks: list[Chunk]) -> None:
        token = row = work = adjustments = masks = 0
        for chunk in chunks:
            begin = token
            if chunk.count == 1 and not chunk.draft_tokens:
                self._write_token(chunk, token, work)
                token, work = token + 1, work + 1
            else:
                self._write_tokens(chunk, token)
                work = self._write_work(chunk, token, work)
                token += chunk.total
            if chunk.scores:
                adjustments = self._write_scores(chunk, begin, row, adjustments)
                row += chunk.scores
            if chunk.sampled:
                adjustments = self._write_rows(chunk, begin + chunk.count - 1, row, adjustments)
                row += 1 + len(chunk.draft_tokens)
                if chunk.sequence.constraint:
                    masks = row
        self._set_counts(token, row, work, adjustments, masks)
        self._header[HEADER_SEQUENCES] = len(chunks)

    def write_all_rows(self, chunk: Chunk) -> None:
        """One chunk with the logits of every token, not only the last."""
        self._write_tokens(chunk, 0)
        work = self._write_work(chunk, 0, 0)
        self.inputs.rows[: chunk.count] = np.arange(chunk.count)
        for row in range(chunk.count):
            self._write_params(chunk.sequence, row, row, 0)
        self._set_counts(chunk.count, chunk.count, work)
        self._header[HEADER_SEQUENCES] = 1

    def _set_counts(self, tokens: int, rows: int, work: int, adjustments: int = 0, masks: int = 0) -> None:
        self._header[HEADER_TOKENS], self._header[HEADER_ROWS], self._header[HEADER_WORK] = tokens, rows, work
        self._header[HEADER_ADJUSTMENTS], self._header[HEADER_MASKS] = adjustments, masks

    def read(self, row: int, sequence: Sequence) -> Sampled:
        """What was sampled in a row of a sequence's."""
        token = self._ids[row * RESULT_INTS]
        if sequence.params.logprobs is None:
            return tuple.__new__(Sampled, (token, None, ()))  # Sampled(token) takes three times as long
        return self.read_logprobs(row)

    def read_logprobs(self, row: int) -> Sampled:
        result, floats = self.results[row], self.results_f32[row]
        tops = int(result[RESULT_TOP_COUNT])
        ids = result[RESULT_TOP_IDS : RESULT_TOP_IDS + tops].tolist()
        found = floats[RESULT_TOP_LOGPROBS : RESULT_TOP_LOGPROBS + tops].tolist()
        return Sampled(int(result[0]), float(floats[1]), tuple(zip(ids, found, strict=True)))

    def _write_token(self, chunk: Chunk, token: int, work: int) -> None:
        """A chunk of one token, as most are."""
        sequence, position, slot = chunk.sequence, chunk.begin, chunk.sequence.table_row
        tables, known = sequence.tables, position < len(sequence.tokens)
        if tables[0].written[self.step_slot] < len(tables[0].blocks):
            self._write_tables(sequence)
        id, source = (sequence.tokens[position], KNOWN) if known else (0, 1 + sequence.result_row)
        first = token * TOKEN_INTS
        FOUR.pack_into(self._tokens, 4 * first, id, position, slot, source)
        FOUR.pack_into(self._work, 4 * WORK_INTS * work, token, 1, slot, position)
        block, place = position // KV_BLOCK, position % KV_BLOCK
        for group, table in enumerate(tables, first + TOKEN_SLOT):
            self._tokens[group] = table.blocks[block] * KV_BLOCK + place

    def _write_tokens(self, chunk: Chunk, at: int) -> None:
        sequence, begin, end = chunk.sequence, chunk.begin, chunk.begin + chunk.total
        self._write_tables(sequence)
        tokens = [*sequence.tokens[begin : begin + chunk.count], *chunk.draft_tokens]
        # Only the last can be one that the step before is still sampling.
        source = KNOWN if len(tokens) == chunk.total else 1 + sequence.result_row
        positions = np.arange(begin, end)
        rows = self.inputs.tokens[at : at + chunk.total]
        rows[: len(tokens), TOKEN_ID] = tokens
        rows[:, TOKEN_POSITION] = positions
        rows[:, TOKEN_SEQUENCE] = sequence.table_row
        rows[:, TOKEN_SOURCE] = KNOWN
        rows[-1, TOKEN_SOURCE] = source
        for group, table in enumerate(sequence.tables):
            blocks = np.array(table.blocks, np.int32)[positions // KV_BLOCK]
            rows[:, TOKEN_SLOT + group] = blocks * KV_BLOCK + positions % KV_BLOCK

    def _write_tables(self, sequence: Sequence) -> None:
        """The entries of the block tables that are new to this step_slot."""
        for group, table in enumerate(sequence.tables):
            first, end = table.written[self.step_slot], len(table.blocks)
            if first < end:
                self.inputs.tables[group][sequence.table_row, first:end] = table.blocks[first:]
                table.written[self.step_slot] = end

    def _write_work(self, chunk: Chunk, token: int, work: int) -> int:
        rows_per_item = min(self.rows_per_item, max(self.min_rows, -(-chunk.total // self.pieces)))
        for first in range(0, chunk.total, rows_per_item):
            rows = min(rows_per_item, chunk.total - first)
            self.inputs.work[work] = (token + first, rows, chunk.sequence.table_row, chunk.begin + first)
            work += 1
        return work

    def _write_rows(self, chunk: Chunk, token: int, row: int, adjustments: int) -> int:
        """That a chunk's last token and its draft tokens are sampled, and how; returns the next free adjustment."""
        sequence = chunk.sequence
        sequence.result_row = row
        if sequence.constraint:
            sequence.constraint.write_masks(self.inputs.masks[row:], chunk.draft_tokens)
        index = chunk.begin + chunk.count - len(sequence.prompt)
        for i in range(1 + len(chunk.draft_tokens)):
            if sequence.adjusted or self._owners[row + i] != sequence.number:
                adjustments = self._write_params(
                    sequence, index + i, row + i, adjustments, chunk.draft_tokens[:i]
                )
            self._rows[row + i] = token + i
            self._params[(row + i) * SAMPLING_INTS + COUNTER] = index + i
        return adjustments

    def _write_scores(self, chunk: Chunk, token: int, row: int, adjustment: int) -> int:
        """Writes rows that score each next token of the prompt: an adjustment makes the sampler take it, and the
        result has its log-probability before adjustments. Returns the next free adjustment."""
        n, after = chunk.scores, chunk.begin + 1
        params, adjustments = (
            self.inputs.params[row : row + n],
            self.inputs.adjustments[adjustment : adjustment + n],
        )
        params[:] = SCORING.view(np.int32)
        params[:, TOP_LOGPROBS] = chunk.sequence.params.prompt_logprobs or 0
        params[:, FIRST_ADJUSTMENT] = np.arange(adjustment, adjustment + n)
        adjustments[:] = FORCED.view(np.int32)
        adjustments[:, 0] = chunk.sequence.prompt[after : after + n]
        self.inputs.rows[row : row + n] = np.arange(token, token + n)
        self._owners[row : row + n] = [-1] * n
        return adjustment + n

    def _write_params(
        self, sequence: Sequence, index: int, row: int, first_adjustment: int, draft_tokens: Items[int] = ()
    ) -> int:
        """A row of sampling parameters; returns the next free adjustment."""
        adjustments = sequence.adjustments_at(index, draft_tokens)
        if sequence.param_row is None:
            sequence.param_row = _param_row(sequence)
        params = self.inputs.params[row]
        params[:] = sequence.param_row
        self._owners[row] = -1 if len(adjustments) else sequence.number
        if len(adjustments):
            self.inputs.adjustments[first_adjustment : first_adjustment + len(adjustments)] = adjustments
            params[FIRST_ADJUSTMENT], params[ADJUSTMENTS] = first_adjustment, len(adjustments)
        return first_adjustment + len(adjustments)


def _param_row(sequence: Sequence) -> Ints:
    p, row = sequence.params, np.zeros(1, SAMPLING_PARAMETERS)
    row["temperature"], row["top_k"] = p.temperature, min(p.top_k, 2**31 - 1)
    row["top_p"], row["min_p"] = p.top_p, p.min_p
    row["repeat_penalty"] = p.repeat_penalty
    row["presence_penalty"], row["frequency_penalty"] = p.presence_penalty, p.frequency_penalty
    row["seed_low"], row["seed_high"] = sequence.seed & 0xFFFFFFFF, sequence.seed >> 32
    row["top_logprobs"] = NO_LOGPROBS if p.logprobs is None else p.logprobs
    row["masked"] = sequence.constraint is not None
    return row.view(np.int32)

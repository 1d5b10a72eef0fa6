"""Writes StepInputs for the chunks that the scheduler chose, and reads the sampled tokens. It chooses nothing."""

from __future__ import annotations

from collections.abc import Sequence as Items
from struct import Struct

import numpy as np

from tandem.engine.images import SectionedAngles
from tandem.engine.sampling import Sampled, SamplingState
from tandem.engine.sequence import Chunk, Sequence
from tandem.kernels.abi import (
    CHUNK_TOKENS,
    HEADER_ADJUSTMENTS,
    HEADER_INPUTS,
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
    WORK_LAST,
    column,
)
from tandem.kernels.states import NO_STATE
from tandem.program.step_inputs import KNOWN, Ints, StepInputs

HEADER_FIELDS = (
    HEADER_TOKENS,
    HEADER_ROWS,
    HEADER_WORK,
    HEADER_ADJUSTMENTS,
    HEADER_MASKS,
    HEADER_SEQUENCES,
    HEADER_INPUTS,
)
assert list(HEADER_FIELDS) == list(range(7))  # they are written at once
HEADER = Struct("7i")
FOUR_INTS = Struct("4i")  # a token's fields before its KV slots
WORK_ENTRY = Struct("5i")  # an entry of the work list
QUERIES_PER_ITEM = 64  # rows x query heads per KV head that one attention item computes together
MIN_QUERIES = 8  # minimum of the same: with fewer, each takes longer
ROWS_PER_ITEM = 16  # maximum token rows per attention item

# Columns of rows of sampling parameters, logit adjustments and results.
COUNTER, FIRST_ADJUSTMENT, ADJUSTMENTS, TOP_LOGPROBS = (
    column(SAMPLING_PARAMETERS, field)
    for field in ("counter", "first_adjustment", "adjustments", "top_logprobs")
)
ADJUSTED_TOKEN = column(LOGIT_ADJUSTMENT, "token")
RESULT_TOP_COUNT, RESULT_TOP_IDS, RESULT_TOP_LOGPROBS = (
    column(SAMPLING_RESULT, field) for field in ("top_count", "top_ids", "top_logprobs")
)

# A row that scores a given token: greedy sampling, after one adjustment that makes its logit the highest.
SCORING = np.zeros(1, SAMPLING_PARAMETERS)
SCORING["top_p"], SCORING["repeat_penalty"], SCORING["adjustments"] = 1.0, 1.0, 1
FORCED = np.zeros(1, LOGIT_ADJUSTMENT)
FORCED["bias"] = 3e38


class Batch:
    def __init__(
        self,
        step_slot: int,
        inputs: StepInputs,
        results: Ints,
        queries_per_kv_head: int,
        min_items: int = 1,
        angles: SectionedAngles | None = None,
    ) -> None:
        """`min_items`: minimum number of attention items of a large chunk, so that all workers have some. `angles`: of
        a model whose positions have sections; those of the step are its table for RoPE."""
        self.step_slot, self.inputs, self.results = step_slot, inputs, results
        self.results_f32 = results.view(np.float32)
        # Flat views: a step of few sequences writes and reads single numbers, for which NumPy would be slow.
        self._header, self._tokens, self._work, self._rows, self._params, self._ids = (
            array.reshape(-1).data
            for array in (inputs.header, inputs.tokens, inputs.work, inputs.rows, inputs.params, results)
        )
        self.rows_per_item = max(1, min(ROWS_PER_ITEM, QUERIES_PER_ITEM // queries_per_kv_head))
        self.min_rows = max(1, min(self.rows_per_item, MIN_QUERIES // queries_per_kv_head))
        self.min_items = min_items
        self._angles = angles
        inputs.chunks[:, CHUNK_TOKENS] = 0
        self._images = 0  # rows of `inputs` in use
        self._chunks = 0  # rows of `chunks` in use
        self._row_owners: list[SamplingState | None] = [None] * len(results)  # whose parameters a row has

    def write(self, chunks: list[Chunk]) -> None:
        """Writes the StepInputs of a step."""
        token = row = work = adjustments = masks = chunks_written = self._images = 0
        for chunk in chunks:
            first = token
            if chunk.targets:
                self._write_states(chunk, token, chunks_written)
                chunks_written += 1
            if chunk.count == 1 and not chunk.draft_tokens and chunk.begin >= chunk.sequence.images_end:
                self._write_token(chunk, token, work)
                token, work = token + 1, work + 1
            else:
                self._write_tokens(chunk, token)
                work = self._write_work(chunk, token, work)
                token += chunk.total
            if chunk.scores:
                adjustments = self._write_scores(chunk, first, row, adjustments)
                row += chunk.scores
            if chunk.samples_next:
                adjustments = self._write_rows(chunk, first + chunk.count - 1, row, adjustments)
                row += 1 + len(chunk.draft_tokens)
                if chunk.sequence.constraint:
                    masks = row
        self._set_counts(token, row, work, adjustments, masks, len(chunks))
        if chunks_written or self._chunks:
            self._end_states(chunks_written)

    def undo(self, chunks: list[Chunk]) -> None:
        """Reverts the changes of `write` in the sequences: the step could not be started."""
        for chunk in chunks:
            chunk.sequence.sampling.result_row = chunk.result_row

    def write_out_of_band(self, chunk: Chunk) -> None:
        """Writes the StepInputs of an out-of-band forward: one chunk, with the logits of each of its tokens."""
        for table in chunk.sequence.kv.tables:  # another forward may have used its table row meanwhile
            table.written[self.step_slot] = 0
        self._images = 0
        self._write_tokens(chunk, 0)
        if chunk.targets:
            self._write_states(chunk, 0, 0)
        self._end_states(bool(chunk.targets))
        work = self._write_work(chunk, 0, 0)
        self.inputs.rows[: chunk.count] = np.arange(chunk.count)
        for row in range(chunk.count):
            self._write_params(chunk.sequence, row, row, 0)
        self._set_counts(chunk.count, chunk.count, work)

    def _set_counts(
        self, tokens: int, rows: int, work: int, adjustments: int = 0, masks: int = 0, sequences: int = 1
    ) -> None:
        # In the order of HEADER_FIELDS.
        counts = tokens, rows, work, adjustments, masks, sequences, self._images
        HEADER.pack_into(self._header, 0, *counts)
        if self.inputs.second_work is not None:
            self.inputs.second_work[:work] = self.inputs.work[:work]
            self.inputs.second_work[:work, WORK_LAST] = 0

    def read(self, row: int, sequence: Sequence) -> Sampled:
        """Returns the token sampled in a row."""
        token = self._ids[row * RESULT_INTS]
        if not sequence.sampling.wants_logprobs:
            return tuple.__new__(Sampled, (token, None, ()))  # Sampled(token) takes three times as long
        return self.read_logprobs(row)

    def read_logprobs(self, row: int) -> Sampled:
        """Returns the token sampled in a row, with log-probabilities."""
        result, floats = self.results[row], self.results_f32[row]
        count = int(result[RESULT_TOP_COUNT])
        ids = result[RESULT_TOP_IDS : RESULT_TOP_IDS + count].tolist()
        logprobs = floats[RESULT_TOP_LOGPROBS : RESULT_TOP_LOGPROBS + count].tolist()
        return Sampled(int(result[0]), float(floats[1]), tuple(zip(ids, logprobs, strict=True)))

    # ---- tokens, block tables and the work list

    def _write_token(self, chunk: Chunk, token: int, work: int) -> None:
        """Writes a chunk of one token, as most chunks are."""
        sequence, position = chunk.sequence, chunk.begin
        tables, table_row = sequence.kv.tables, sequence.state.table_row
        if tables[0].written[self.step_slot] < len(tables[0].blocks):
            self._write_tables(sequence)
        if position < len(sequence.tokens):
            id, source = sequence.tokens[position], KNOWN
        else:
            id, source = 0, 1 + sequence.sampling.result_row
        rotation = position
        if self._angles:
            self.inputs.angles[token] = self._angles.at(position + sequence.shift)
            rotation = token
        first = token * TOKEN_INTS
        FOUR_INTS.pack_into(self._tokens, 4 * first, id, rotation, table_row, source)
        WORK_ENTRY.pack_into(self._work, 4 * WORK_INTS * work, token, 1, table_row, position, 0)
        block, place = position // KV_BLOCK, position % KV_BLOCK
        for group, table in enumerate(tables, first + TOKEN_SLOT):
            self._tokens[group] = table.blocks[block] * KV_BLOCK + place

    def _write_tokens(self, chunk: Chunk, at: int) -> None:
        sequence, begin, end = chunk.sequence, chunk.begin, chunk.begin + chunk.total
        self._write_tables(sequence)
        tokens = [*sequence.tokens[begin : begin + chunk.count], *chunk.draft_tokens]
        # Only the last token can be one that the previous step is still sampling.
        source = KNOWN if len(tokens) == chunk.total else 1 + sequence.sampling.result_row
        positions = np.arange(begin, end)
        rows = self.inputs.tokens[at : at + chunk.total]
        rows[: len(tokens), TOKEN_ID] = tokens
        if self._angles:
            self._angles.write(self.inputs, at, sequence.images, begin, end)
        else:
            rows[:, TOKEN_POSITION] = positions
        rows[:, TOKEN_SEQUENCE] = sequence.state.table_row
        rows[:, TOKEN_SOURCE] = KNOWN
        rows[-1, TOKEN_SOURCE] = source
        for group, table in enumerate(sequence.kv.tables):
            blocks = np.array(table.blocks, np.int32)[positions // KV_BLOCK]
            rows[:, TOKEN_SLOT + group] = blocks * KV_BLOCK + positions % KV_BLOCK
        if begin < sequence.images_end:
            self._write_images(chunk, at)

    def _write_images(self, chunk: Chunk, at: int) -> None:
        """Writes the embeddings of a chunk's image tokens, each into the row of inputs with its token's number."""
        for span in chunk.sequence.images:
            first, end = max(chunk.begin, span.begin), min(chunk.begin + chunk.count, span.end)
            if first < end and span.image.embeddings is not None:
                embeddings = span.image.embeddings[first - span.begin : end - span.begin]
                rows = np.arange(at + first - chunk.begin, at + end - chunk.begin)
                self.inputs.inputs[rows, : embeddings.shape[1]] = embeddings
                self.inputs.tokens[rows, TOKEN_SOURCE] = -1 - rows
                self._images = int(rows[-1]) + 1

    def _write_tables(self, sequence: Sequence) -> None:
        """Writes the block table entries that are new to this step slot."""
        for group, table in enumerate(sequence.kv.tables):
            first, end = table.written[self.step_slot], len(table.blocks)
            if first < end:
                self.inputs.tables[group][sequence.state.table_row, first:end] = table.blocks[first:]
                table.written[self.step_slot] = end

    def _write_work(self, chunk: Chunk, token: int, work: int) -> int:
        """Cuts a chunk into attention items; returns the next free entry of the work list."""
        rows_per_item = min(self.rows_per_item, max(self.min_rows, -(-chunk.total // self.min_items)))
        table_row = chunk.sequence.state.table_row
        first, last = 0, 0
        while first < chunk.total:
            rows = min(rows_per_item, chunk.total - first)
            if (position := chunk.begin + first) < chunk.sequence.images_end:
                border, last = _image_border(chunk.sequence, position)
                rows = min(rows, border - position)
            self.inputs.work[work, :5] = (token + first, rows, table_row, chunk.begin + first, last)
            first, last, work = first + rows, 0, work + 1
        return work

    # ---- recurrent states

    def _write_states(self, chunk: Chunk, token: int, row: int) -> None:
        self.inputs.chunks[row] = (token, chunk.total, chunk.source, 0)
        states = self.inputs.states[token : token + chunk.total]
        states[:] = NO_STATE
        for index, slot in chunk.targets:
            states[index] = slot

    def _end_states(self, rows: int) -> None:
        """Marks the rows of earlier steps as unused."""
        if rows < self._chunks:
            self.inputs.chunks[rows : self._chunks, CHUNK_TOKENS] = 0
        self._chunks = rows

    # ---- rows to sample; these return the next free adjustment

    def _write_rows(self, chunk: Chunk, token: int, row: int, adjustments: int) -> int:
        """Writes the rows that sample after a chunk's last token and after each draft token."""
        sequence, draft_tokens = chunk.sequence, chunk.draft_tokens
        sampling = sequence.sampling
        sampling.result_row = row
        if sequence.constraint:
            sequence.constraint.write_masks(self.inputs.masks[row:], draft_tokens)
        index, drafted = chunk.begin + chunk.count - sampling.prompt_tokens, 0
        while True:
            if sampling.adjusts_logits or self._row_owners[row] is not sampling:
                adjustments = self._write_params(sequence, index, row, adjustments, draft_tokens[:drafted])
            self._rows[row] = token
            self._params[row * SAMPLING_INTS + COUNTER] = index
            if drafted == len(draft_tokens):
                return adjustments
            index, row, token, drafted = index + 1, row + 1, token + 1, drafted + 1

    def _write_scores(self, chunk: Chunk, token: int, row: int, adjustment: int) -> int:
        """Writes rows that score each next token of the prompt: an adjustment makes the sampler take it, and the
        result has its log-probability before adjustments."""
        n, after, request = chunk.scores, chunk.begin + 1, chunk.sequence.request
        params = self.inputs.params[row : row + n]
        adjustments = self.inputs.adjustments[adjustment : adjustment + n]
        params[:] = SCORING.view(np.int32)
        params[:, TOP_LOGPROBS] = request.params.prompt_logprobs or 0
        params[:, FIRST_ADJUSTMENT] = np.arange(adjustment, adjustment + n)
        adjustments[:] = FORCED.view(np.int32)
        adjustments[:, ADJUSTED_TOKEN] = request.prompt[after : after + n]
        self.inputs.rows[row : row + n] = np.arange(token, token + n)
        self._row_owners[row : row + n] = [None] * n
        return adjustment + n

    def _write_params(
        self, sequence: Sequence, index: int, row: int, first_adjustment: int, draft_tokens: Items[int] = ()
    ) -> int:
        """Writes a row of sampling parameters, for output token `index`."""
        sampling = sequence.sampling
        adjustments = sampling.adjustments_at(index, draft_tokens)
        params = self.inputs.params[row]
        params[:] = sampling.make_param_row() if sampling.param_row is None else sampling.param_row
        self._row_owners[row] = None if len(adjustments) else sampling
        if len(adjustments):
            self.inputs.adjustments[first_adjustment : first_adjustment + len(adjustments)] = adjustments
            params[FIRST_ADJUSTMENT], params[ADJUSTMENTS] = first_adjustment, len(adjustments)
        return first_adjustment + len(adjustments)


def _image_border(sequence: Sequence, position: int) -> tuple[int, int]:
    """Returns the end of the whole image, or of what is before the next one, that includes `position`, and the last
    position that all of its tokens see; 0: each token sees those before it."""
    for span in sequence.images:
        if not span.image.is_whole:
            continue
        if position < span.begin:
            return span.begin, 0
        if position < span.end:
            return span.end, span.end - 1
    return len(sequence.tokens), 0

"""What the next step computes. There is no prefill and no decode phase: each running sequence has tokens whose keys
and values are not computed yet (a whole prompt, or the one token just sampled), and a step lets them catch up.

Steps run in the order in which they are scheduled. So what a step computes counts as computed from then on, and blocks
given back may be used by the next step, while those before are still in flight.
"""

from __future__ import annotations

import math
import time
from bisect import insort

from tandem.engine.kv_cache import KVCache, extend_block_hashes
from tandem.engine.prefill_budget import PrefillBudget
from tandem.engine.sequence import Chunk, Sequence
from tandem.engine.speculation import Speculator
from tandem.errors import QueueFullError
from tandem.kernels.abi import KV_BLOCK
from tandem.program.step_inputs import StepLimits


class Scheduler:
    def __init__(
        self, limits: StepLimits, cache: KVCache, *, prefill_budget: PrefillBudget | None = None,
        queue: int | None = None, share: bool = True, speculator: Speculator | None = None, stages: int = 1,
    ) -> None:  # fmt: skip
        """`prefill_budget`: None computes prompts in the largest chunks. `queue`: requests that may wait. `share`:
        requests begin with what others have computed. `speculator`: proposes drafts. `stages`: devices that steps go
        through one behind the other; so many are in flight, and each has its part of the sequences."""
        self.limits, self.cache, self.prefill_budget, self.queue, self.share = (
            limits,
            cache,
            prefill_budget,
            queue,
            share,
        )
        self.speculator, self.stages = speculator, stages
        self.waiting: list[Sequence] = []  # both in the order of their turn: priority, then age
        self.running: list[Sequence] = []
        self._free_table_rows = list(range(limits.sequences - 1, -1, -1))
        self._deadline = math.inf  # no request's is sooner

    def add(self, sequence: Sequence) -> None:
        if self.queue is not None and len(self.waiting) >= self.queue:
            raise QueueFullError(f"{len(self.waiting)} requests are waiting already: try again later")
        insort(self.waiting, sequence, key=_order)
        self._deadline = min(self._deadline, sequence.deadline)

    def schedule(self) -> list[Chunk]:
        """One token of each sequence that answers comes first, then prompts in order, under the budget of tokens."""
        if self._deadline < math.inf:
            self._expire()
        for sequence in self.running:
            if sequence.computed >= sequence.maintain_blocks_at:
                self._maintain_blocks(sequence)
        if self.waiting:
            self._admit()
        chunks: list[Chunk] = []
        prompts: list[tuple[Sequence, int]] = []
        stages, most = self.stages, self.limits.tokens
        if stages > 1:
            most = min(most, -(-len(self.running) // stages))
        for sequence in self.running.copy():  # some may be put back
            if stages > 1 and sequence.in_flight_tokens:
                continue
            count = sequence.pending
            if count > 1:
                prompts.append((sequence, count))
            elif count and len(chunks) < most:
                if sequence.computed < sequence.maintain_blocks_at:
                    chunks.append(Chunk(sequence, sequence.computed, 1, True))
                else:
                    self._add_chunk(sequence, 1, 1, chunks)
        budget = self.limits.tokens - len(chunks)
        drafted = self._speculate(self.speculator, chunks, budget) if self.speculator else 0
        budget -= drafted
        if prompts and chunks and self.prefill_budget:
            budget = min(budget, self.prefill_budget.tokens(len(prompts), len(chunks)))
        rows = self.limits.rows - len(self.running) - drafted  # that nobody may want
        for sequence, count in prompts:
            most = budget
            if sequence.params.prompt_logprobs is not None:
                most = min(most, rows + 1)
                rows -= most - 1
            if budget:
                budget -= self._add_chunk(sequence, min(count, most), count, chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.table_row < 0:  # it was put back meanwhile
                chunks = [chunk for chunk in chunks if chunk.sequence is not sequence]
                continue
            sequence.computed += chunk.count
            sequence.in_flight_tokens += chunk.sampled
            if chunk.count > 1:
                sequence.maintain_blocks_at = 0
        return chunks

    def _speculate(self, speculator: Speculator, chunks: list[Chunk], budget: int) -> int:
        """Adds draft tokens where rows, tokens and KV blocks are to spare; returns their number."""
        most = min(self.limits.rows - len(self.running), budget)
        free = [chunk for chunk in chunks if not chunk.sequence.params.logits_processor]
        known = [chunk for chunk in free if chunk.begin < len(chunk.sequence.tokens)]
        drafts = speculator.propose([chunk.sequence for chunk in known], len(chunks), most)
        for chunk, draft in zip(known, drafts, strict=True):
            if draft and self.cache.reserve(chunk.sequence.tables, chunk.begin + 1 + len(draft)):
                chunk.draft_tokens = draft
        for chunk in free:
            sequence = chunk.sequence
            if chunk not in known and sequence.acceptance:  # its token is still being sampled
                sequence.acceptance.idle += 1
            if not sequence.always_needs_sampled_token:
                sequence.needs_sampled_token = bool(chunk.draft_tokens) or speculator.should_wait(sequence)
        return sum(len(chunk.draft_tokens) for chunk in known)

    def undo(self, chunks: list[Chunk]) -> None:
        """As if these, which were scheduled last, had not been."""
        for chunk in chunks:
            chunk.sequence.computed -= chunk.count
            chunk.sequence.in_flight_tokens -= chunk.sampled
            chunk.sequence.result_row = chunk.row

    def observe(self, chunks: list[Chunk], seconds: float) -> None:
        """What a step took."""
        prompts = ones = drafted = 0
        for chunk in chunks:
            if chunk.count == 1 and chunk.sampled:
                ones += 1
            else:
                prompts += chunk.count
            drafted += len(chunk.draft_tokens)
        if self.prefill_budget and not drafted:
            self.prefill_budget.observe(prompts, ones, seconds)
        if self.speculator:
            self.speculator.observe(ones, drafted, seconds, prompts)

    def accept(self, chunk: Chunk, accepted: int) -> None:
        """The first `accepted` draft tokens were those sampled."""
        if chunk.draft_tokens and self.speculator:
            self.speculator.learn(chunk.sequence, len(chunk.draft_tokens), accepted)
            # If it was not put back meanwhile.
            if chunk.sequence.table_row >= 0 and chunk.admissions == chunk.sequence.admissions:
                chunk.sequence.computed += accepted

    def pause(self, sequence: Sequence) -> None:
        """Takes it out of the steps; its slot and blocks stay, if it was not put back while its last step ran."""
        (self.running if sequence.table_row >= 0 else self.waiting).remove(sequence)

    def resume(self, sequence: Sequence, tokens: list[int]) -> bool:
        """Goes on with a text that begins like that of a sequence which pauses; False if blocks that others may have,
        or that were given back, would have to be computed again."""
        pairs = enumerate(zip(sequence.tokens, tokens, strict=False))
        same = next((i for i, (one, other) in pairs if one != other), len(tokens))
        computed = min(sequence.computed, same, len(tokens) - 1)
        if sequence.table_row < 0 or self.cache.slides or computed < sequence.tables[0].cached * KV_BLOCK:
            return False
        del sequence.block_hashes[computed // KV_BLOCK :]
        sequence.tokens[:], sequence.computed, sequence.maintain_blocks_at = tokens, computed, 0
        sequence.generated.clear()
        insort(self.running, sequence, key=_order)
        return True

    def remove(self, sequence: Sequence) -> None:
        if self.speculator:
            self.speculator.proposer.forget(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.table_row >= 0:
            self._free(sequence)
        else:
            self._free_blocks(sequence)

    # ---- guests: sequences that are computed between steps

    def reserve_table_row(self) -> int:
        """A slot that no sequence of the steps will have."""
        return self._free_table_rows.pop(0)

    def max_out_of_band_tokens(self) -> int:
        """Tokens that may be computed at a time between steps."""
        others, most = len(self.running), self.limits.tokens
        return (
            min(most, max(1, self.prefill_budget.tokens(1, others)))
            if self.prefill_budget and others
            else most
        )

    def reserve_out_of_band(self, sequence: Sequence, tokens: int) -> None:
        """Blocks for `tokens` positions, at the expense of the last that run."""
        while not self.cache.reserve(sequence.tables, tokens):
            if not self.running:
                raise QueueFullError("another text has the KV cache for itself: try again later")
            self._preempt(self.running[-1])

    # ---- who runs

    def _expire(self) -> None:
        now = time.perf_counter()
        if now < self._deadline:
            return
        for sequence in [s for s in (*self.running, *self.waiting) if s.deadline < now]:
            sequence.finish("timeout")
            self.remove(sequence)
        self._deadline = min((s.deadline for s in (*self.running, *self.waiting)), default=math.inf)

    def _admit(self) -> None:
        """Lets sequences in, in order, while there are slots and blocks."""
        # Blocks that will be computed: how urgent the most urgent of those is who will.
        coming: dict[bytes, int] = {}
        for sequence in self.running:
            _add_uncomputed(coming, sequence)
        # A long queue costs a step no more than a short one.
        for sequence in self.waiting[: 2 * self.limits.sequences]:
            if not self._free_table_rows and not self._outranks_last(sequence):
                return
            if self.share and not sequence.computed and not self._attach_prefix(sequence, coming):
                continue
            if not self._admit_one(sequence):
                return
            _add_uncomputed(coming, sequence)

    def _attach_prefix(self, sequence: Sequence, coming: dict[bytes, int]) -> bool:
        """Begins it with what others have computed; not yet if one of them, no less urgent, is just about to compute
        more of it. Nobody waits for those who may have to wait longer."""
        usable = (len(sequence.tokens) - 1) // KV_BLOCK  # one token at least is left, for its logits
        if sequence.params.prompt_logprobs is not None:
            usable = len(sequence.prompt_scores) // KV_BLOCK
        extend_block_hashes(sequence.block_hashes, sequence.tokens)
        shared = self.cache.find_prefix(sequence.block_hashes[:usable])
        if shared < usable and coming.get(sequence.block_hashes[shared], math.inf) <= sequence.priority:
            return False
        self.cache.attach_prefix(sequence.tables, sequence.block_hashes[:shared])
        sequence.computed = shared * KV_BLOCK
        if not sequence.admissions:  # else it is its own work that it finds
            sequence.cached_prompt_tokens = sequence.computed
        return True

    def _admit_one(self, sequence: Sequence) -> bool:
        """A slot, and blocks for the first chunk: those of less urgent sequences, if need be."""
        first = min(len(sequence.tokens), sequence.computed + self.limits.tokens)
        while not self._free_table_rows or not self.cache.reserve(sequence.tables, first):
            if not self._outranks_last(sequence):
                self._free_blocks(sequence)
                return False
            self._preempt(self.running[-1])
        self.waiting.remove(sequence)
        sequence.table_row = self._free_table_rows.pop()
        sequence.admissions += 1
        insort(self.running, sequence, key=_order)
        return True

    def _outranks_last(self, sequence: Sequence) -> bool:
        """Whether the last of those that run is less urgent."""
        return bool(self.running) and sequence.priority < self.running[-1].priority

    def _add_chunk(self, sequence: Sequence, count: int, pending: int, chunks: list[Chunk]) -> int:
        """Adds a chunk if there are blocks for it; returns its tokens."""
        if sequence.table_row < 0 or not self._reserve_blocks(sequence, sequence.computed + count):
            return 0
        chunk = Chunk(sequence, sequence.computed, count, count == pending)
        if sequence.params.prompt_logprobs is not None:  # the last one's successor is not known
            chunk.scores = max(0, min(count, len(sequence.prompt) - 1 - chunk.begin))
        chunks.append(chunk)
        return count

    def _reserve_blocks(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for `tokens` positions; the last other sequence waits again, to be recomputed, if there are none."""
        while not self.cache.reserve(sequence.tables, tokens):
            last = self.running[-1]
            if last is sequence:
                return False
            self._preempt(last)
        sequence.maintain_blocks_at = -(-tokens // KV_BLOCK) * KV_BLOCK
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._free(sequence)
        insort(self.waiting, sequence, key=_order)

    def _free(self, sequence: Sequence) -> None:
        self._maintain_blocks(sequence)
        if sequence in self.running:  # else it pauses
            self.running.remove(sequence)
        self._free_blocks(sequence)
        row, sequence.table_row = sequence.table_row, -1
        self._free_table_rows.append(row)

    def _free_blocks(self, sequence: Sequence) -> None:
        sequence.computed = sequence.maintain_blocks_at = 0  # first: an interrupt may have this done again
        self.cache.free(sequence.tables)

    def _maintain_blocks(self, sequence: Sequence) -> None:
        """After steps were started: offers full blocks to others, and gives back what has left a window."""
        full = min(sequence.computed, len(sequence.tokens)) // KV_BLOCK
        if self.share and full > sequence.tables[0].cached:
            extend_block_hashes(sequence.block_hashes, sequence.tokens)
            self.cache.publish(sequence.tables, sequence.block_hashes[:full])
        if self.cache.slides:
            self.cache.free_outside_window(sequence.tables, sequence.computed)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.number


def _add_uncomputed(coming: dict[bytes, int], sequence: Sequence) -> None:
    for key in sequence.block_hashes[sequence.computed // KV_BLOCK :]:
        coming[key] = min(sequence.priority, coming.get(key, sequence.priority))

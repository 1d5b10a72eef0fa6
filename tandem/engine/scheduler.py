"""Continuous batching: chooses the tokens of each step, and which sequences run.

Prefill and decode are not separate phases. A running sequence has tokens whose keys and values are not computed yet: a
whole prompt or, after a preemption, all tokens (prefill), or the one token just sampled (decode). A step computes such
tokens of any mix of sequences.

Steps run in the order in which they are scheduled. So the tokens of a step count as computed as soon as it is
scheduled, and the next step may use freed blocks while steps are still in flight.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import deque
from typing import TYPE_CHECKING

from tandem.engine.images import whole_images
from tandem.engine.kv_cache import BRANCH, EARLIER, PROMPT_END, KVCache, extend_block_hashes
from tandem.engine.sequence import Chunk, SchedulerState, Sequence
from tandem.engine.speculation import Speculator
from tandem.errors import QueueFullError
from tandem.kernels.abi import KV_BLOCK
from tandem.program.step_inputs import StepLimits

if TYPE_CHECKING:
    from tandem.engine.disk_cache import DiskCache

# ---- chunked prefill: PrefillBudget, at the end of this file
MAX_SLOWDOWN = 2.0  # maximum time of a step with prompt tokens, in decode steps before the prompt arrived
SPREADS = 3.0  # margin of the budget, in average deviations of the step time
MIN_EXTRA = 0.5  # time that prompts may always add to a step, in decode steps, so that they make progress
RECHECK_STEPS = 16  # steps with prompts after which one without measures the decode step again
WINDOW = 9  # decode steps in a median, since other processes delay single steps
SMOOTHING = 0.2  # weight of a new measurement in the averages of steps with prompts
MAX_OUTLIER = 2.0  # maximum of a new measurement, as a multiple of the average
INITIAL_TOKENS = 16  # tokens per prompt until there are measurements

# ---- checkpoints of recurrent layers
# Blocks between the last two checkpoints of a prompt; four times as many to the one before.
CHECKPOINT_DISTANCE = 4
# Of the state slots, at least: sequences that are not admitted yet leave them to checkpoints.
CHECKPOINT_SHARE = 0.25


class Scheduler:
    def __init__(
        self,
        limits: StepLimits,
        cache: KVCache,
        *,
        prefill_budget: PrefillBudget | None = None,
        queue: int | None = None,
        prefix_caching: bool = True,
        speculator: Speculator | None = None,
        stages: int = 1,
    ) -> None:
        """`prefill_budget`: None computes prompts in the largest chunks. `queue`: maximum number of waiting requests.
        `prefix_caching`: requests reuse cached KV blocks. `stages`: number of devices that a step passes one after
        the other; as many steps are in flight, and each has a part of the sequences."""
        self.limits, self.cache, self.prefill_budget, self.queue = limits, cache, prefill_budget, queue
        self.prefix_caching, self.speculator, self.stages = prefix_caching, speculator, stages
        self.disk: DiskCache | None = None  # set by DiskCache.open
        self.waiting: list[Sequence] = []  # both lists are sorted by priority, then arrival
        self.running: list[Sequence] = []
        self.preemptions = self.prompt_tokens = self.cached_prompt_tokens = 0  # totals of all requests so far
        # Of the prompt tokens: those with cached KV blocks that were computed again for want of a checkpoint.
        self.stateless_prompt_tokens = 0
        self._free_table_rows = list(range(limits.sequences - 1, -1, -1))
        self._deadline = math.inf  # no request has an earlier deadline

    def add(self, sequence: Sequence) -> None:
        if self.queue is not None and len(self.waiting) >= self.queue:
            raise QueueFullError(f"{len(self.waiting)} requests are waiting already: try again later")
        insort(self.waiting, sequence, key=_order)
        self._deadline = min(self._deadline, sequence.request.deadline)

    # ---- one step

    def schedule(self) -> list[Chunk]:
        """Returns the chunks of the next step; none if there is nothing to compute.

        Every decoding sequence gets its one token first. Sequences in prefill get the rest of the step's tokens, in
        order of priority and arrival, within the prefill budget."""
        if self._deadline < math.inf:
            self._expire()
        for sequence in self.running:
            if sequence.state.computed >= sequence.kv.block_boundary:
                self._publish_and_free_blocks(sequence)
        if self.waiting:
            self._admit()
        chunks: list[Chunk] = []
        prefills = self._schedule_decodes(chunks)
        budget = self.limits.tokens - len(chunks)
        drafted = self._schedule_drafts(self.speculator, chunks, budget) if self.speculator else 0
        if prefills:
            self._schedule_prefills(prefills, chunks, budget - drafted, drafted)
        return self._commit(chunks)

    def _schedule_decodes(self, chunks: list[Chunk]) -> list[tuple[Sequence, int]]:
        """Adds a chunk of one token for each decoding sequence; returns the sequences in prefill (a
        prompt, or all tokens of a preempted sequence) and their uncomputed tokens."""
        prefills: list[tuple[Sequence, int]] = []
        max_decodes = self.limits.tokens
        if self.stages > 1:
            max_decodes = min(max_decodes, -(-len(self.running) // self.stages))
        for sequence in self.running.copy():  # some may be preempted
            state = sequence.state
            pending, in_flight = len(sequence.tokens) - state.computed, state.in_flight_tokens
            if in_flight:
                if self.stages > 1 or not _can_follow(sequence, state):
                    continue
                pending += in_flight
            if pending > 1:
                prefills.append((sequence, pending))
            elif pending and len(chunks) < max_decodes:
                if state.computed < sequence.kv.block_boundary:
                    chunks.append(Chunk(sequence, state.computed, 1, True))
                else:
                    self._add_chunk(sequence, 1, 1, chunks)
        return prefills

    def _schedule_drafts(self, speculator: Speculator, chunks: list[Chunk], budget: int) -> int:
        """Adds draft tokens where tokens, rows and KV blocks are to spare; returns how many."""
        max_drafted = min(self.limits.logits_rows - len(self.running), budget)
        if self.cache.states:  # each draft token needs a slot for the state after it
            max_drafted = min(max_drafted, self.cache.states.num_free)
        eligible = [chunk for chunk in chunks if not chunk.sequence.request.params.logits_processor]
        with_known_token = [chunk for chunk in eligible if chunk.begin < len(chunk.sequence.tokens)]
        drafts = speculator.propose([chunk.sequence for chunk in with_known_token], len(chunks), max_drafted)
        for chunk, draft in zip(with_known_token, drafts, strict=True):
            kv = chunk.sequence.kv
            if (
                draft
                and self.cache.reserve(kv.tables, chunk.begin + 1 + len(draft))
                and self.cache.reserve_drafts(kv.states, len(draft))
            ):
                chunk.draft_tokens = draft
        for chunk in eligible:
            sequence = chunk.sequence
            if chunk not in with_known_token and sequence.acceptance:  # its token is still being sampled
                sequence.acceptance.idle += 1
            if not sequence.state.must_wait_for_token:
                sequence.state.wait_for_token = bool(chunk.draft_tokens) or speculator.should_wait(sequence)
        return sum(len(chunk.draft_tokens) for chunk in with_known_token)

    def _schedule_prefills(
        self, prefills: list[tuple[Sequence, int]], chunks: list[Chunk], budget: int, drafted: int
    ) -> None:
        """Adds chunks of sequences in prefill (chunked prefill)."""
        room = budget
        if chunks and self.prefill_budget:
            budget = min(budget, self.prefill_budget.tokens(len(prefills), len(chunks)))
        spare_rows = self.limits.logits_rows - len(self.running) - drafted
        for sequence, pending in prefills:
            count = min(pending, budget)
            is_scored = sequence.request.params.prompt_logprobs is not None
            if is_scored:  # a row for each token, and the sequence has one already
                count = min(count, spare_rows + 1)
            if sequence.images:
                count = whole_images(sequence.images, sequence.state.computed, count, room)
            if budget > 0 and count > 0:
                added = self._add_chunk(sequence, count, pending, chunks)
                budget, room = budget - added, room - added
                spare_rows -= max(0, added - 1) if is_scored else 0

    def _commit(self, chunks: list[Chunk]) -> list[Chunk]:
        """Counts the tokens of the chunks as computed; drops chunks of sequences that were preempted meanwhile."""
        for chunk in chunks:
            sequence, state = chunk.sequence, chunk.sequence.state
            if state.table_row < 0:
                chunks = [chunk for chunk in chunks if chunk.sequence is not sequence]
                continue
            state.computed += chunk.count
            state.in_flight_tokens += chunk.samples_next
            if chunk.count > 1:
                sequence.kv.block_boundary = 0
        if self.cache.states:
            for chunk in chunks:
                self.place_states(chunk)
        return chunks

    def place_states(self, chunk: Chunk) -> None:
        """Chooses the state slots that a chunk reads and writes."""
        states, pool = chunk.sequence.kv.states, self.cache.states
        # Slots for checkpoints: those that sequences still to be admitted do not need. A pool that is smaller than the
        # batch keeps some for checkpoints: without them each request would read its whole prompt again.
        spare = 0
        if pool:
            reserved = min(self.limits.sequences, int(len(pool.references) * (1 - CHECKPOINT_SHARE)))
            spare = pool.num_free - max(0, reserved - len(self.running))
        spare = spare if self.prefix_caching else 0
        chunk.source, chunk.targets = self.cache.advance_state(states, chunk.begin, chunk.count, spare)
        if states.unread or states.unpublished:
            chunk.sequence.kv.block_boundary = 0  # the next step publishes and frees them

    def undo(self, chunks: list[Chunk]) -> None:
        """Reverts `schedule`, which returned these chunks last: the step could not be started."""
        for chunk in chunks:
            chunk.sequence.state.computed -= chunk.count
            chunk.sequence.state.in_flight_tokens -= chunk.samples_next
        if self.cache.states:  # a part of the step may have changed states: they are computed again
            for chunk in chunks:
                self.cache.free_states(chunk.sequence.kv.states)
                if chunk.sequence.state.table_row >= 0:
                    self._preempt(chunk.sequence)

    def complete(self, chunks: list[Chunk], seconds: float | None) -> None:
        """Records that a step is done. `seconds`: its duration; None if it is not known."""
        prompt_tokens = decodes = drafted = 0
        for chunk in chunks:
            chunk.sequence.state.in_flight_tokens -= chunk.samples_next
            if chunk.count == 1 and chunk.samples_next:
                decodes += 1
            else:
                prompt_tokens += chunk.count
            drafted += len(chunk.draft_tokens)
        if seconds is None:
            return
        if self.prefill_budget and not drafted:
            self.prefill_budget.observe(prompt_tokens, decodes, seconds)
        if self.speculator:
            self.speculator.observe(decodes, drafted, seconds, prompt_tokens)

    @property
    def accepted_draft_tokens(self) -> int:
        """The number of accepted draft tokens since the start."""
        return self.speculator.accepted if self.speculator else 0

    def count_accepted(self, chunk: Chunk, accepted: int) -> None:
        """Counts the first `accepted` draft tokens as computed."""
        if chunk.draft_tokens and self.speculator:
            self.speculator.learn(chunk.sequence, len(chunk.draft_tokens), accepted)
            state = chunk.sequence.state
            # Otherwise it was preempted meanwhile.
            if state.table_row >= 0 and chunk.admissions == state.admissions:
                self.cache.accept_states(
                    chunk.sequence.kv.states, state.computed, accepted, self.prefix_caching
                )
                state.computed += accepted

    # ---- sequences

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, running or waiting, and frees its KV blocks."""
        if self.speculator:
            self.speculator.proposer.forget(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if self.disk:
            self.disk.cancel(sequence.kv)
        if sequence.state.table_row >= 0:
            self._stop_running(sequence)
        else:
            self._free_blocks(sequence)

    def pause(self, sequence: Sequence) -> None:
        """Takes a sequence out of the steps. It keeps its table row and KV blocks, unless it has been preempted."""
        (self.running if sequence.state.table_row >= 0 else self.waiting).remove(sequence)

    def resume(self, sequence: Sequence, tokens: list[int]) -> bool:
        """Continues a paused sequence with these tokens, from the first that differs. Returns False if this would
        recompute blocks that are in the prefix cache or were freed."""
        state, kv = sequence.state, sequence.kv
        pairs = enumerate(zip(sequence.tokens, tokens, strict=False))
        same = next((i for i, (one, other) in pairs if one != other), len(tokens))
        computed = min(state.computed, same, len(tokens) - 1)
        if (
            state.table_row < 0
            or self.cache.slides
            or self.cache.states
            or computed < kv.tables[0].cached * KV_BLOCK
        ):
            return False
        del kv.block_hashes[computed // KV_BLOCK :]
        state.computed, kv.block_boundary = computed, 0
        sequence.restart(tokens)
        insort(self.running, sequence, key=_order)
        return True

    # ---- out-of-band forwards: sequences that are computed between steps

    def reserve_table_row(self) -> int:
        """Returns a table row that no sequence of the steps will have."""
        return self._free_table_rows.pop(0)

    def max_out_of_band_tokens(self) -> int:
        """Returns the maximum number of tokens of a forward between two steps."""
        running, max_tokens = len(self.running), self.limits.tokens
        if not self.prefill_budget or not running:
            return max_tokens
        return min(max_tokens, max(1, self.prefill_budget.tokens(1, running)))

    def reserve_out_of_band(self, sequence: Sequence, tokens: int) -> None:
        """Allocates blocks for positions below `tokens`; preempts running sequences, the last first, if need be."""
        while not self.cache.reserve(sequence.kv.tables, tokens) or not self.cache.reserve_state(
            sequence.kv.states
        ):
            if self.disk and self.disk.give_way():
                continue
            if not self.running:
                raise QueueFullError("the KV cache is full: try again later")
            self._preempt(self.running[-1])

    # ---- admission and preemption

    def _expire(self) -> None:
        """Ends the requests whose deadline has passed."""
        now = time.perf_counter()
        if now < self._deadline:
            return
        for sequence in [s for s in (*self.running, *self.waiting) if s.request.deadline < now]:
            sequence.finish("timeout")
            self.remove(sequence)
        deadlines = (s.request.deadline for s in (*self.running, *self.waiting))
        self._deadline = min(deadlines, default=math.inf)

    def _admit(self) -> None:
        """Admits waiting sequences in order, while there are table rows and KV blocks."""
        uncomputed: dict[bytes, int] = {}  # block hash -> best priority of the sequences about to compute it
        for sequence in self.running:
            _add_uncomputed(uncomputed, sequence)
        # Only a part of the queue: a step with a long queue takes no longer than one with a short queue.
        for sequence in self.waiting[: 2 * self.limits.sequences]:
            if sequence.images and sequence.next_image:
                continue
            restore = sequence.kv.restore
            if self.disk and restore and self.disk.is_busy(restore):
                continue
            if not self._free_table_rows and not self._can_preempt_last(sequence):
                return
            use_prefix_cache = self.prefix_caching and not sequence.state.computed
            if use_prefix_cache and not self._attach_prefix(sequence, uncomputed):
                if sequence.kv.restore and sequence.kv.restore.needs_room:
                    return
                continue
            if not self._admit_one(sequence):
                return
            _add_uncomputed(uncomputed, sequence)

    def _attach_prefix(self, sequence: Sequence, uncomputed: dict[bytes, int]) -> bool:
        """Starts a sequence with the cached blocks of its prompt. Returns False, and attaches none, if a running
        sequence of the same or better priority is about to compute more of this prefix, or if more of it comes from the
        disk: waiting is cheaper."""
        kv, request = sequence.kv, sequence.request
        usable = (len(sequence.tokens) - 1) // KV_BLOCK  # the last token is computed, for its logits
        if request.params.prompt_logprobs is not None:
            usable = len(sequence.prompt_scores) // KV_BLOCK
        extend_block_hashes(kv.block_hashes, sequence.tokens, sequence.images)
        cached = self.cache.find_prefix(kv.block_hashes[:usable])
        if cached < usable and uncomputed.get(kv.block_hashes[cached], math.inf) <= request.priority:
            return False
        if (
            self.disk
            and cached < usable
            and self.disk.must_wait(kv, usable, lambda: self._make_room(sequence))
        ):
            return False
        self.cache.attach_prefix(kv.tables, kv.block_hashes[:cached])
        if self.cache.states:
            if cached:
                self.cache.attach_state(kv.states, kv.block_hashes[cached - 1])
            branch = self.cache.find_prefix(kv.block_hashes[:usable], any_state=True)
            kv.states.checkpoints = _checkpoints(usable, branch, cached)
            sequence.state.stateless_prompt_tokens = (branch - cached) * KV_BLOCK
        sequence.state.computed = cached * KV_BLOCK
        if not sequence.state.admissions:  # after a preemption, it attaches blocks that it computed itself
            sequence.state.cached_prompt_tokens = sequence.state.computed
        return True

    def _admit_one(self, sequence: Sequence) -> bool:
        """Gives a sequence a table row and blocks for its first chunk; preempts less urgent ones if need be."""
        first_chunk = min(len(sequence.tokens), sequence.state.computed + self.limits.tokens)
        while (
            not self._free_table_rows
            or not self.cache.reserve(sequence.kv.tables, first_chunk)
            or not self.cache.reserve_state(sequence.kv.states)
        ):
            if not self._make_room(sequence):
                self._free_blocks(sequence)
                return False
        self.waiting.remove(sequence)
        if not sequence.state.admissions:
            self.prompt_tokens += len(sequence.request.prompt)
            self.cached_prompt_tokens += sequence.state.cached_prompt_tokens
            self.stateless_prompt_tokens += sequence.state.stateless_prompt_tokens
            if self.cache.states and sequence.state.cached_prompt_tokens:
                self.cache.states.count_hit(sequence.kv.states.source)
        sequence.state.table_row = self._free_table_rows.pop()
        sequence.state.admissions += 1
        insort(self.running, sequence, key=_order)
        return True

    def _can_preempt_last(self, sequence: Sequence) -> bool:
        """Whether the last running sequence is less urgent."""
        return bool(self.running) and sequence.request.priority < self.running[-1].request.priority

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempts the last running sequence if it is less urgent; returns False otherwise."""
        if not self._can_preempt_last(sequence):
            return False
        self._preempt(self.running[-1])
        return True

    def _add_chunk(self, sequence: Sequence, count: int, pending: int, chunks: list[Chunk]) -> int:
        """Adds a chunk of `count` of the `pending` tokens if there are blocks for it; returns its number of tokens."""
        begin = sequence.state.computed
        if sequence.state.table_row < 0 or not self._reserve_blocks(sequence, begin + count):
            return 0
        chunk = Chunk(sequence, begin, count, count == pending)
        # The last prompt token has no successor to score.
        if sequence.request.params.prompt_logprobs is not None:
            chunk.scores = max(0, min(count, len(sequence.request.prompt) - 1 - begin))
        chunks.append(chunk)
        return count

    def _reserve_blocks(self, sequence: Sequence, tokens: int) -> bool:
        """Allocates blocks for positions below `tokens`; preempts running sequences, the last first, if need be."""
        while not self.cache.reserve(sequence.kv.tables, tokens):
            if self.disk and self.disk.give_way():
                continue
            last = self.running[-1]
            if last is sequence:
                return False
            self._preempt(last)
        sequence.kv.block_boundary = -(-tokens // KV_BLOCK) * KV_BLOCK
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Frees a running sequence's blocks and puts it back into the queue. It is recomputed later."""
        self._stop_running(sequence)
        sequence.kv.restore = None  # the disk may have what is evicted until it runs again
        insort(self.waiting, sequence, key=_order)
        self.preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        """Takes a running sequence out of the steps; frees its blocks and its table row."""
        self._publish_and_free_blocks(sequence)
        if self.prefix_caching:
            self.cache.publish_last_state(sequence.kv.states, sequence.kv.block_hashes)
        if sequence in self.running:  # else it is paused
            self.running.remove(sequence)
        self._free_blocks(sequence)
        row, sequence.state.table_row = sequence.state.table_row, -1
        self._free_table_rows.append(row)

    def _free_blocks(self, sequence: Sequence) -> None:
        # First: after an interrupt this may run again.
        sequence.state.computed = sequence.kv.block_boundary = 0
        self.cache.free(sequence.kv.tables)
        self.cache.free_states(sequence.kv.states)

    def _publish_and_free_blocks(self, sequence: Sequence) -> None:
        """Publishes full blocks to the prefix cache; frees blocks outside the window."""
        kv, computed = sequence.kv, sequence.state.computed
        full = min(computed, len(sequence.tokens)) // KV_BLOCK
        if self.prefix_caching and full > kv.tables[0].cached:
            extend_block_hashes(kv.block_hashes, sequence.tokens, sequence.images)
            self.cache.publish(kv.tables, kv.block_hashes[:full])
        self.cache.publish_states(kv.states, kv.block_hashes)
        if self.cache.slides:
            self.cache.free_outside_window(kv.tables, computed)


def _can_follow(sequence: Sequence, state: SchedulerState) -> bool:
    """Whether a token in flight can be computed in the next step, before the host knows it: not if that step depends
    on its id, or if it is the last token."""
    if state.wait_for_token:
        return False
    return len(sequence.generated) + state.in_flight_tokens < sequence.request.max_tokens


def _checkpoints(blocks: int, branch: int, cached: int) -> dict[int, str]:
    """The ends of prefixes, in blocks, at which a prompt keeps its recurrent state, the most useful first: its last
    full block, where it leaves the text of an earlier one, and some before its end, ever further apart. A prompt that
    differs d tokens before the end computes about 4 d again."""
    found, distance = {blocks: PROMPT_END}, CHECKPOINT_DISTANCE
    found.setdefault(branch, BRANCH)
    while distance < blocks:
        found.setdefault(blocks - distance, EARLIER)
        distance *= 4
    return {blocks: reason for blocks, reason in found.items() if blocks > cached}


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.request.number


def _add_uncomputed(uncomputed: dict[bytes, int], sequence: Sequence) -> None:
    priority = sequence.request.priority
    for hash in sequence.kv.block_hashes[sequence.state.computed // KV_BLOCK :]:
        uncomputed[hash] = min(priority, uncomputed.get(hash, priority))


class PrefillBudget:
    """Limits the prompt tokens that a step computes while other sequences decode: chunked prefill.

    Learns the time of a prompt token from step times, so that decoding stays fast.

    A prompt token takes longer in a longer prompt, since attention reads all of it, and in a smaller chunk. Both change
    slowly from step to step, so an average of recent steps follows them. Decode steps also become slower while outputs
    grow; MAX_SLOWDOWN refers to the decode step before the current prompts arrived.
    """

    def __init__(self) -> None:
        self._decode_step = 0.0  # seconds of a recent step without prompts
        # The same by batch size: 0, 1, 2 to 3, 4 to 7 ... sequences.
        self._decode_steps = [0.0]
        self._recent = [deque[float](maxlen=WINDOW)]  # recent times; `_decode_steps` are their medians
        # `_decode_steps` when the current prompts arrived; empty: there are no prompts.
        self._before_prompts: list[float] = []
        self._steps_since_decode = 0  # steps with prompts since the last one without
        self._skipped = False  # prompts were left out of a step, to measure one without
        self._token = 0.0  # seconds that a prompt token adds
        self._spread = 0.0  # average deviation of a step with prompts from its expected time, in seconds

    def observe(self, prompt_tokens: int, decodes: int, seconds: float) -> None:
        """Learns from a step of `decodes` decoding sequences."""
        if not prompt_tokens:
            size = decodes.bit_length()
            while size >= len(self._decode_steps):
                self._decode_steps.append(0.0)
                self._recent.append(deque(maxlen=WINDOW))
            recent = self._recent[size]
            recent.append(seconds)
            self._decode_step = self._decode_steps[size] = sorted(recent)[len(recent) // 2]
            if not self._skipped:
                self._before_prompts = []
            self._steps_since_decode, self._skipped = 0, False
        else:
            self._steps_since_decode += decodes > 0
            if decodes and not self._before_prompts:
                self._before_prompts = self._decode_steps.copy()
            extra = seconds - self._expected(self._decode_steps, decodes) if decodes else seconds
            if self._token and decodes:
                self._spread = _average(self._spread, abs(extra - prompt_tokens * self._token))
            self._token = _average(self._token, max(extra, 0.0) / prompt_tokens)

    def tokens(self, prompts: int, decodes: int) -> int:
        """Returns the tokens of all prompts together that the next step may compute in addition to `decodes` decoding
        sequences. They grow with the root of the number of prompts: many prompts do not wait long, and steps do not
        become so much longer than others that streams stutter."""
        step = self._expected(self._decode_steps, decodes)
        if not step or not self._token:
            return INITIAL_TOKENS * prompts
        if self._steps_since_decode >= RECHECK_STEPS:
            # Reset here: a step with draft tokens is not observed, and would be skipped for ever.
            self._steps_since_decode, self._skipped = 0, True
            return 0
        usual = min(step, self._expected(self._before_prompts, decodes)) if self._before_prompts else step
        room = max(MAX_SLOWDOWN * usual - step - SPREADS * self._spread, MIN_EXTRA * step)
        return max(1, round(math.sqrt(prompts) * room / self._token))

    def _expected(self, decode_steps: list[float], decodes: int) -> float:
        """Returns the seconds of a decode step of this batch size, or of the next smaller measured one."""
        measured = [seconds for seconds in decode_steps[: decodes.bit_length() + 1] if seconds]
        return measured[-1] if measured else self._decode_step


def _average(old: float, new: float) -> float:
    """Returns a running average that limits outliers."""
    if not old:
        return new
    return old + SMOOTHING * ((new if new < MAX_OUTLIER * old else MAX_OUTLIER * old) - old)

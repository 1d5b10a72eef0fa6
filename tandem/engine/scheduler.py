"""What the next step computes. There is no prefill and no decode phase: each running sequence has tokens whose keys
and values are not computed yet (a whole prompt, or the one token just sampled), and a step lets them catch up.

Steps run in the order in which they are scheduled. So what a step computes counts as computed from then on, and blocks
given back may be used by the next step, while those before are still in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tandem.engine.kv_cache import KVCache
from tandem.engine.sequence import Sequence
from tandem.program.step_inputs import StepLimits


@dataclass
class Chunk:
    """`count` tokens of a sequence from `begin` on; `sampled` if the last of all is among them."""

    sequence: Sequence
    begin: int
    count: int
    sampled: bool


class Scheduler:
    def __init__(self, limits: StepLimits, cache: KVCache) -> None:
        self.limits, self.cache = limits, cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._slots = list(range(limits.sequences - 1, -1, -1))

    def schedule(self) -> list[Chunk]:
        """First come first served under the budget of tokens; one token of each running sequence comes first."""
        for sequence in self.running:
            self.cache.slide(sequence.tables, sequence.computed)
        self._admit()
        budget, chunks = self.limits.tokens, []
        for sequence in sorted(self.running, key=lambda s: s.pending > 1):
            pending = sequence.pending
            count = min(pending, budget) if sequence.slot >= 0 else 0  # it may have been put back meanwhile
            if count and self._make_room(sequence, sequence.computed + count):
                chunks.append(Chunk(sequence, sequence.computed, count, count == pending))
                budget -= count
        chunks = [chunk for chunk in chunks if chunk.sequence.slot >= 0]
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
            chunk.sequence.ahead += chunk.sampled
        return chunks

    def undo(self, chunks: list[Chunk]) -> None:
        """As if these, which were scheduled last, had not been."""
        for chunk in chunks:
            chunk.sequence.computed -= chunk.count
            chunk.sequence.ahead -= chunk.sampled

    def remove(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self._put_back(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _admit(self) -> None:
        while self.waiting and self._slots and len(self.running) < self.limits.rows:
            first = min(len(self.waiting[0].tokens), self.limits.tokens)
            if self.running and not self.cache.reserve(self.waiting[0].tables, first):
                return
            sequence = self.waiting.popleft()
            sequence.slot = self._slots.pop()
            self.running.append(sequence)

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for `tokens` positions; the newest other sequence waits again, to be recomputed, if there are none."""
        while not self.cache.reserve(sequence.tables, tokens):
            newest = self.running[-1]
            if newest is sequence:
                return False
            self._put_back(newest)
            newest.computed = 0
            self.waiting.appendleft(newest)
        return True

    def _put_back(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.cache.release(sequence.tables)
        self._slots.append(sequence.slot)
        sequence.slot = -1

"""What the next step computes. There is no prefill and no decode phase: each running sequence has tokens whose keys
and values are not computed yet (a whole prompt, or the one token just sampled), and a step lets them catch up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tandem.engine.kv_cache import KVCache
from tandem.engine.sequence import Sequence
from tandem.program.step_inputs import StepLimits


@dataclass
class Chunk:
    """`count` tokens of a sequence from its first uncomputed one; `sampled` if the last of all is among them."""

    sequence: Sequence
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
        self._admit()
        budget, chunks = self.limits.tokens, []
        for sequence in sorted(self.running, key=lambda s: len(s.tokens) - s.computed > 1):
            pending = len(sequence.tokens) - sequence.computed
            count = min(pending, budget) if sequence.slot >= 0 else 0  # it may have been put back meanwhile
            if count and self._make_room(sequence, sequence.computed + count):
                chunks.append(Chunk(sequence, count, count == pending))
                budget -= count
        return [chunk for chunk in chunks if chunk.sequence.slot >= 0]

    def complete(self, chunks: list[Chunk]) -> None:
        """After the step: counts what is computed, and lets finished sequences go."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed += chunk.count
            if sequence.finish_reason:
                self.remove(sequence)
            else:
                self.cache.slide(sequence.tables, sequence.computed)

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

"""Prompt lookup: drafts the tokens after the last occurrence of the n-gram that ends a sequence. Needs no model."""

from __future__ import annotations

from tandem.engine.sequence import Sequence
from tandem.engine.speculation_cost import WINDOW

LENGTHS = (4, 3, 2)  # lengths of n-grams, in the order in which they are tried


class NgramIndex:
    """The position after the last occurrence of each n-gram in a sequence. It grows with the sequence."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # number of indexed tokens

    def propose(self, tokens: list[int], count: int) -> list[int]:
        for end in range(max(self._indexed, LENGTHS[-1]), len(tokens)):
            for length in LENGTHS:
                if length <= end:
                    self._after[tuple(tokens[end - length : end])] = end
        self._indexed = len(tokens)
        for length in LENGTHS:
            at = self._after.get(tuple(tokens[-length:]))
            if at is not None:
                return tokens[at : at + count]
        return []


class PromptLookup:
    """Proposes tokens that followed the same n-gram earlier in the prompt or output."""

    cost_coefficient = 0.0  # a search takes microseconds
    acceptance_window = WINDOW

    def __init__(self) -> None:
        self._indices: dict[Sequence, NgramIndex] = {}

    def uncached(self, sequence: Sequence) -> int:
        return 0  # indexing a token takes microseconds

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [
            self._indices.setdefault(sequence, NgramIndex()).propose(sequence.tokens, count) if count else []
            for sequence, count in wanted
        ]

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)

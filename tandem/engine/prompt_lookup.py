"""Prompt lookup (n-grams): the draft is what followed the last time that the context ended as it does now. No model."""

from __future__ import annotations

from tandem.engine.sequence import Sequence

LENGTHS = (4, 3, 2)  # of the endings that are looked up


class NgramIndex:
    """Where each ending of a text was followed by something, the last time."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._read = 0  # tokens that are in it

    def propose(self, tokens: list[int], count: int) -> list[int]:
        for end in range(max(self._read, LENGTHS[-1]), len(tokens)):
            for length in LENGTHS:
                if length <= end:
                    self._after[tuple(tokens[end - length : end])] = end
        self._read = len(tokens)
        for length in LENGTHS:
            at = self._after.get(tuple(tokens[-length:]))
            if at is not None:
                return tokens[at : at + count]
        return []


class PromptLookup:
    cost_coefficient = 0.0  # a draft takes microseconds

    def __init__(self) -> None:
        self._indices: dict[Sequence, NgramIndex] = {}

    def unread(self, sequence: Sequence) -> int:
        return 0  # an index takes microseconds a token, once

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [
            self._indices.setdefault(sequence, NgramIndex()).propose(sequence.tokens, count) if count else []
            for sequence, count in wanted
        ]

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)

"""Guesses the next tokens, so that one step can compute several.

A guess is computed behind the token before it, and a token is drawn at each of its places as it would be without it;
as long as the draws are the guess, they are all kept. So the tokens are those that the same seed gives without guesses:
greedy and sampled alike. What a guess costs is learned from the steps' times, how often it is right from the request
itself; where it does not pay, it is left out, and tried again from time to time.

Prompt lookup: the tokens that followed the last time that the context ended as it does now.
"""

from __future__ import annotations

from tandem.engine.pace import Pace
from tandem.engine.sequence import Sequence

MOST_GUESSED = 8  # tokens
LENGTHS = (4, 3, 2)  # of the endings that are looked up
HOPE, LESS_HOPE = 0.6, 0.35  # that a guessed token is right: to begin with, and when it is tried again
SHARE = 0.2  # of a new guess in the average
PATIENCE = 48  # tokens after which a request whose guesses were bad is given another try
LOOK = 8  # tokens a request gets a step ahead of the host before it is looked up again


class Lookup:
    """Where each ending of a request's context was seen last, and how good guesses have been."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # an ending -> where it was followed by something
        self._seen = 0  # tokens that are in it
        self.right = HOPE  # share of guessed tokens
        self.idle = 0  # tokens since the last guess

    def guess(self, tokens: list[int], count: int) -> list[int]:
        for end in range(max(self._seen, LENGTHS[-1]), len(tokens)):
            for length in LENGTHS:
                if length <= end:
                    self._after[tuple(tokens[end - length : end])] = end
        self._seen = len(tokens)
        for length in LENGTHS:
            at = self._after.get(tuple(tokens[-length:]))
            if at is not None:
                return tokens[at : at + count]
        return []

    def learn(self, guessed: int, right: int) -> None:
        for hit in [True] * right + [False] * (right < guessed):
            self.right += SHARE * (hit - self.right)


class Speculator:
    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.guessed = self.right = 0  # tokens, of all requests

    def guess(self, sequence: Sequence, company: int, most: int) -> list[int]:
        """Tokens that may follow, `most` at most. `company`: sequences that the step serves."""
        most = min(most, MOST_GUESSED, sequence.most - len(sequence.generated) - 1)
        if most < 1:
            return []
        if sequence.lookup is None:
            sequence.lookup = Lookup()
        lookup = sequence.lookup
        lookup.idle += 1
        count = best_length(lookup.right, self.pace.cost, company, most)
        if not count and lookup.idle >= PATIENCE:
            lookup.idle, lookup.right = 0, LESS_HOPE
        guess = lookup.guess(sequence.tokens, count) if count else []
        if guess:
            lookup.idle = 0
        return guess

    def should_wait(self, sequence: Sequence) -> bool:
        """Whether to let a request's next step wait for its token, so that it can be looked up: where that has been
        good for something, and else from time to time."""
        lookup = sequence.lookup
        return lookup is None or lookup.idle % LOOK == 0

    def learn(self, sequence: Sequence, guessed: int, right: int) -> None:
        self.guessed += guessed
        self.right += right
        if sequence.lookup:
            sequence.lookup.learn(guessed, right)


def best_length(right: float, cost: float, company: int, most: int) -> int:
    """How many tokens to guess for the most tokens a second, if each is right with this probability and adds `cost` of
    a step's time."""
    best, length, tokens = float(company), 0, float(company)
    for n in range(1, most + 1):
        tokens += right**n
        if tokens / (1 + cost * n) > best:
            best, length = tokens / (1 + cost * n), n
    return length

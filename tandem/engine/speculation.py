"""Guesses the next tokens, so that one step can compute several.

A guess is computed behind the token before it, and a token is drawn at each of its places as it would be without it;
as long as the draws are the guess, they are all kept. So the tokens are those that the same seed gives without guesses:
greedy and sampled alike. What a guess costs is learned from the steps' times, how often it is right from the request
itself; where it does not pay, it is left out, and tried again from time to time.
"""

from __future__ import annotations

from typing import Protocol

from tandem.engine.pace import Pace
from tandem.engine.sequence import Sequence

MOST_GUESSED = 8  # tokens
HOPE, LESS_HOPE = 0.6, 0.35  # that a guessed token is right: to begin with, and when it is tried again
SHARE = 0.2  # of a new guess in the average
PATIENCE = 48  # tokens after which a request whose guesses were bad is given another try
LOOK = 8  # tokens a request gets a step ahead of the host before a guess is tried again


class Proposer(Protocol):
    """Where guesses come from: lookup.py, draft.py."""

    def guess(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence so many tokens that may follow, or fewer."""

    @property
    def seconds(self) -> float:
        """What a token of a guess takes to make."""


class Trust:
    """How good a request's guesses have been."""

    def __init__(self) -> None:
        self.right = HOPE  # share of guessed tokens
        self.idle = 0  # tokens since the last guess

    def learn(self, guessed: int, right: int) -> None:
        for hit in [True] * right + [False] * (right < guessed):
            self.right += SHARE * (hit - self.right)


class Speculator:
    def __init__(self, pace: Pace, proposer: Proposer) -> None:
        self.pace, self.proposer = pace, proposer
        self.guessed = self.right = 0  # tokens, of all requests

    def guess(self, sequences: list[Sequence], company: int, most: int) -> list[list[int]]:
        """Tokens that may follow in each, `most` at most in all. `company`: sequences that the step serves."""
        wanted = []
        for sequence in sequences:
            count = self._length(sequence, company, most)
            wanted.append((sequence, count))
            most -= count
        guesses = [
            sequence.grammar.possible(guess) if guess and sequence.grammar else guess
            for (sequence, _), guess in zip(wanted, self.proposer.guess(wanted), strict=True)
        ]
        for sequence, guess in zip(sequences, guesses, strict=True):
            if guess and sequence.trust:
                sequence.trust.idle = 0
        return guesses

    def _length(self, sequence: Sequence, company: int, most: int) -> int:
        if sequence.trust is None:
            sequence.trust = Trust()
        trust = sequence.trust
        trust.idle += 1
        most = min(most, MOST_GUESSED, sequence.most - len(sequence.generated) - 1)
        cost = self.pace.cost + self.pace.in_steps(self.proposer.seconds)
        length = best_length(trust.right, cost, company, most)
        if not length and trust.idle >= PATIENCE:
            trust.idle, trust.right = 0, LESS_HOPE
        return length

    def should_wait(self, sequence: Sequence) -> bool:
        """Whether to let a request's next step wait for its token, so that a guess can go on from there: where that has
        been good for something, and else from time to time."""
        return sequence.trust is None or sequence.trust.idle % LOOK == 0

    def learn(self, sequence: Sequence, guessed: int, right: int) -> None:
        self.guessed += guessed
        self.right += right
        if sequence.trust:
            sequence.trust.learn(guessed, right)


def best_length(right: float, cost: float, company: int, most: int) -> int:
    """How many tokens to guess for the most tokens a second, if each is right with this probability and adds `cost` of
    a step's time."""
    best, length, tokens = float(company), 0, float(company)
    for n in range(1, most + 1):
        tokens += right**n
        if tokens / (1 + cost * n) > best:
            best, length = tokens / (1 + cost * n), n
    return length

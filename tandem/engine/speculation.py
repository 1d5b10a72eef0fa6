"""Guesses the next tokens, so that one step can compute several.

A guess is computed behind the token before it, and a token is drawn at each of its places as it would be without it;
as long as the draws are the guess, they are all kept. So the tokens are those that the same seed gives without guesses:
greedy and sampled alike. What a guess costs is learned from the steps' times (worth.py), how often it is right from the
request itself; where it does not pay, it is left out, and tried again from time to time.
"""

from __future__ import annotations

from typing import Protocol

from tandem.engine.sequence import Sequence
from tandem.engine.worth import Worth

MOST_GUESSED = 8  # tokens of a request
HOPE = 0.6  # that a guessed token is right, before there is any experience
EVEN = 0.5  # guesses that are right more often are worth waiting for
SHARE = 0.2  # of a new guess in the average
PATIENCE, MOST_PATIENCE = 32, 512  # tokens after which a request whose guesses were bad is given another try
TRIAL = 3  # tokens of such a try
LOOK = 8  # tokens a request gets a step ahead of the host before a guess is tried again


class Proposer(Protocol):
    """Where guesses come from: lookup.py, draft.py."""

    reads: bool  # a whole text, before its first guess

    def guess(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence so many tokens that may follow, or fewer."""

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""

    @property
    def usual(self) -> bool:
        """Whether the last guess took no longer than it will the next time."""


class Trust:
    """How good a request's guesses have been."""

    def __init__(self, right: float) -> None:
        self.right = right  # share of guessed tokens
        self.idle = 0  # tokens since the last guess
        self.patience = PATIENCE
        self.known = False  # from guesses of its own

    def tried(self) -> None:
        if self.idle >= self.patience:
            self.patience = min(2 * self.patience, MOST_PATIENCE)
        self.idle = 0

    def learn(self, guessed: int, right: int) -> None:
        self.known = True
        for hit in [True] * right + [False] * (right < guessed):
            self.right += SHARE * (hit - self.right)
        if right:
            self.patience = PATIENCE


class Speculator:
    def __init__(self, proposer: Proposer, worth: Worth | None = None) -> None:
        self.proposer, self.worth = proposer, worth or Worth()
        self.steps = self.guessed = self.right = 0  # with guesses; tokens, of all requests
        self._hope = HOPE  # for the next request, from those before

    def guess(self, sequences: list[Sequence], company: int, most: int) -> list[list[int]]:
        """Tokens that may follow in each, `most` at most in all. `company`: sequences that the step serves."""
        lengths = self._lengths(sequences, company, most)
        if not any(lengths):
            return [[]] * len(sequences)
        wanted = list(zip(sequences, lengths, strict=True))
        guesses = []
        for (sequence, length), guess in zip(wanted, self.proposer.guess(wanted), strict=True):
            if sequence.grammar and length:
                guess = sequence.grammar.possible(sequence.grammar.forced()[:length] or guess)
            guesses.append(guess)
            if guess and sequence.trust:
                sequence.trust.tried()
        return guesses

    def _lengths(self, sequences: list[Sequence], company: int, most: int) -> list[int]:
        """How many tokens to guess of each."""
        rooms, trusts = [], []
        # While nothing has been saved, one text is read at a time: if it was in vain, the others are not.
        tries = 1 if self.proposer.reads and self.worth.saved <= 0 else len(sequences)
        for sequence in sequences:
            if sequence.trust is None:
                sequence.trust = Trust(self._hope)
            sequence.trust.idle += 1
            trusts.append(sequence.trust)
            may = sequence.trust.known or (self.worth.may_try and tries > 0)
            tries -= not sequence.trust.known
            rooms.append(min(MOST_GUESSED, sequence.most - len(sequence.generated) - 1) if may else 0)
        if not sequences or most < 1 or not self.worth.knows(company):
            return [0] * len(sequences)
        lengths = best_lengths([trust.right for trust in trusts], rooms, self.worth, company, most)
        if not any(lengths) and self.worth.may_try:
            for i, trust in enumerate(trusts):
                if trust.idle >= trust.patience:
                    lengths[i] = max(0, min(TRIAL, rooms[i], most))
                    most -= lengths[i]
        return lengths

    def should_wait(self, sequence: Sequence) -> bool:
        """Whether to let a request's next step wait for its token, so that a guess can go on from there: where that has
        been good for something lately, and else from time to time."""
        trust = sequence.trust
        if trust is None or trust.idle % LOOK == 0:
            return True
        return trust.known and trust.right > EVEN and trust.idle < PATIENCE

    def observe(self, sequences: int, guessed: int, seconds: float | None) -> None:
        """What a step took; None: it had prompts, too, and what the guesses took cannot be told."""
        self.steps += guessed > 0
        self.worth.observe(sequences, guessed, seconds, self.proposer.usual)

    @property
    def statistics(self) -> dict[str, float]:
        """Of all requests: steps with guesses, tokens that were guessed, those of them that were right, and the seconds
        that this has saved, by what steps without have taken."""
        counts = {"steps": self.steps, "guessed": self.guessed, "right": self.right}
        return {**counts, "saved_seconds": self.worth.saved}

    def learn(self, sequence: Sequence, guessed: int, right: int) -> None:
        """Of a step that was observed."""
        self.guessed += guessed
        self.right += right
        self.worth.credit(right)
        if sequence.trust:
            sequence.trust.learn(guessed, right)
            self._hope += SHARE * SHARE * (sequence.trust.right - self._hope)


def best_lengths(chances: list[float], rooms: list[int], worth: Worth, company: int, most: int) -> list[int]:
    """How many tokens to guess of each sequence for the most tokens a second, if each is right with its chance."""
    lengths, best = [0] * len(chances), [0] * len(chances)
    next_chances = [chance if room > 0 else 0.0 for chance, room in zip(chances, rooms, strict=True)]
    expected, rate = float(company), company / worth.seconds(company, 0)
    for guessed in range(1, most + 1):
        i = max(range(len(chances)), key=next_chances.__getitem__)
        if not next_chances[i]:
            break
        lengths[i] += 1
        expected += next_chances[i]
        next_chances[i] = next_chances[i] * chances[i] if lengths[i] < rooms[i] else 0.0
        if expected / worth.seconds(company, guessed) > rate:
            rate, best = expected / worth.seconds(company, guessed), lengths.copy()
    return best

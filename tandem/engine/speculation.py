"""Guesses the next tokens, so that one step can compute several.

A guess is computed behind the token before it, and a token is drawn at each of its places as it would be without it;
as long as the draws are the guess, they are all kept. So the tokens are those that the same seed gives without guesses:
greedy and sampled alike. What a guess costs is learned from the steps' times (worth.py), how often it is right from the
request itself; where it does not pay, it is left out, and tried again from time to time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import add
from typing import Protocol

from tandem.engine.sequence import Sequence
from tandem.engine.worth import Worth

MOST_GUESSED = 8  # tokens of a request
HOPE = 0.7  # that a guessed token is right, before there is any experience
SURE = 0.95  # where not even such guesses would pay, none are tried
EVEN = 0.5  # guesses that are right more often are worth waiting for
BELIEF = 8  # guessed tokens that what was expected counts as
MEMORY, LONG_MEMORY = 16, 64  # guessed tokens that experience goes back: of a request, of all
PATIENCE, MOST_PATIENCE = 32, 512  # tokens after which a request whose guesses were bad is given another try
TRIAL = 3  # tokens of such a try
LOOK = 8  # tokens a request gets a step ahead of the host before a guess is tried again
FEW = 16  # tokens that a text grows by between guesses, where there are some at each step
LIKELY = 128  # tokens that an answer still has, if it may; as many again as it had, if those are more
ODDS = 2  # times what reading a text takes must be likely to be saved


class Proposer(Protocol):
    """Where guesses come from: lookup.py, draft.py."""

    typical: float  # share of a step, for guessing a token of each sequence

    def unread(self, sequence: Sequence) -> int:
        """Tokens that have to be read before the next guess."""

    def guess(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence so many tokens that may follow, or fewer."""

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""


class Chance:
    """That a guessed token is right: what was expected, then an average of what was seen."""

    def __init__(self, expected: float, memory: int) -> None:
        self.right, self._seen, self._memory = expected, BELIEF, memory

    def learn(self, guessed: int, right: int, weight: int = 1) -> None:
        for hit in [True] * right + [False] * (right < guessed):
            self._seen = min(self._seen + 1, self._memory)
            self.right += (hit - self.right) * min(1.0, weight / self._seen)


class Trust(Chance):
    """How good a request's guesses have been."""

    def __init__(self, expected: float) -> None:
        super().__init__(expected, MEMORY)
        self.idle = 0  # tokens since the last guess
        self.patience = PATIENCE
        self.known = False  # from guesses of its own
        self._wrong = 0  # guesses in a row

    def tried(self) -> None:
        if self.idle >= self.patience:
            self.patience = min(2 * self.patience, MOST_PATIENCE)
        self.idle = 0

    def learn(self, guessed: int, right: int, weight: int = 1) -> None:
        """The more guesses are wrong in a row, the more each of them counts: the text has become another."""
        self.known = True
        self._wrong = 0 if right else self._wrong + 1
        super().learn(guessed, right, max(weight, self._wrong - 1))
        if right:
            self.patience = PATIENCE


@dataclass
class Choice:
    """What a step may guess. `unread`: tokens of each text that have to be read before; `left`: likely to come."""

    worth: Worth
    company: int  # sequences that the step serves
    most: int  # tokens guessed in all
    chances: list[float]
    rooms: list[int]  # tokens of each that may be guessed
    unread: list[int]
    left: list[int]
    whole: float  # seconds that the longest of the requests takes without guesses

    def known(self) -> list[int]:
        """The best lengths for texts that have been read."""
        return self._best(
            [0 if tokens else room for tokens, room in zip(self.unread, self.rooms, strict=True)]
        )

    def after_reading(self, lengths: list[int]) -> list[int]:
        """Better lengths than these, if reading what they take is likely to pay in what is left."""
        rooms, purse, tokens = self.rooms.copy(), self.worth.purse(self.whole), 0
        for i in self._shortest_first():
            tokens += self.unread[i]
            if self.unread[i] and self._reading(tokens) > purse:
                rooms[i] = 0
        better = self._best(rooms)
        gain = (self._seconds_per_token(lengths) - self._seconds_per_token(better)) * sum(self.left)
        tokens = sum(tokens for tokens, length in zip(self.unread, better, strict=True) if length)
        return better if gain > ODDS * self._reading(tokens) else lengths

    def trial(self, idle: list[bool]) -> list[int]:
        """Short guesses where there has been none for long, if good ones would pay and the account does."""
        lengths, tokens = [0] * len(idle), 0
        if not any(best_lengths([SURE] * len(idle), self.rooms, self.worth, self.company, self.most)):
            return lengths
        plain = self.worth.seconds(self.company, lengths)
        for i in self._shortest_first():
            if idle[i]:
                tokens += self.unread[i]
                lengths[i] = max(0, min(TRIAL, self.rooms[i], self.most - sum(lengths)))
                cost = self.worth.seconds(self.company, lengths) - plain + self._reading(tokens)
                if not self.worth.affords(cost, self.whole):
                    lengths[i] = 0
                    break
        return lengths

    def _best(self, rooms: list[int]) -> list[int]:
        return best_lengths(self.chances, rooms, self.worth, self.company, self.most)

    def _shortest_first(self) -> list[int]:
        return sorted(range(len(self.unread)), key=self.unread.__getitem__)

    def _reading(self, tokens: int) -> float:
        return self.worth.reading(self.company, tokens)

    def _seconds_per_token(self, lengths: list[int]) -> float:
        pairs = zip(self.chances, lengths, strict=True)
        right = sum(chance**n for chance, length in pairs for n in range(1, length + 1))
        return self.worth.seconds(self.company, lengths) / (self.company + right)


class Speculator:
    def __init__(
        self, proposer: Proposer, worth: Worth | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.proposer, self.worth, self.clock = proposer, worth or Worth(proposer.typical), clock
        self.steps = self.guessed = self.right = 0  # with guesses; tokens, of all requests
        self._hope = Chance(HOPE, LONG_MEMORY)  # for the next request, from those before
        self._plan: list[int] = []  # tokens to guess of each sequence, as it was chosen last
        self._planned: list[int] = []  # numbers of these sequences

    def guess(self, sequences: list[Sequence], company: int, most: int) -> list[list[int]]:
        """Tokens that may follow in each, `most` at most in all. `company`: sequences that the step serves."""
        trusts = [self._trust(sequence) for sequence in sequences]
        if not sequences or most < 1 or not self.worth.knows(company):
            self._planned = []
            return [[]] * len(sequences)
        # While nobody has come and nothing has been guessed, it stays as it is: to choose takes a while.
        numbers = [sequence.number for sequence in sequences]
        looks = numbers != self._planned or any(trust.idle % LOOK == 1 for trust in trusts)
        if not looks and not any(self._plan):
            return [[]] * len(sequences)
        rooms = [min(MOST_GUESSED, s.most - len(s.generated) - 1) for s in sequences]
        unread = [self._unread(sequence) for sequence in sequences]
        if looks or sum(self._plan) > most:
            self._plan = self._lengths(sequences, trusts, rooms, unread, company, most)
            self._planned = numbers
        lengths = [max(0, min(pair)) for pair in zip(self._plan, rooms, strict=True)]
        if not any(lengths):
            return [[]] * len(sequences)
        wanted = list(zip(sequences, lengths, strict=True))
        begun = self.clock()
        found = self.proposer.guess(wanted)
        read = sum(tokens for tokens, guess in zip(unread, found, strict=True) if guess)
        made = [length if guess else 0 for length, guess in zip(lengths, found, strict=True)]
        self.worth.observe_making(made, read, self.clock() - begun)
        guesses = []
        for (sequence, length), trust, guess in zip(wanted, trusts, found, strict=True):
            possible = guess
            if sequence.grammar and length:
                possible = sequence.grammar.possible(sequence.grammar.forced()[:length] or guess)
            if guess or possible:
                trust.tried()
            if guess and not possible:  # made in vain
                trust.learn(1, 0)
            guesses.append(possible)
        return guesses

    def _unread(self, sequence: Sequence) -> int:
        """Tokens to read beyond those that there are at each guess."""
        tokens = self.proposer.unread(sequence)
        return tokens if tokens > FEW else 0

    def _lengths(
        self, sequences: list[Sequence], trusts: list[Trust], rooms: list[int], unread: list[int], company: int,
        most: int,
    ) -> list[int]:  # fmt: skip
        """How many tokens to guess of each."""
        done = [len(sequence.generated) for sequence in sequences]
        left = [min(s.most - n, max(LIKELY, n)) for s, n in zip(sequences, done, strict=True)]
        choice = Choice(
            self.worth, company, most, [trust.right for trust in trusts], rooms, unread, left,
            max(map(add, done, left)) * self.worth.seconds(company, []),
        )  # fmt: skip
        lengths = choice.known()
        if any(unread):
            lengths = choice.after_reading(lengths)
        idle = [trust.idle >= trust.patience for trust in trusts]
        return lengths if any(lengths) or not any(idle) else choice.trial(idle)

    def _trust(self, sequence: Sequence) -> Trust:
        if sequence.trust is None:
            sequence.trust = Trust(self._hope.right)
        elif not sequence.trust.known:
            sequence.trust.right = self._hope.right
        sequence.trust.idle += 1
        return sequence.trust

    def should_wait(self, sequence: Sequence) -> bool:
        """Whether to let a request's next step wait for its token, so that a guess can go on from there: where that has
        been good for something lately, and else from time to time."""
        trust = sequence.trust
        if trust is None or trust.idle % LOOK == 0:
            return True
        return trust.known and trust.right > EVEN and trust.idle < PATIENCE

    def observe(self, sequences: int, guessed: int, seconds: float, prompts: int = 0) -> None:
        """What a step took, with so many tokens of prompts."""
        self.steps += guessed > 0
        self.worth.observe(sequences, guessed, seconds, prompts)

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
            self._hope.learn(guessed, right)


def best_lengths(chances: list[float], rooms: list[int], worth: Worth, company: int, most: int) -> list[int]:
    """How many tokens to guess of each sequence for the most tokens a second, if each is right with its chance."""
    lengths, best = [0] * len(chances), [0] * len(chances)
    next_chances = [chance if room > 0 else 0.0 for chance, room in zip(chances, rooms, strict=True)]
    expected, rate = float(company), worth.bar(company) * company / worth.seconds(company, lengths)
    for _ in range(min(most, worth.reach(company))):
        i = max(range(len(chances)), key=next_chances.__getitem__)
        if not next_chances[i]:
            break
        lengths[i] += 1
        expected += next_chances[i]
        next_chances[i] = next_chances[i] * chances[i] if lengths[i] < rooms[i] else 0.0
        if expected / worth.seconds(company, lengths) > rate:
            rate, best = expected / worth.seconds(company, lengths), lengths.copy()
    return best

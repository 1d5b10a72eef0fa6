"""Speculative decoding: draft tokens are proposed, and one step verifies several.

A step computes the draft tokens of a sequence behind its last token, and samples a token at each of these positions as
it would without speculation; samples are kept as long as they equal the draft. So the tokens are those that the same
seed gives without speculation, greedy and sampled alike. The cost of draft tokens is learned from the times of steps
(speculation_cost.py), the acceptance rate from the request itself; where speculation does not pay, it stops, and is
tried again from time to time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import add
from typing import Protocol

from tandem.engine.sequence import Sequence
from tandem.engine.speculation_cost import SpeculationCostModel

MAX_DRAFT_TOKENS = 8  # tokens of a request
PRIOR_RATE = 0.7  # acceptance rate before anything is known
SURE = 0.95  # acceptance rate: where not even that would pay, nothing is tried
EVEN = 0.5  # acceptance rate above which the next step waits for the host
BELIEF = 8  # draft tokens that the prior counts as
MEMORY, LONG_MEMORY = 16, 64  # draft tokens in the average: of a request, of all
PATIENCE, MOST_PATIENCE = 32, 512  # tokens without a draft after which a request is tried again
TRIAL = 3  # tokens of such a try
LOOK = 8  # tokens a request gets a step ahead of the host before a draft is tried again
FEW = 16  # tokens that a text grows by between drafts, where there is one at each step
LIKELY = 128  # tokens that an answer still has, if it may; as many again as it had, if those are more
ODDS = 2  # times what reading a text takes must be likely to be saved


class Proposer(Protocol):
    """A source of draft tokens: prompt_lookup.py, draft_model.py."""

    cost_coefficient: float  # time of a draft step by that of a step, until it is measured

    def unread(self, sequence: Sequence) -> int:
        """Tokens that have to be read before the next draft."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """At most so many draft tokens for each sequence."""

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""


class AcceptanceRate:
    """How often a draft token is accepted: the prior, then a running average."""

    def __init__(self, expected: float, memory: int) -> None:
        self.rate, self._seen, self._memory = expected, BELIEF, memory

    def learn(self, drafted: int, accepted: int, weight: int = 1) -> None:
        for hit in [True] * accepted + [False] * (accepted < drafted):
            self._seen = min(self._seen + 1, self._memory)
            self.rate += (hit - self.rate) * min(1.0, weight / self._seen)


class RequestAcceptance(AcceptanceRate):
    """The acceptance rate of a request's drafts, and when to try again."""

    def __init__(self, expected: float) -> None:
        super().__init__(expected, MEMORY)
        self.idle = 0  # tokens since the last draft
        self.patience = PATIENCE
        self.known = False  # from drafts of its own
        self._rejected = 0  # drafts in a row

    def tried(self) -> None:
        if self.idle >= self.patience:
            self.patience = min(2 * self.patience, MOST_PATIENCE)
        self.idle = 0

    def learn(self, drafted: int, accepted: int, weight: int = 1) -> None:
        """The more drafts are rejected in a row, the more each of them counts: the text has become another."""
        self.known = True
        self._rejected = 0 if accepted else self._rejected + 1
        super().learn(drafted, accepted, max(weight, self._rejected - 1))
        if accepted:
            self.patience = PATIENCE


@dataclass
class Choice:
    """What a step may draft. `unread`: tokens of each text that have to be read before; `left`: likely to come."""

    costs: SpeculationCostModel
    batch_size: int  # sequences that the step serves
    most: int  # draft tokens in all
    rates: list[float]
    rooms: list[int]  # draft tokens that each may have
    unread: list[int]
    left: list[int]
    whole: float  # seconds that the longest of the requests takes without speculation

    def known(self) -> list[int]:
        """The best lengths for texts that have been read."""
        return self._best(
            [0 if tokens else room for tokens, room in zip(self.unread, self.rooms, strict=True)]
        )

    def after_reading(self, lengths: list[int]) -> list[int]:
        """Better lengths than these, if reading what they take is likely to pay in what is left."""
        rooms, purse, tokens = self.rooms.copy(), self.costs.purse(self.whole), 0
        for i in self._shortest_first():
            tokens += self.unread[i]
            if self.unread[i] and self._reading(tokens) > purse:
                rooms[i] = 0
        better = self._best(rooms)
        gain = (self._seconds_per_token(lengths) - self._seconds_per_token(better)) * sum(self.left)
        tokens = sum(tokens for tokens, length in zip(self.unread, better, strict=True) if length)
        return better if gain > ODDS * self._reading(tokens) else lengths

    def trial(self, idle: list[bool]) -> list[int]:
        """Short drafts where there has been none for long, if good ones would pay and the account does."""
        lengths, tokens = [0] * len(idle), 0
        if not any(best_lengths([SURE] * len(idle), self.rooms, self.costs, self.batch_size, self.most)):
            return lengths
        plain = self.costs.seconds(self.batch_size, lengths)
        for i in self._shortest_first():
            if idle[i]:
                tokens += self.unread[i]
                lengths[i] = max(0, min(TRIAL, self.rooms[i], self.most - sum(lengths)))
                cost = self.costs.seconds(self.batch_size, lengths) - plain + self._reading(tokens)
                if not self.costs.affords(cost, self.whole):
                    lengths[i] = 0
                    break
        return lengths

    def _best(self, rooms: list[int]) -> list[int]:
        return best_lengths(self.rates, rooms, self.costs, self.batch_size, self.most)

    def _shortest_first(self) -> list[int]:
        return sorted(range(len(self.unread)), key=self.unread.__getitem__)

    def _reading(self, tokens: int) -> float:
        return self.costs.reading(self.batch_size, tokens)

    def _seconds_per_token(self, lengths: list[int]) -> float:
        pairs = zip(self.rates, lengths, strict=True)
        accepted = sum(rate**n for rate, length in pairs for n in range(1, length + 1))
        return self.costs.seconds(self.batch_size, lengths) / (self.batch_size + accepted)


class Speculator:
    def __init__(
        self,
        proposer: Proposer,
        cost_model: SpeculationCostModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.proposer, self.clock = proposer, clock
        self.cost_model = cost_model or SpeculationCostModel(proposer.cost_coefficient)
        self.steps = self.drafted = self.accepted = 0  # steps with drafts; draft tokens, of all requests
        self._prior = AcceptanceRate(PRIOR_RATE, LONG_MEMORY)  # for the next request, from those before
        self._plan: list[int] = []  # draft tokens of each sequence, as it was chosen last
        self._planned: list[int] = []  # numbers of these sequences

    def propose(self, sequences: list[Sequence], batch_size: int, most: int) -> list[list[int]]:
        """Draft tokens for each, `most` at most in all. `batch_size`: sequences that the step serves."""
        acceptances = [self._acceptance(sequence) for sequence in sequences]
        if not sequences or most < 1 or not self.cost_model.knows(batch_size):
            self._planned = []
            return [[]] * len(sequences)
        # While nobody has come and no draft was made, it stays as it is: to choose takes a while.
        numbers = [sequence.number for sequence in sequences]
        looks = numbers != self._planned or any(found.idle % LOOK == 1 for found in acceptances)
        if not looks and not any(self._plan):
            return [[]] * len(sequences)
        rooms = [min(MAX_DRAFT_TOKENS, s.max_tokens - len(s.generated) - 1) for s in sequences]
        unread = [self._unread(sequence) for sequence in sequences]
        if looks or sum(self._plan) > most:
            self._plan = self._lengths(sequences, acceptances, rooms, unread, batch_size, most)
            self._planned = numbers
        lengths = [max(0, min(pair)) for pair in zip(self._plan, rooms, strict=True)]
        if not any(lengths):
            return [[]] * len(sequences)
        wanted = list(zip(sequences, lengths, strict=True))
        begun = self.clock()
        drafts = self.proposer.propose(wanted)
        read = sum(tokens for tokens, draft in zip(unread, drafts, strict=True) if draft)
        made = [length if draft else 0 for length, draft in zip(lengths, drafts, strict=True)]
        self.cost_model.observe_drafting(made, read, self.clock() - begun)
        allowed = []
        for (sequence, length), acceptance, draft in zip(wanted, acceptances, drafts, strict=True):
            possible = draft
            if sequence.constraint and length:
                possible = sequence.constraint.possible(sequence.constraint.forced()[:length] or draft)
            if draft or possible:
                acceptance.tried()
            if draft and not possible:  # made in vain
                acceptance.learn(1, 0)
            allowed.append(possible)
        return allowed

    def _unread(self, sequence: Sequence) -> int:
        """Tokens to read beyond those that there are at each draft."""
        tokens = self.proposer.unread(sequence)
        return tokens if tokens > FEW else 0

    def _lengths(
        self,
        sequences: list[Sequence],
        acceptances: list[RequestAcceptance],
        rooms: list[int],
        unread: list[int],
        batch_size: int,
        most: int,
    ) -> list[int]:
        """The number of draft tokens of each."""
        done = [len(sequence.generated) for sequence in sequences]
        left = [min(s.max_tokens - n, max(LIKELY, n)) for s, n in zip(sequences, done, strict=True)]
        choice = Choice(
            self.cost_model, batch_size, most, [found.rate for found in acceptances], rooms, unread, left,
            max(map(add, done, left)) * self.cost_model.seconds(batch_size, []),
        )  # fmt: skip
        lengths = choice.known()
        if any(unread):
            lengths = choice.after_reading(lengths)
        idle = [found.idle >= found.patience for found in acceptances]
        return lengths if any(lengths) or not any(idle) else choice.trial(idle)

    def _acceptance(self, sequence: Sequence) -> RequestAcceptance:
        if sequence.acceptance is None:
            sequence.acceptance = RequestAcceptance(self._prior.rate)
        elif not sequence.acceptance.known:
            sequence.acceptance.rate = self._prior.rate
        sequence.acceptance.idle += 1
        return sequence.acceptance

    def should_wait(self, sequence: Sequence) -> bool:
        """Whether to let a request's next step wait for its token, so that a draft can go on from there: where that has
        been good for something lately, and else from time to time."""
        found = sequence.acceptance
        if found is None or found.idle % LOOK == 0:
            return True
        return found.known and found.rate > EVEN and found.idle < PATIENCE

    def observe(self, sequences: int, drafted: int, seconds: float, prompts: int = 0) -> None:
        """What a step took, with so many tokens of prompts."""
        self.steps += drafted > 0
        self.cost_model.observe(sequences, drafted, seconds, prompts)

    @property
    def statistics(self) -> dict[str, float]:
        """Of all requests: steps with draft tokens, draft tokens, accepted draft tokens, and the seconds saved,
        by the times of steps without."""
        counts = {"steps": self.steps, "drafted": self.drafted, "accepted": self.accepted}
        return {**counts, "saved_seconds": self.cost_model.saved}

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Of a step that was observed."""
        self.drafted += drafted
        self.accepted += accepted
        self.cost_model.credit(accepted)
        if sequence.acceptance:
            sequence.acceptance.learn(drafted, accepted)
            self._prior.learn(drafted, accepted)


def best_lengths(
    rates: list[float], rooms: list[int], costs: SpeculationCostModel, batch_size: int, most: int
) -> list[int]:
    """The draft lengths that give the most tokens a second, by each sequence's acceptance rate."""
    lengths, best = [0] * len(rates), [0] * len(rates)
    next_rates = [rate if room > 0 else 0.0 for rate, room in zip(rates, rooms, strict=True)]
    expected, speed = (
        float(batch_size),
        costs.bar(batch_size) * batch_size / costs.seconds(batch_size, lengths),
    )
    for _ in range(min(most, costs.reach(batch_size))):
        i = max(range(len(rates)), key=next_rates.__getitem__)
        if not next_rates[i]:
            break
        lengths[i] += 1
        expected += next_rates[i]
        next_rates[i] = next_rates[i] * rates[i] if lengths[i] < rooms[i] else 0.0
        if expected / costs.seconds(batch_size, lengths) > speed:
            speed, best = expected / costs.seconds(batch_size, lengths), lengths.copy()
    return best

"""Speculative decoding: a proposer drafts tokens, and one step of the model verifies them all.

A step computes the draft tokens of a sequence after its last token, and samples a token at each of these positions as
it would without a draft; samples are kept up to the first that differs from the draft. So a seed gives the same tokens
as without speculation, greedy and sampled alike.

In the terms of Leviathan et al. (2023): the draft length gamma of a sequence maximises the expected tokens per second,
given its acceptance rate alpha and the measured times of steps and draft steps (speculation_cost.py). If speculation
does not pay, gamma is 0, and a draft is tried again from time to time, within an exploration budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

from tandem.engine.sampling import Sampled
from tandem.engine.sequence import Sequence
from tandem.engine.speculation_cost import (
    EXPECTED_TOKENS,
    MIN_PREFILL,
    RETRY_TOKENS,
    WINDOW,
    SpeculationCostModel,
)

MAX_DRAFT_TOKENS = 8  # per sequence and step
PRIOR_RATE = 0.7  # acceptance rate assumed before the first draft, and for exploration
HIGH_RATE = 0.9  # for exploration where the prior rate does not pay
REPLAN = 8  # tokens without a draft after which the draft lengths are chosen again


class Proposer(Protocol):
    """A source of draft tokens: prompt_lookup.py, draft_model.py."""

    cost_coefficient: float  # time of a draft step divided by the time of a step, until it is measured
    acceptance_window: int  # verified tokens in the average of a request's acceptance rate

    def uncached(self, sequence: Sequence) -> int:
        """Returns the number of tokens to prefill before the next draft."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Returns draft tokens for each sequence, at most as many as wanted."""

    def forget(self, sequence: Sequence) -> None:
        """Frees the state of a sequence that has ended."""


def accept_draft(sequence: Sequence, sampled: list[Sampled], draft_tokens: Items[int]) -> int:
    """Accepts or rejects draft tokens: appends sampled tokens up to the first that differs from the draft. Returns the
    number of accepted draft tokens."""
    sequence.append(sampled[0])
    accepted = 0
    while (
        accepted < len(draft_tokens)
        and sampled[accepted].id == draft_tokens[accepted]
        and sequence.finish_reason is None
    ):
        accepted += 1
        sequence.append(sampled[accepted])
    return accepted


class AcceptanceRate:
    """The acceptance rate alpha: a running average of accepted (1) and rejected (0) tokens, starting from a prior."""

    def __init__(self, prior: float, window: int = WINDOW) -> None:
        self.rate, self._window = prior, window
        self._seen = WINDOW // 2  # the weight of the prior, in tokens

    def learn(self, drafted: int, accepted: int, weight: int = 1) -> None:
        """Updates the rate. Tokens after the first rejected one do not count: they were not verified."""
        for hit in [1] * accepted + [0] * (accepted < drafted):
            self._seen = min(self._seen + 1, self._window)
            self.rate += (hit - self.rate) * min(1.0, weight / self._seen)


class RequestAcceptance(AcceptanceRate):
    """The acceptance rate of a request, and an exponential back-off for retries."""

    def __init__(self, prior: float, window: int = WINDOW) -> None:
        super().__init__(prior, window)
        self.known = False  # whether the request has had drafts; else the rate is the prior
        self._rejected = 0  # number of consecutive drafts without an accepted token
        self.idle = 0  # tokens since its last draft
        self.retry_after = RETRY_TOKENS  # tokens without a draft; doubles with each retry, up to 16-fold

    def tried(self) -> None:
        """Records that the next step has a draft."""
        if self.idle >= self.retry_after:
            self.retry_after = min(2 * self.retry_after, 16 * RETRY_TOKENS)
        self.idle = 0

    def learn(self, drafted: int, accepted: int, weight: int = 1) -> None:
        """Consecutive rejected drafts have increasing weights, so that the rate falls fast when the text changes."""
        self.known = True
        self._rejected = 0 if accepted else self._rejected + 1
        super().learn(drafted, accepted, max(weight, self._rejected - 1))
        if accepted:
            self.retry_after = RETRY_TOKENS


class Speculator:
    """Chooses the draft lengths of each step, and learns from its time and its accepted tokens."""

    def __init__(
        self,
        proposer: Proposer,
        cost_model: SpeculationCostModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.proposer, self.clock = proposer, clock
        self.cost_model = cost_model or SpeculationCostModel(proposer.cost_coefficient)
        self.steps = self.drafted = self.accepted = 0  # steps with drafts, draft tokens, accepted ones
        window = proposer.acceptance_window
        self._prior = AcceptanceRate(PRIOR_RATE, window)  # rate of all requests: the prior of the next one
        self._lengths: list[int] = []  # the last chosen draft lengths
        self._numbers: list[int] = []  # the numbers of their sequences

    def propose(self, sequences: list[Sequence], batch_size: int, max_tokens: int) -> list[list[int]]:
        """Returns draft tokens for each sequence, `max_tokens` at most in all. `batch_size`: sequences in the step."""
        acceptances = [self._acceptance(sequence) for sequence in sequences]
        if not sequences or max_tokens < 1 or not self.cost_model.is_measured(batch_size):
            self._numbers = []
            return [[]] * len(sequences)
        # Choosing lengths takes tens of microseconds: lengths of 0 are kept for a few tokens.
        numbers = [sequence.request.number for sequence in sequences]
        replan = numbers != self._numbers or any(a.idle % REPLAN == 1 for a in acceptances)
        if not replan and not any(self._lengths):
            return [[]] * len(sequences)
        max_lengths = [
            max(0, min(MAX_DRAFT_TOKENS, s.request.max_tokens - len(s.generated) - 1)) for s in sequences
        ]
        uncached = [self._uncached(sequence) for sequence in sequences]
        if replan or sum(self._lengths) > max_tokens:
            self._lengths = self._draft_lengths(sequences, max_lengths, uncached, batch_size, max_tokens)
            self._numbers = numbers
        lengths = list(map(min, self._lengths, max_lengths))
        if not any(lengths):
            return [[]] * len(sequences)
        begun = self.clock()
        drafts = self.proposer.propose(list(zip(sequences, lengths, strict=True)))
        prefilled = sum(tokens for tokens, draft in zip(uncached, drafts, strict=True) if draft)
        made = [length if draft else 0 for length, draft in zip(lengths, drafts, strict=True)]
        self.cost_model.observe_drafting(made, prefilled, self.clock() - begun)
        for i, (sequence, acceptance) in enumerate(zip(sequences, acceptances, strict=True)):
            draft = drafts[i]
            if sequence.constraint and lengths[i]:
                drafts[i] = sequence.constraint.allowed_prefix(
                    sequence.constraint.forced_tokens()[: lengths[i]] or draft
                )
            if draft or drafts[i]:
                acceptance.tried()
            if draft and not drafts[i]:  # the constraint rejects it
                acceptance.learn(1, 0)
        return drafts

    def should_wait(self, sequence: Sequence) -> bool:
        """Whether the next step of a request waits until the host has its last token and can propose a draft: while
        most of its draft tokens are accepted, and otherwise every few tokens."""
        acceptance = sequence.acceptance
        if acceptance is None or acceptance.idle % REPLAN == 0:
            return True
        return acceptance.known and acceptance.rate > 0.5 and acceptance.idle < RETRY_TOKENS

    def observe(self, batch_size: int, drafted: int, seconds: float, prompts: int = 0) -> None:
        """Records the time of a step with `drafted` draft tokens and `prompts` prompt tokens."""
        self.steps += drafted > 0
        self.cost_model.observe(batch_size, drafted, seconds, prompts)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Records the result of a draft in the step observed last."""
        self.drafted += drafted
        self.accepted += accepted
        self.cost_model.credit(accepted)
        if sequence.acceptance:
            sequence.acceptance.learn(drafted, accepted)
            self._prior.learn(drafted, accepted)

    @property
    def statistics(self) -> dict[str, float]:
        """Totals: steps with drafts, draft tokens, accepted draft tokens, and the estimated seconds saved."""
        counts = {"steps": self.steps, "drafted": self.drafted, "accepted": self.accepted}
        return {**counts, "saved_seconds": self.cost_model.saved}

    def _acceptance(self, sequence: Sequence) -> RequestAcceptance:
        acceptance = sequence.acceptance
        if acceptance is None:
            acceptance = sequence.acceptance = RequestAcceptance(
                self._prior.rate, self.proposer.acceptance_window
            )
        elif not acceptance.known:
            acceptance.rate = self._prior.rate
        acceptance.idle += 1
        return acceptance

    def _uncached(self, sequence: Sequence) -> int:
        tokens = self.proposer.uncached(sequence)
        return tokens if tokens > MIN_PREFILL else 0

    def _draft_lengths(
        self,
        sequences: list[Sequence],
        max_lengths: list[int],
        uncached: list[int],
        batch_size: int,
        max_tokens: int,
    ) -> list[int]:
        """Returns the draft length of each sequence: at most `max_lengths`, after a prefill of `uncached` tokens."""
        costs, acceptances = self.cost_model, [s.acceptance for s in sequences if s.acceptance]
        rates = [acceptance.rate for acceptance in acceptances]

        def best(rates: list[float], max_lengths: list[int]) -> list[int]:
            return best_lengths(rates, max_lengths, costs, batch_size, max_tokens)

        lengths = best(
            rates, [0 if n else max_length for n, max_length in zip(uncached, max_lengths, strict=True)]
        )
        if not any(uncached) and (any(lengths) or all(a.idle < a.retry_after for a in acceptances)):
            return lengths
        done = [len(sequence.generated) for sequence in sequences]
        left = [
            min(s.request.max_tokens - n, max(EXPECTED_TOKENS, n))
            for s, n in zip(sequences, done, strict=True)
        ]
        longest = max(map(sum, zip(done, left, strict=True)))
        request_seconds = longest * costs.seconds(batch_size, [])  # without drafts
        order = sorted(range(len(uncached)), key=uncached.__getitem__)
        if any(uncached):  # let the draft model prefill more sequences if the expected gain is twice the cost
            allowed, tokens = max_lengths.copy(), 0
            for i in order:
                tokens += uncached[i]
                cost = costs.prefill_seconds(batch_size, tokens)
                if uncached[i] and cost > costs.max_cost(request_seconds):
                    allowed[i] = 0
            better = best(rates, allowed)
            tokens = sum(n for n, length in zip(uncached, better, strict=True) if length)
            without, with_prefill = (
                seconds_per_token(rates, each, costs, batch_size) for each in (lengths, better)
            )
            if (without - with_prefill) * sum(left) > 2 * costs.prefill_seconds(batch_size, tokens):
                return better
        if any(lengths):
            return lengths
        # Exploration: retries with the lengths that would be best at the prior rate, or else at a high one, as far as
        # the budget allows. The high one is for batches in which only a high rate pays: else it would never be known.
        retried = [a.idle >= a.retry_after for a in acceptances]
        at_prior_rate = best([PRIOR_RATE if retry else 0.0 for retry in retried], max_lengths)
        if not any(at_prior_rate) and not any(uncached):
            at_prior_rate = best([HIGH_RATE if retry else 0.0 for retry in retried], max_lengths)
        tokens, plain = 0, costs.seconds(batch_size, lengths)
        for i in order:
            if at_prior_rate[i]:
                tokens, lengths[i] = tokens + uncached[i], at_prior_rate[i]
                cost = costs.seconds(batch_size, lengths) - plain + costs.prefill_seconds(batch_size, tokens)
                if not costs.can_explore(cost, request_seconds):
                    lengths[i] = 0
                    break
        return lengths


def seconds_per_token(
    rates: list[float], lengths: list[int], costs: SpeculationCostModel, batch_size: int
) -> float:
    """Returns the seconds of a step divided by its expected tokens: 1 + alpha + ... + alpha^gamma per sequence."""
    accepted = sum(rate**n for rate, gamma in zip(rates, lengths, strict=True) for n in range(1, gamma + 1))
    return costs.seconds(batch_size, lengths) / (batch_size + accepted)


def best_lengths(
    rates: list[float], max_lengths: list[int], costs: SpeculationCostModel, batch_size: int, max_tokens: int
) -> list[int]:
    """Returns the draft lengths with the most expected tokens per second. The n-th token of a draft is accepted with
    probability alpha^n; draft tokens are added in descending order of this probability."""
    lengths, best = [0] * len(rates), [0] * len(rates)
    next_rates = [
        rate if max_length > 0 else 0.0 for rate, max_length in zip(rates, max_lengths, strict=True)
    ]
    expected = float(batch_size)  # tokens of the step
    speed = costs.min_speedup(batch_size) * expected / costs.seconds(batch_size, lengths)
    for _ in range(min(max_tokens, costs.max_estimated(batch_size))):
        likeliest = max(next_rates, default=0.0)
        if not likeliest:
            break
        i = next_rates.index(likeliest)
        lengths[i] += 1
        expected += likeliest
        next_rates[i] = likeliest * rates[i] if lengths[i] < max_lengths[i] else 0.0
        new_speed = expected / costs.seconds(batch_size, lengths)
        if new_speed > speed:
            speed, best = new_speed, lengths.copy()
    return best

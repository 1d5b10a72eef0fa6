"""Speculation never loses much time: a simulated clock with the step times of a real machine."""

from __future__ import annotations

from bisect import bisect_left
from itertools import takewhile
from random import Random
from statistics import median

import pytest

from tandem.engine.draft_head import DraftHead
from tandem.engine.params import SamplingParams
from tandem.engine.sequence import Sampled, Sequence
from tandem.engine.speculation import MAX_DRAFT_TOKENS, Speculator, best_lengths
from tandem.engine.speculation_cost import (
    MAX_EXPLORATION,
    MAX_REGRET,
    MIN_EXPLORATION,
    WINDOW,
    SpeculationCostModel,
)
from tests.engine.simulation import SimulatedEngine

pytestmark = pytest.mark.fast
# Seconds of steps by number of tokens: a 1.5B model on two cores and its 0.5B draft model. Seconds per prefilled token.
STEP = ((1, 0.0325), (4, 0.0345), (6, 0.039), (8, 0.049), (12, 0.070), (16, 0.092), (32, 0.190))
DRAFT_STEP = ((1, 0.0104), (4, 0.013), (8, 0.019), (16, 0.032))
READ, DRAFT_READ = 0.0051, 0.0015


def at(table: tuple[tuple[int, float], ...], tokens: int) -> float:
    i = min(max(1, bisect_left(table, (tokens, 0.0))), len(table) - 1)
    (below, low), (above, high) = table[i - 1], table[i]
    return low + (high - low) * (tokens - below) / (above - below)


class Machine:
    """Serves batches of requests with `tokens` tokens. A draft token is accepted with probability `rate`. With `draft`,
    drafts come from a draft model, else from prompt lookup, which finds one with probability `found`."""

    acceptance_window = WINDOW

    def __init__(self, batch: int, tokens: int, rate: float, *, prompt: int = 45, draft: bool = True) -> None:
        self.batch, self.tokens, self.rate, self.prompt, self.draft = batch, tokens, rate, prompt, draft
        self.cost_coefficient, self.found = (0.4, 1.0) if draft else (0.0, 0.5)
        self.now, self.random, self.texts_prefilled = 0.0, Random(batch + tokens), 0
        self.speculator = Speculator(self, clock=lambda: self.now)
        self.engine = SimulatedEngine(
            windows=(0,), blocks=(9,), context=4096, batch=1, tokens=64, draft_tokens=8
        )
        self._read: dict[Sequence, int] = {}

    def uncached(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - self._read.get(sequence, 0) if self.draft else 0

    def forget(self, sequence: Sequence) -> None:
        self._read.pop(sequence, None)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        if not self.draft:
            return [[1] * count * (self.random.random() < self.found) for _, count in wanted]
        for sequence, count in wanted:
            if count:
                self.texts_prefilled += sequence not in self._read
                self.now += DRAFT_READ * (self.uncached(sequence) - 1)
                self._read[sequence] = len(sequence.tokens)
        for n in range(max(count for _, count in wanted)):
            self.now += at(DRAFT_STEP, sum(count > n for _, count in wanted))
        return [[1] * count for _, count in wanted]

    def slower(self) -> float:
        """Serves a batch of requests; returns its time divided by that without speculation."""
        running = [
            self.engine.new_sequence([1] * self.prompt, SamplingParams(max_tokens=self.tokens))
            for _ in range(self.batch)
        ]
        prompts = self.batch * self.prompt
        self.speculator.observe(0, 0, READ * prompts, prompts)
        for sequence in running:
            sequence.append(Sampled(1))
        begun = self.now
        while running:
            running = self._step(running)
        return (self.now - begun) / (at(STEP, self.batch) * (self.tokens - 1))

    def _step(self, running: list[Sequence]) -> list[Sequence]:
        begun = self.now
        drafts = self.speculator.propose(running, len(running), 16 + self.batch - len(running))
        drafted = sum(map(len, drafts))
        delay = 1.5 if self.random.random() < 0.02 else 1.0
        self.now += at(STEP, len(running) + drafted) * delay * self.random.gauss(0.99, 0.03)
        self.speculator.observe(len(running), drafted, self.now - begun)
        for sequence, draft in zip(running, drafts, strict=True):
            accepted = len(list(takewhile(lambda _: self.random.random() < self.rate, draft)))
            if draft:
                self.speculator.learn(sequence, len(draft), accepted)
            for _ in range(1 + accepted):
                if not sequence.finish_reason:
                    sequence.append(Sampled(1))
            if sequence.finish_reason:
                self.forget(sequence)
        return [sequence for sequence in running if not sequence.finish_reason]


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_requests_are_never_much_slower(batch: int, rate: float, draft: bool) -> None:
    for prompt, tokens in (45, 64), (45, 96), (400, 96):
        machine = Machine(batch, tokens, rate, prompt=prompt, draft=draft)
        times = [machine.slower() for _ in range(6)]
        assert median(times) < 1.03, (prompt, tokens, times)
        assert sum(times) / len(times) < 1.03, (prompt, tokens, times)
        assert max(times) < 1.07, "also the request with the first draft"


@pytest.mark.parametrize(("rate", "gain"), [(0.75, 1.15), (0.9, 1.35)])
def test_a_draft_model_pays_with_batches_of_one(rate: float, gain: float) -> None:
    machine = Machine(1, 96, rate)
    times = [machine.slower() for _ in range(6)]
    assert median(times) < 1 / gain
    assert machine.texts_prefilled >= 5, "of the first or the second request"


class HeadMachine(Machine):
    """Drafts come from a draft head, whose steps take `share` of a step."""

    acceptance_window = DraftHead.acceptance_window

    def __init__(self, batch: int, tokens: int, rate: float, share: float) -> None:
        super().__init__(batch, tokens, rate)
        self.share, self.cost_coefficient = share, 0.1
        self.speculator = Speculator(self, clock=lambda: self.now)

    def uncached(self, sequence: Sequence) -> int:
        return 0

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        for n in range(max(count for _, count in wanted)):
            self.now += self.share * at(STEP, sum(count > n for _, count in wanted))
        return [[1] * count for _, count in wanted]


def said_speedup(batch: int, rate: float, share: float) -> float:
    """By a cost model that has measured every number of draft tokens."""
    costs = SpeculationCostModel(share)
    for drafted in sorted([*range(17)] * 16):
        count, drafting = min(batch, drafted), 0.0
        if count:
            drafting = share * at(STEP, count)
            costs.observe_drafting([1] * count, 0, drafting)
        costs.observe(batch, drafted, drafting + at(STEP, batch + drafted))
    lengths = best_lengths([rate] * batch, [MAX_DRAFT_TOKENS] * batch, costs, batch, 16)
    accepted = sum(rate**n for length in lengths for n in range(1, length + 1))
    return (1 + accepted / batch) * costs.seconds(batch, []) / costs.seconds(batch, lengths)


@pytest.mark.parametrize("rate", [0.5, 0.6, 0.7, 0.8, 0.9])
@pytest.mark.parametrize(
    ("batch", "share"), [(1, 0.07), (2, 0.07), (4, 0.07), (8, 0.07), (1, 0.15), (2, 0.15), (8, 0.15)]
)
def test_a_draft_head_gains_what_the_cost_model_says(batch: int, share: float, rate: float) -> None:
    """At an acceptance rate that is set by construction; where it does not pay, nothing is lost."""
    machine = HeadMachine(batch, 600, rate, share)
    machine.slower()
    gained, said = 1 / median(machine.slower() for _ in range(5)), said_speedup(batch, rate, share)
    assert gained == pytest.approx(said, rel=0.1)
    assert gained > 0.98
    if batch == 1 and rate >= 0.7:
        assert said > 1.6


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_texts_are_not_prefilled_if_that_cannot_pay(rate: float) -> None:
    """With a batch of four, verifying a draft token of each adds half of a step, and drafting them a third."""
    machine = Machine(4, 96, rate)
    for _ in range(10):
        machine.slower()
    assert machine.texts_prefilled <= 1
    machine = Machine(1, 24, rate, prompt=800)  # a short answer to a long prompt
    for _ in range(10):
        machine.slower()
    assert machine.texts_prefilled == 0


class Unmet:
    """A constraint that no draft meets."""

    ended = False

    def forced_tokens(self) -> list[int]:
        return []

    def allowed_prefix(self, draft: list[int]) -> list[int]:
        return []

    def accept(self, token: int) -> bool:
        return True


def test_drafts_that_a_constraint_rejects_are_given_up() -> None:
    """Drafting takes time, but no step verifies the drafts."""
    machine = Machine(1, 256, 0.9)
    new_sequence = machine.engine.new_sequence
    machine.slower()
    before = machine.speculator.cost_model.seconds(1, [])
    machine.engine.new_sequence = lambda prompt, params: new_sequence(prompt, params, constraint=Unmet())  # type: ignore[method-assign, assignment, arg-type, misc]
    times = [machine.slower() for _ in range(6)]
    assert max(times) < 1.07 and sum(times) / len(times) < 1.05, times
    assert machine.speculator.cost_model.seconds(1, []) < 1.1 * before, (
        "the time of steps without drafts is unchanged"
    )


def test_missing_drafts_do_not_change_the_costs() -> None:
    """For example of a text that is longer than the draft model's context."""
    machine = Machine(1, 96, 0.9)
    for _ in range(3):
        machine.slower()
    costs = machine.speculator.cost_model
    before, expected = costs.prefill_seconds(1, 1000), costs.seconds(1, [4])
    machine.propose = lambda wanted: [[] for _ in wanted]  # type: ignore[method-assign]
    machine._read.clear()
    machine.slower()
    assert costs.prefill_seconds(1, 1000) == before
    assert costs.seconds(1, [4]) == pytest.approx(expected, rel=0.1)


def test_lengths_are_not_reused_for_other_sequences() -> None:
    """If layers are split over devices, parts of a batch alternate."""
    machine = Machine(1, 96, 0.9)
    machine.slower()
    good, bad = (machine.engine.new_sequence([1] * 45, SamplingParams(max_tokens=96)) for _ in range(2))
    for sequence, accepted in ((good, True), (bad, False)):
        machine.speculator.propose([sequence], 1, 16)
        for _ in range(20):
            machine.speculator.learn(sequence, 1, accepted)
    for _ in range(2):
        assert machine.speculator.propose([good], 1, 16) != [[]]
        assert machine.speculator.propose([bad], 1, 16) == [[]]


def test_exploration_becomes_rarer_while_it_loses_time() -> None:
    machine = Machine(1, 256, 0.05)
    for _ in range(10):
        machine.slower()
    early = machine.texts_prefilled
    for _ in range(20):
        machine.slower()
    assert early > 0 and machine.texts_prefilled - early <= early
    assert machine.speculator.cost_model._fraction < MAX_EXPLORATION


def test_exploration_needs_a_budget() -> None:
    costs = SpeculationCostModel()
    costs.observe(1, 0, 1.0)
    assert not costs.can_explore(0.1, request_seconds=100.0), "the budget is empty"
    for _ in range(9):
        costs.observe(1, 0, 1.0)
    assert costs.can_explore(0.1, request_seconds=100.0)
    assert not costs.can_explore(0.1, request_seconds=0.1 / MAX_REGRET - 0.01), (
        "too much for so short a request"
    )
    assert costs.max_cost(100.0) == pytest.approx(costs.budget + 4.0)
    for _ in range(9):  # drafts that are all rejected
        costs.observe(1, 1, 1.5)
        costs.credit(0)
    before = costs.budget
    costs.observe(1, 0, 1.0)
    assert costs.budget - before == pytest.approx(MIN_EXPLORATION)
    for _ in range(9):
        costs.observe(1, 1, 1.5)
        costs.credit(1)
    before = costs.budget
    costs.observe(1, 0, 1.0)
    assert costs.budget - before == pytest.approx(MAX_EXPLORATION)


def test_drafting_verifying_and_prefill_are_measured_apart() -> None:
    costs = SpeculationCostModel(0.5)
    costs.observe(0, 0, 4.0, prompts=40)
    costs.observe(2, 0, 1.0)
    assert costs.prefill_seconds(2, 10) == pytest.approx(0.5), "half of the model's own prefill"
    assert costs.seconds(2, [1, 1]) == pytest.approx(1.0 + 2 * 0.05 + 0.5), "until it is measured"
    for _ in range(40):
        costs.observe_drafting([2, 1], 0, 0.4)
        costs.observe(2, 3, 1.7)
        costs.observe_drafting([1, 1], 20, 1.2)
        costs.observe(2, 2, 2.4)
        costs.observe(2, 0, 1.0)
    assert costs.seconds(2, [2, 1]) == pytest.approx(1.0 + 0.3 + 0.4, abs=0.01)
    assert costs.prefill_seconds(2, 20) == pytest.approx(1.2 - 0.2, abs=0.01)
    assert costs.seconds(2, [1, 1]) == pytest.approx(1.0 + 0.2 + 0.2, abs=0.01)


def test_a_faster_machine_does_not_count_as_saved_time() -> None:
    """Other processes used its cores only while steps without drafts were measured."""
    costs = SpeculationCostModel()
    for _ in range(9):
        costs.observe(4, 0, 2.0)
    for _ in range(20):
        costs.observe(4, 2, 1.1)
        costs.credit(0)
    assert costs.seconds(4, []) < 1.101 and costs.saved <= 0

"""Speculation pays or stops: requests by the clock of a simulated machine, whose times are those of a real one."""

from __future__ import annotations

from bisect import bisect_left
from itertools import takewhile
from random import Random
from statistics import median

import pytest

from tandem.engine.params import SamplingParams
from tandem.engine.sequence import Sampled, Sequence
from tandem.engine.speculation import Speculator
from tandem.engine.speculation_cost import ALLOWANCE, DEBT, LEAST_ALLOWANCE, SURELY, SpeculationCostModel
from tests.engine.simulation import SimulatedEngine

pytestmark = pytest.mark.fast
# Seconds of steps by their tokens: a 1.5B model on two cores, its draft model of 0.5B, and both reading prompts.
STEP = ((1, 0.0325), (4, 0.0345), (6, 0.039), (8, 0.049), (12, 0.070), (16, 0.092), (32, 0.190))
DRAFT_STEP = ((1, 0.0104), (4, 0.013), (8, 0.019), (16, 0.032))
READ, DRAFT_READ = 0.0051, 0.0015


def at(table: tuple[tuple[int, float], ...], tokens: int) -> float:
    i = min(max(1, bisect_left(table, (tokens, 0.0))), len(table) - 1)
    (below, low), (above, high) = table[i - 1], table[i]
    return low + (high - low) * (tokens - below) / (above - below)


class Machine:
    """Requests of `tokens` each, `batch` at a time. A draft token is accepted with probability `rate`; without `draft`,
    drafts come from prompt lookup, and are found with probability `found`."""

    def __init__(self, batch: int, tokens: int, rate: float, *, prompt: int = 45, draft: bool = True) -> None:
        self.batch, self.tokens, self.rate, self.prompt, self.draft = batch, tokens, rate, prompt, draft
        self.cost_coefficient, self.found = (0.4, 1.0) if draft else (0.0, 0.5)
        self.now, self.random, self.texts_read = 0.0, Random(batch + tokens), 0
        self.speculator = Speculator(self, clock=lambda: self.now)
        self.engine = SimulatedEngine(
            windows=(0,), blocks=(9,), context=4096, batch=1, tokens=64, draft_tokens=8
        )
        self._read: dict[Sequence, int] = {}

    def unread(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - self._read.get(sequence, 0) if self.draft else 0

    def forget(self, sequence: Sequence) -> None:
        self._read.pop(sequence, None)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        if not self.draft:
            return [[1] * count * (self.random.random() < self.found) for _, count in wanted]
        for sequence, count in wanted:
            if count:
                self.texts_read += sequence not in self._read
                self.now += DRAFT_READ * (self.unread(sequence) - 1)
                self._read[sequence] = len(sequence.tokens)
        for n in range(max(count for _, count in wanted)):
            self.now += at(DRAFT_STEP, sum(count > n for _, count in wanted))
        return [[1] * count for _, count in wanted]

    def slower(self) -> float:
        """Serves a batch of requests; times that it takes of what it would without drafts."""
        running = [
            self.engine.prepare([1] * self.prompt, SamplingParams(max_tokens=self.tokens))
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
        held_up = 1.5 if self.random.random() < 0.02 else 1.0
        self.now += at(STEP, len(running) + drafted) * held_up * self.random.gauss(0.99, 0.03)
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
        assert max(times) < 1.07, "not even the one in which it was tried"


@pytest.mark.parametrize(("rate", "gain"), [(0.75, 1.15), (0.9, 1.35)])
def test_a_draft_model_pays_for_one_at_a_time(rate: float, gain: float) -> None:
    machine = Machine(1, 96, rate)
    times = [machine.slower() for _ in range(6)]
    assert median(times) < 1 / gain
    assert machine.texts_read >= 5, "also the first or the second time"


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_texts_are_not_read_where_that_cannot_pay(rate: float) -> None:
    """Of four, a step with a draft token of each takes half as long again, and drafting them a third."""
    machine = Machine(4, 96, rate)
    for _ in range(10):
        machine.slower()
    assert machine.texts_read <= 1
    machine = Machine(1, 24, rate, prompt=800)  # an answer that is short beside its prompt
    for _ in range(10):
        machine.slower()
    assert machine.texts_read == 0


class Other:
    """A constraint that no draft meets."""

    ended = False

    def forced(self) -> list[int]:
        return []

    def possible(self, draft: list[int]) -> list[int]:
        return []

    def accept(self, token: int) -> bool:
        return True


def test_drafts_that_the_constraint_rejects_are_given_up() -> None:
    """Each takes its time to make, and no step shows that it was rejected."""
    machine = Machine(1, 256, 0.9)
    prepare = machine.engine.prepare
    machine.slower()
    before = machine.speculator.cost_model.seconds(1, [])
    machine.engine.prepare = lambda prompt, params: prepare(prompt, params, constraint=Other())  # type: ignore[method-assign, assignment, arg-type, misc]
    times = [machine.slower() for _ in range(6)]
    assert max(times) < 1.07 and sum(times) / len(times) < 1.05, times
    assert machine.speculator.cost_model.seconds(1, []) < 1.1 * before, "steps do not take longer for that"


def test_a_text_that_cannot_be_read_says_nothing_of_others() -> None:
    """One that is longer than the draft model's context, say."""
    machine = Machine(1, 96, 0.9)
    for _ in range(3):
        machine.slower()
    costs = machine.speculator.cost_model
    before, making = costs.reading(1, 1000), costs.seconds(1, [4])
    machine.propose = lambda wanted: [[] for _ in wanted]  # type: ignore[method-assign]
    machine._read.clear()
    machine.slower()
    assert costs.reading(1, 1000) == before and costs.seconds(1, [4]) == pytest.approx(making, rel=0.1)


def test_what_was_chosen_for_one_is_not_taken_for_another() -> None:
    """Parts of a batch take turns where layers are split over devices."""
    machine = Machine(1, 96, 0.9)
    machine.slower()
    good, bad = (machine.engine.prepare([1] * 45, SamplingParams(max_tokens=96)) for _ in range(2))
    for sequence, accepted in ((good, True), (bad, False)):
        machine.speculator.propose([sequence], 1, 16)
        for _ in range(20):
            machine.speculator.learn(sequence, 1, accepted)
    for _ in range(2):
        assert machine.speculator.propose([good], 1, 16) != [[]]
        assert machine.speculator.propose([bad], 1, 16) == [[]]


def test_tries_become_rarer_while_they_are_in_vain() -> None:
    machine = Machine(1, 256, 0.05)
    for _ in range(10):
        machine.slower()
    early = machine.texts_read
    for _ in range(20):
        machine.slower()
    assert early > 0 and machine.texts_read - early <= early
    assert machine.speculator.cost_model._allowance < ALLOWANCE


def test_a_try_is_paid_for_in_advance() -> None:
    costs = SpeculationCostModel()
    costs.observe(1, 0, 1.0)
    assert not costs.affords(0.1, whole=100.0), "nothing has been put aside"
    for _ in range(9):
        costs.observe(1, 0, 1.0)
    assert costs.affords(0.1, whole=100.0)
    assert not costs.affords(0.1, whole=0.1 / DEBT - 0.01), "too much for so short a request"
    assert costs.purse(100.0) == pytest.approx(costs.account + 4.0)
    for _ in range(9):  # drafts that are all rejected
        costs.observe(1, 1, 1.5)
        costs.credit(0)
    before = costs.account
    costs.observe(1, 0, 1.0)
    assert costs.account - before == pytest.approx(LEAST_ALLOWANCE)
    for _ in range(9):
        costs.observe(1, 1, 1.5)
        costs.credit(1)
    before = costs.account
    costs.observe(1, 0, 1.0)
    assert costs.account - before == pytest.approx(ALLOWANCE)


def test_costs_of_drafting_verifying_and_reading_are_told_apart() -> None:
    costs = SpeculationCostModel(0.5)
    costs.observe(0, 0, 4.0, prompts=40)
    costs.observe(2, 0, 1.0)
    assert costs.reading(2, 10) == pytest.approx(0.5), "half of what the model itself takes to read"
    assert costs.seconds(2, [1, 1]) == pytest.approx(1.0 + 2 * 0.05 + 0.5), "until it is known"
    for _ in range(40):
        costs.observe_drafting([2, 1], 0, 0.4)
        costs.observe(2, 3, 1.7)
        costs.observe_drafting([1, 1], 20, 1.2)
        costs.observe(2, 2, 2.4)
        costs.observe(2, 0, 1.0)
    assert costs.seconds(2, [2, 1]) == pytest.approx(1.0 + 0.3 + 0.4, abs=0.01)
    assert costs.reading(2, 20) == pytest.approx(1.2 - 0.2, abs=0.01)
    assert costs.seconds(2, [1, 1]) == pytest.approx(1.0 + 0.2 + 0.2, abs=0.01)


def test_a_machine_that_becomes_faster_is_not_taken_for_accepted_drafts() -> None:
    """Others were on its cores when steps without drafts were measured, and are gone."""
    costs = SpeculationCostModel()
    for _ in range(9):
        costs.observe(4, 0, 2.0)
    for _ in range(20):
        costs.observe(4, 2, 1.1)
        costs.credit(0)
    assert SURELY * costs.seconds(4, []) < 1.101 and costs.saved <= 0

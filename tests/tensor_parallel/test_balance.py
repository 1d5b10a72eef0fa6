"""Shares follow measured times, with devices that are a formula."""

from __future__ import annotations

import pytest

from tandem.devices.tensor_parallel import balance as module
from tandem.devices.tensor_parallel.balance import Balance, Fixed, fit
from tandem.devices.tensor_parallel.cut import Gemm, gemms
from tests.program.programs import golden

pytestmark = pytest.mark.fast
TOKENS, BOTH = 64, (True, True)


class Machine:
    """Two devices with their seconds per row, and the rest of a step."""

    def __init__(self, *, overlaps_steps: bool = False) -> None:
        self.each, self.dispatch, self.rest = [1e-5, 1e-5], [1e-5, 1e-5], 0.005
        self.gemms = [work for work in gemms(golden("gemma3-pattern3")) if isinstance(work, Gemm)]
        self.balance = Balance([(gemm, BOTH) for gemm in self.gemms], overlaps_steps=overlaps_steps)
        self.kinds: list[str] = []

    def seconds(self, gemm: Gemm, worker: int, units: int) -> float:
        return self.dispatch[worker] + self.each[worker] * units / gemm.units * gemm.rows if units else 0.0

    def step(self) -> None:
        kind = self.balance.next()
        self.kinds.append(kind)
        if kind == "measure":
            self.balance.measure(self.seconds, TOKENS)
            kind = "together" if self.balance.on else "off"
        alone = sum(self.seconds(gemm, 0, gemm.units) for gemm in self.gemms)
        if kind == "alone":
            self.balance.observe_step(TOKENS, alone + self.rest, 0.0, together=False)
        if kind != "together":
            return
        total = self.rest
        for gemm in self.gemms:
            cut = self.balance.division(gemm, BOTH)
            times = [self.seconds(gemm, worker, n) for worker, n in enumerate(cut)]
            for worker, n in enumerate(cut):
                if n:
                    self.balance.observe(gemm, BOTH, worker, n, times[worker])
            total += max(times)
        self.balance.observe_step(TOKENS, total, self.rest, together=True)

    @property
    def fraction(self) -> float:
        """The accelerator's fraction of the largest matmul."""
        gemm = max(self.gemms, key=lambda gemm: gemm.rows)
        return self.balance.division(gemm, BOTH)[1] / gemm.units

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


def test_fractions_follow_the_rates() -> None:
    machine = Machine()
    machine.run(5)
    assert machine.kinds == ["alone"] * 3 + ["measure", "together"] and machine.balance.on
    assert machine.fraction == pytest.approx(0.5, abs=0.05)
    machine.each[1] = 3e-5  # slowed down
    machine.run(2 * module.REBALANCE_STEPS)
    assert machine.fraction == pytest.approx(0.25, abs=0.05) and machine.balance.on
    machine.each = [3e-5, 1e-5]  # and the other one
    machine.run(2 * module.REBALANCE_STEPS)
    assert machine.fraction == pytest.approx(0.75, abs=0.05)


def test_off_when_it_does_not_pay_and_on_again() -> None:
    machine = Machine()
    machine.run(6)
    assert machine.balance.on
    machine.each[1] = 1e-2
    machine.run(2)  # steps that take so long are not waited for
    assert machine.balance.on is False
    machine.kinds.clear()
    machine.each[1] = 1e-5
    machine.run(module.RETRY + 5)
    tried = machine.kinds.index("alone")
    assert set(machine.kinds[:tried]) == {"off"} and tried >= module.RETRY - 2
    assert machine.kinds[tried + 3 : tried + 5] == ["measure", "together"] and machine.balance.on


def test_less_than_five_percent_is_not_worth_it() -> None:
    machine = Machine()
    machine.rest = 20 * sum(machine.seconds(gemm, 0, gemm.units) for gemm in machine.gemms)
    machine.run(6)
    assert machine.balance.on is False and machine.kinds[-1] == "off"


def test_a_prediction_that_does_not_come_true() -> None:
    """Devices that slow each other down, as those with one memory do."""
    machine = Machine()
    machine.run(5)
    alone = machine.balance.alone
    for _ in range(3 * module.REBALANCE_STEPS):
        machine.balance.observe_step(TOKENS, 0.99 * alone * TOKENS, machine.rest, together=True)
    assert machine.balance.on is False


def test_small_changes_record_nothing_anew() -> None:
    machine = Machine()
    machine.run(5)
    cuts = dict(machine.balance.cuts)
    machine.each[1] *= 1.02
    machine.run(3 * module.REBALANCE_STEPS)
    assert machine.balance.cuts == cuts and machine.balance.reviews >= 2


def test_beside_another_step_the_helper_takes_more() -> None:
    """The main device has the rest of the other step to do meanwhile."""
    fractions = []
    for overlaps_steps in (False, True):
        machine = Machine(overlaps_steps=overlaps_steps)
        machine.rest = 0.01
        machine.run(5 + module.REBALANCE_STEPS)
        fractions.append(machine.fraction)
    assert fractions[1] > fractions[0] + 0.05


def test_the_main_device_is_timed_alone_now_and_then() -> None:
    machine = Machine()
    machine.run(2 * module.REFRESH + 5)
    assert machine.kinds.count("alone") == 3 + 2


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("half", [False, True])
def test_times_that_other_work_made_long_are_forgotten(worker: int, half: bool) -> None:
    """Only while devices are timed: fractions are soon those of the times that follow."""
    machine, times = Machine(), iter(range(100))
    seconds = machine.seconds
    while machine.balance.next() == "alone":
        alone = sum(seconds(gemm, 0, gemm.units) for gemm in machine.gemms)
        machine.balance.observe_step(TOKENS, alone + machine.rest, 0.0, together=False)

    def disturbed(gemm: Gemm, who: int, units: int) -> float:
        long = next(times) % 3 and who == worker and (units < gemm.units) == half
        return seconds(gemm, who, units) * (1.9 if long else 1.0)

    machine.balance.measure(disturbed, TOKENS)
    machine.run(5 * module.REBALANCE_STEPS)
    assert machine.balance.on and machine.fraction == pytest.approx(0.5, abs=0.05)


def test_lines() -> None:
    line = fit(4, 3.0, 8, 5.0)
    assert (line.fixed, line.per_unit) == (1.0, 0.5) and line(2) == 2.0
    line.observe(4, 5.0)
    assert (line.fixed, line.per_unit) == (1.0, 1.0)
    line.observe(4, 0.8)
    assert (line.fixed, line.per_unit) == (0.4, 0.1)
    assert fit(1, 2.0, 1, 2.0).per_unit == 2.0


def test_fixed_fractions_use_all_units() -> None:
    works = [work for work in gemms(golden("llama")) if isinstance(work, Gemm)]
    for fractions in ((1,), (1, 1, 1), (0, 1), (70, 30)):
        fixed, all_of_them = Fixed(fractions), (True,) * len(fractions)
        assert all(sum(fixed.division(gemm, all_of_them)) == gemm.units for gemm in works)
        only_one = (True, *[False] * (len(fractions) - 1))
        assert all(fixed.division(gemm, only_one)[0] == gemm.units for gemm in works)


def test_each_matmul_is_divided_among_those_that_may() -> None:
    """Three devices of equal speed, of which the third, as an NPU, may take every other matmul."""
    works = [work for work in gemms(golden("gemma3-pattern3")) if isinstance(work, Gemm)]
    eligible = [(True, True, i % 2 == 0) for i in range(len(works))]
    balance = Balance(list(zip(works, eligible, strict=True)))
    while balance.next() == "alone":
        balance.observe_step(TOKENS, sum(gemm.rows for gemm in works) * 1e-5, 0.0, together=False)
    balance.measure(lambda gemm, worker, units: 1e-5 * units / gemm.units * gemm.rows, TOKENS)
    assert balance.on
    for gemm, may in zip(works, eligible, strict=True):
        cut = balance.division(gemm, may)
        assert sum(cut) == gemm.units and bool(cut[2]) == (may[2] and gemm.units > 2) and cut[1]
    never = (True, False, False)
    assert balance.division(works[0], never) == (works[0].units, 0, 0)

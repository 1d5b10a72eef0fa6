"""Of 500 plans with one descriptor, lock or depth changed, the checks or the emulator catch all that matter."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tandem.devices.npu.array import Descriptor, Write
from tandem.devices.npu.constraints import check
from tandem.devices.npu.emulator import emulate
from tandem.devices.npu.plan import GemmPlan, plan_gemm
from tandem.devices.npu.tiling import Tiling
from tandem.errors import EmulationError, LimitError
from tests.npu.mutations import mutate
from tests.npu.test_emulator import inputs

MUTANTS = 500
# Rows, columns and depth of tiles: more blocks than are in flight; iterations; odd and even turns of the rings.
BASES = [
    plan_gemm(160, 64, 16, tiling=Tiling(8, 16, 16, 5, 1, 1)),
    plan_gemm(32, 128, 48, "int8", shift=6, tiling=Tiling(8, 16, 16, 1, 2, 3)),
    plan_gemm(64, 128, 32, tiling=Tiling(8, 16, 16, 2, 2, 2)),
    plan_gemm(64, 128, 48, tiling=Tiling(8, 16, 16, 2, 2, 3, c_objects=1)),
    plan_gemm(64, 64, 64, "int16", weights="int4", shift=3, tiling=Tiling(8, 32, 16, 2, 1, 2)),
]


def same_addresses(plan: GemmPlan) -> GemmPlan:
    """The plan with what no address depends on put to one value: a step that is never taken (of one iteration, or
    after the last run) and dimensions of one."""

    def plain(d: Descriptor, runs: int) -> Descriptor:
        real = [(size, stride) for size, stride in zip(d.sizes, d.strides, strict=True) if size > 1]
        sizes, strides = tuple(size for size, _ in real), tuple(stride for _, stride in real)
        iterations = min(d.iterations, runs)
        step = d.step if iterations > 1 else 0
        return replace(d, sizes=sizes, strides=strides, iterations=iterations, step=step)

    columns = plan.tiling.columns
    sequence = tuple(
        Write(plain(c.descriptor, columns)) if isinstance(c, Write) else c for c in plan.sequence
    )
    return replace(plan, sequence=sequence, descriptors=tuple(plain(d, 64) for d in plan.descriptors))


def test_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    rng, outcome = random.Random(0), Counter[str]()
    wanted = [emulate(plan, *inputs(plan)) for plan in BASES]
    for i in range(MUTANTS):
        plan, want = BASES[i % len(BASES)], wanted[i % len(BASES)]
        kind, mutant = mutate(plan, rng)
        try:
            check(mutant)
            same = all(
                np.array_equal(emulate(mutant, *inputs(plan), order), want)
                for order in ("upstream", "downstream")
            )
        except LimitError:
            outcome["refused by the checks"] += 1
        except EmulationError:
            outcome["stopped by the emulator"] += 1
        else:
            outcome["another result in the emulator" if not same else "no change"] += 1
            if same:  # must be the same plan in other words, not luck
                assert same_addresses(mutant) == same_addresses(plan), kind
    with capsys.disabled():
        print(
            "\nNPU plans (emulated; not yet run on a Phoenix):",
            ", ".join(f"{n} {what}" for what, n in sorted(outcome.items())),
        )
    assert outcome.total() == MUTANTS
    assert outcome["no change"] < MUTANTS // 10

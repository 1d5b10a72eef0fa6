"""The sum that decides: fractions of one matmul, and whole steps by published rates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from tandem.devices.tensor_parallel.balance import LinearCost
from tandem.devices.tensor_parallel.cost import Rates, divide, gain, place_attention, place_columns
from tandem.kernels.kernel import Cost
from tests.program.programs import build, formats_of, real_config

pytestmark = pytest.mark.fast

# A Phoenix by published figures: the iGPU with a good shader, the NPU in int8 with int32 results, and their memory.
IGPU = Rates(ops=8e12, bandwidth=80e9, dispatch=10e-6)
NPU = Rates(ops=4.57e12, bandwidth=15e9, dispatch=170e-6, weights=8 / 4.5)
MEMORY = 80e9


def test_a_partition_takes_its_dispatch_and_the_slower_of_arithmetic_and_memory() -> None:
    rates = Rates(ops=100.0, bandwidth=10.0, dispatch=1.0)
    assert rates.seconds(Cost(bytes=20, ops=50)) == 3.0
    assert rates.seconds(Cost(bytes=20, ops=500)) == 6.0
    assert gain(4.0, 3.0) == 0.25


@pytest.mark.parametrize("seed", range(40))
def test_no_other_division_is_faster(seed: int) -> None:
    rng = np.random.default_rng(seed)
    units, devices = int(rng.integers(1, 24)), int(rng.integers(1, 4))
    dispatch, each = rng.uniform(0, 3, devices), rng.uniform(0.05, 2, devices)
    common = float(rng.uniform(0, 2))

    def together(fractions: Sequence[int]) -> float:
        return common * sum(n > 0 for n in fractions)

    workers = [LinearCost(*line) for line in zip(dispatch, each, strict=True)]
    found = divide(units, workers, together)
    best = min(
        max(
            common * sum(n > 0 for n in counts),
            *(dispatch[i] + each[i] * n for i, n in enumerate(counts) if n),
        )
        for counts in product(range(units + 1), repeat=devices)
        if sum(counts) == units
    )
    assert sum(found.units) == units and found.seconds == pytest.approx(best)


def test_who_does_not_help_gets_nothing() -> None:
    assert divide(10, [lambda n: n, lambda n: 100 + n]).units == (10, 0)
    assert divide(
        10,
        [lambda n: n, lambda n: n],
        lambda fractions: 6.0 * sum(map(bool, fractions)),
        # One memory.
    ).units == (10, 0)
    assert divide(10, [lambda n: 100.0 * n, lambda n: n]).units == (0, 10)


def test_a_prompt_gains_and_decoding_does_not() -> None:
    """Gemma 3 27B on a Phoenix, by the issue's figures."""
    config = real_config("Gemma 3 27B")
    program = build(config, formats_of(config, mixed=False), tokens=512, rows=1)
    prompt = place_columns(program, {"tokens": 512, "rows": 1, "work": 512}, [IGPU, NPU], MEMORY, keys=256)
    decode = place_columns(program, {"tokens": 1, "rows": 1, "work": 1}, [IGPU, NPU], MEMORY, keys=512)
    assert prompt.pays and 1.35 < prompt.alone / prompt.together < 1.6
    assert not decode.pays
    divided = [placed for placed in prompt.launches if placed.fractions[1]]
    assert len(divided) == 4 * 62 and all(0.2 < placed.fractions[1] < 0.45 for placed in divided)


def test_attention_alone_on_the_npu_loses() -> None:
    config = real_config("Gemma 3 27B")
    program = build(config, formats_of(config, mixed=False), tokens=512, rows=1, context=8192)
    for tokens, keys in ((1, 8000), (512, 8000)):
        counts = {"tokens": tokens, "rows": 1, "work": tokens}
        found = place_attention(program, counts, [IGPU, NPU], MEMORY, keys=keys)
        assert found.together > found.alone and not found.pays

"""The table of counts that `tandem plan` reads, beside what the emulator counts of shapes that are not in it."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.devices.rdna3.counting import count
from tandem.devices.rdna3.device import EmulatedDevice
from tandem.devices.vulkan.recording import bucket
from tandem.kernels import matmul
from tandem.kernels.dispatch_table import dispatch
from tandem.plan.rdna3_counts import FIELDS, Sample, shape_of, work_of
from tandem.program.program import Launch

NEAR = 0.1  # relative difference
MADE = "run `python -m tandem.plan.count_kernels`: the table is not of these kernels"


@pytest.fixture(scope="module")
def own_device(mesa: None) -> EmulatedDevice:
    from tests.vulkan.mesa import FOLDER

    return EmulatedDevice(FOLDER)


@pytest.mark.parametrize(
    ("layout", "tokens", "rows", "columns", "glu"),
    [
        ("q4_0", 1, 256, 4096, 0),
        ("q4_0", 6, 256, 2560, 0),
        ("q4_k", 20, 256, 3584, 0),
        ("q6_k", 40, 256, 2560, 1),
        ("q5_k", 128, 256, 2560, 0),
        ("q8_0", 2, 256, 2560, 1),
    ],
)
def test_counts_of_other_shapes(
    own_device: EmulatedDevice, layout: str, tokens: int, rows: int, columns: int, glu: int
) -> None:
    case = matmul.make_case(layout, tokens, rows, columns, glu, 0, np.random.default_rng(5))
    kernel = matmul.BY_LAYOUT[layout]
    [*_, counts] = count(own_device, kernel, case, groups=1)
    assert own_device.executed
    sizes = {name: bucket(value, max(case.counts.values())) for name, value in case.counts.items()}
    chosen = dispatch(kernel.name, case.scalars, sizes, own_device.capabilities)
    shape = shape_of(Launch(kernel, {}, case.scalars, kernel.name), chosen, [], case.counts)
    share = np.prod(own_device.executed.grid) / shape.groups
    counted = dict(zip(FIELDS, Sample(shape, float(share), counts, 0).values, strict=True))
    work = work_of(shape, 0.0)
    for name in ("valu", "wmma", "segments", "lds_cycles"):
        much = max(counted[name], 0.1 * counted["valu"])  # of little, more may be off
        assert abs(getattr(work, name) - counted[name]) <= NEAR * much, (shape.key, name, MADE)

"""What repack.c makes of a file's blocks has the file's weights, in every format with panels."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.devices.cpu.repacker import Repacker
from tandem.gguf.formats import by_name, dequantise, quantise
from tandem.kernels.matmul import unpack_panels
from tandem.kernels.panels import LAYOUTS

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [16, 41])
def test_panels_have_the_weights_of_the_file(layout: str, rows: int) -> None:
    format, columns = by_name(layout.upper()), 512
    values = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    file = quantise(format, values)
    panels = np.full(LAYOUTS[layout].matrix_bytes(rows, columns), 0xAA, np.uint8)
    repacker = Repacker(1)
    repacker.repack(layout, file, columns, panels, 0, 1, 1)
    repacker.close()
    assert len(panels) == -(-rows // 16) * 16 * format.row_bytes(columns)  # not a byte more than the file
    assert np.allclose(
        unpack_panels(layout, panels, rows, columns), dequantise(format, file), rtol=1e-6, atol=1e-6
    )


def test_every_scale_of_mxfp4() -> None:
    """Scales too small for a float32 of full precision are 0."""
    file = np.zeros((256, 17), np.uint8)
    file[:, 0], file[:, 1:] = np.arange(256), 0x71
    panels = np.zeros(LAYOUTS["mxfp4"].matrix_bytes(256, 32), np.uint8)
    repacker = Repacker(1)
    repacker.repack("mxfp4", file, 32, panels, 0, 1, 1)
    repacker.close()
    expected = dequantise(by_name("MXFP4"), file)
    expected[:2] = 0
    assert np.array_equal(unpack_panels("mxfp4", panels, 256, 32), expected)

"""The counts of a launch: exact where they can be told from the shader's source."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.devices.rdna3.counting import count
from tandem.devices.rdna3.device import EmulatedDevice
from tandem.kernels import all_kernels, matmul
from tandem.kernels.panels import LAYOUTS
from tests.rdna3.assemble import WAIT, constant, memory, program_of, vop1

ROWS, COLUMNS = 256, 4096


@pytest.fixture(scope="module")
def own_device(mesa: None) -> EmulatedDevice:
    from tests.vulkan.mesa import FOLDER

    return EmulatedDevice(FOLDER)


@pytest.mark.parametrize("layout", ["q4_0", "q4_k", "q8_0"])
@pytest.mark.parametrize("tokens", [1, 8, 16, 128, 256])
def test_a_matmul_loads_its_weights_once(own_device: EmulatedDevice, layout: str, tokens: int) -> None:
    case = matmul.make_case(layout, tokens, ROWS, COLUMNS, 0, 0, np.random.default_rng(3))
    [*_, counts] = count(own_device, all_kernels()[f"matmul_{layout}"], case)
    weights = LAYOUTS[layout].matrix_bytes(ROWS, COLUMNS)
    loads = counts.memory_of("global_load")
    assert weights <= loads.bytes < 40 * weights  # and activations, which each panel of rows loads anew
    assert weights / 64 <= loads.segments
    if tokens <= 128:
        # A dot product has four multiplications a lane.
        assert counts.dot * counts.lanes * 4 >= ROWS * COLUMNS * tokens
        assert not counts.wmma
    else:
        assert counts.wmma == ROWS // 16 * COLUMNS // 16 * tokens // 16  # of 16 x 16 x 16
        assert not counts.dot


def test_counts_add_up(own_device: EmulatedDevice) -> None:
    kernel = all_kernels()["glu"]
    case = next(iter(kernel.cases(np.random.default_rng(1))))
    [counts] = count(own_device, kernel, case)
    assert own_device.executed
    assert counts.instructions == own_device.executed.instructions
    assert counts.instructions + counts.dual == counts.operations.total()
    assert counts.operations["s_endpgm"] == counts.waves
    assert counts.memory_of("global_store").bytes == case.arrays["out"].nbytes


def test_scratch_memory_is_interleaved() -> None:
    """Each dword of 32 lanes fills two segments of 64 bytes."""
    code = [vop1("v_mov_b32", 1 + i, constant(i)) for i in range(5)]
    code += [memory("scratch_store_b128", 5, data=1), WAIT, memory("scratch_load_b64", 5, result=6)]
    program = program_of(code)
    program.run((1, 1, 1), bytes(8), [], counting=True)
    segments = {i.operation.name: i.segments for i in program.instructions() if i.segments}
    assert segments == {"scratch_store_b128": 8, "scratch_load_b64": 4}

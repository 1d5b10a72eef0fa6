"""Shares of a step's launches are Programs of their own, and together they are the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tandem.devices.cpu.device import CPUDevice
from tandem.devices.tensor_parallel.accelerator import DeviceAccelerator
from tandem.devices.tensor_parallel.cut import Gemm, attentions, gemms, moved_activations, put_columns
from tandem.kernels.q8_tiles import q8_pack
from tandem.program.hazards import place_barriers
from tandem.program.program import Program
from tandem.program.validate import validate
from tests.program.programs import PASS_SETS, golden

pytestmark = pytest.mark.fast
NAMES = ["gemma3-pattern3", "llama", "qwen2", "cohere2", "starcoder2"]


@pytest.mark.parametrize("passes", PASS_SETS.values(), ids=list(PASS_SETS))
@pytest.mark.parametrize("name", NAMES)
def test_partitions_are_the_whole(name: str, passes: tuple[str, ...]) -> None:
    program = golden(name, passes)
    works = gemms(program)
    head = sum(launch.kernel.name.startswith("matmul") for launch in program.launches) - len(works)
    assert works and head == 1
    for gemm in works:
        assert isinstance(gemm, Gemm)
        cut = gemm.units // 3
        parts = [(0, cut), (cut, gemm.units - cut)]
        columns = [gemm.columns(*part) for part in parts]
        assert columns[0][1] == columns[1][0] and sum(width for _, width in columns) == gemm.rows // (
            1 + gemm.glu
        )
        partitions = [gemm.partition(*part, dict(gemm.launch.buffers), gemm.out) for part in parts if part[1]]
        assert sum(part.scalars["rows"] for part in partitions) == gemm.rows
        weights = [part.buffers["weights"] for part in partitions]
        assert sum(w.nbytes for w in weights if w) >= gemm.weights.nbytes
        assert weights[-1] and weights[-1].region[2] == gemm.weights.region[2]
        for part in partitions:
            validate(Program([part], program.max_counts, program.arena_bytes), gemm.entering)


@pytest.mark.parametrize("name", NAMES)
def test_an_accelerator_has_a_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it places obeys the null device, for matmuls and for attention."""
    program = golden(name, tokens=64)
    device = DeviceAccelerator(CPUDevice(1))
    placed: list[Program] = []
    monkeypatch.setattr(device.device, "allocate", placed.append)
    for works in (gemms(program), attentions(program)):
        device.allocate(works, program, copies=False)
        found = placed.pop()
        for one in device._placed:
            launches = [replace(launch) for launch in one.launches]
            place_barriers(launches)
            validate(Program(launches, found.max_counts, found.arena_bytes), one.inputs)
        kv = program.arena_bytes["kv"] if works[0].launches[0].kernel.name == "rope" else 0
        assert found.arena_bytes.get("kv", 0) == kv
    device.close()


def test_attention_is_lent_with_what_it_needs() -> None:
    program = golden("gemma3-pattern3")
    works = attentions(program)
    assert len(works) == 4
    for work in works:
        assert [launch.kernel.name for launch in work.launches] == ["rope", "attention"]
        assert work.entering and len(work.leaving) == 1 and work.leaving[0] not in work.entering


def test_the_activations_of_another_turn_lie_apart() -> None:
    program = golden("llama")
    by = program.arena_bytes["activations"]
    tensor_map = moved_activations(by)
    launches = [tensor_map.launch(launch) for launch in program.launches]
    sizes = {**program.arena_bytes, "activations": 2 * by}
    validate(Program(launches, program.max_counts, sizes))
    touched = [t for launch in launches for t in launch.buffers.values() if t and t.arena == "activations"]
    assert min(tensor.start for tensor in touched) >= by


def test_columns_go_to_their_place() -> None:
    program = golden("gemma3-pattern3")
    rng = np.random.default_rng(0)
    for work in gemms(program):
        assert isinstance(work, Gemm)
        width, tokens = work.columns(0, work.units)[1], 37
        values = rng.standard_normal((tokens, width)).astype(np.float32)
        out = np.zeros(work.out.nbytes, np.uint8)
        for first, count in ((0, work.units // 2), (work.units // 2, work.units - work.units // 2)):
            begin, size = work.columns(first, count)
            part = values[:, begin : begin + size]
            data = q8_pack(part) if work.out.dtype == "q8" else np.pad(part, [(0, 0), (0, -size % 16)])
            put_columns(out, work, tokens, begin, size, np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        if work.out.dtype == "q8":
            expected = q8_pack(values).reshape(-1).view(np.uint8)
            assert (out[: len(expected)] == expected).all()
        else:
            found = np.ndarray((tokens, width), np.float32, out, strides=(4 * work.out.stride, 4))
            assert (found == values).all()

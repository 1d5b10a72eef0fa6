"""Memory, transfers, recording and replay on lavapipe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tandem.devices.cpu.device import CPUDevice
from tandem.devices.device import WeightRows
from tandem.devices.vulkan import recording
from tandem.devices.vulkan.device import VulkanDevice
from tandem.devices.vulkan.recording import bucket
from tandem.devices.vulkan.staging import STAGING_BYTES
from tandem.gguf import formats
from tandem.kernels import quantise
from tandem.kernels.panels import LAYOUTS
from tandem.kernels.q8_tiles import q8_pack, q8_zeros
from tandem.program.program import Launch, Program, Tensor
from tandem.program.step_inputs import StepLayout, StepLimits

TOKENS, DIM = 40, 96
LAYOUT = StepLayout(StepLimits(TOKENS, 1, 1, 1))


@pytest.fixture
def small(lavapipe: str) -> Iterator[VulkanDevice]:
    device = VulkanDevice(lavapipe)
    yield device
    device.close()


def quantise_program(launches: int = 3) -> Program:
    """The same rows quantised several times, each to a tensor of its own; the last is for the host."""
    x = Tensor("x", "weights", "f32", 4 * TOKENS * DIM, DIM, 0)
    size = q8_zeros(TOKENS, DIM).nbytes
    step = [Tensor("step", "step", "i32", LAYOUT.nbytes, 0, 0)]
    outputs = [Tensor(f"out.{i}", "activations", "q8", size, DIM, i * size) for i in range(launches - 1)]
    outputs.append(Tensor("out", "output", "q8", size, DIM, 0))
    scalars = {"dim": DIM, "x_stride": DIM, "count_rows": 0}
    made = [Launch(quantise.KERNEL, {"x": x, "out": out}, scalars, out.name) for out in outputs]
    sizes = {
        "weights": x.nbytes,
        "step": step[0].nbytes,
        "activations": size * (launches - 1),
        "output": size,
    }
    values = {out.name: (i, out) for i, out in enumerate(outputs)}
    return Program(made, {"tokens": TOKENS, "rows": 1, "work": 1}, sizes, {**values, "x": (0, x)})


def rows() -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(0).standard_normal((TOKENS, DIM)).astype(np.float32)


def start(device: VulkanDevice, program: Program, tokens: int = TOKENS) -> None:
    device.allocate(program)
    device.write(program.values["x"][1], rows().reshape(-1).view(np.uint8))
    device.memory("step").view(np.int32)[:3] = tokens, 1, 1


def hide_memory(device: VulkanDevice) -> None:
    """As on a card whose memory the host does not see: transfers go through staging buffers."""
    for name in ("weights", "activations"):
        for _, block in device.arenas[name].parts:
            block.mapped = None


@pytest.mark.parametrize("hidden", [False, True])
def test_a_program_runs_and_what_is_not_in_the_step_stays(small: VulkanDevice, hidden: bool) -> None:
    program = quantise_program()
    small.allocate(program)
    if hidden:
        hide_memory(small)
    small.write(program.values["x"][1], rows().reshape(-1).view(np.uint8))
    recorded = small.record(program)
    for tokens in (TOKENS, 1, 17, TOKENS):
        small.memory("step").view(np.int32)[:3] = tokens, 1, 1
        for name in ("out.0", "out.1", "out"):
            _, tensor = program.values[name]
            small.write(tensor, np.zeros(tensor.nbytes, np.uint8))
        recorded.replay()
        expected = q8_pack(rows()[:tokens])
        for name in ("out.0", "out.1", "out"):
            got = small.read(program.values[name][1]).view(expected.dtype).reshape(-1, DIM // 32)
            assert got[: len(expected)]["q"].tobytes() == expected["q"].tobytes()
            assert not got[len(expected) :].view(np.uint8).any()


def test_a_part_of_a_program(small: VulkanDevice) -> None:
    program = quantise_program()
    start(small, program)
    recorded = small.record(program)
    recorded.replay(1, 2)
    written = [small.read(program.values[name][1]).any() for name in ("out.0", "out.1", "out")]
    assert written == [False, True, False]
    recorded.replay(2)
    assert small.view(program.values["out"][1]).any()


def test_a_step_is_cut_into_segments_and_gives_the_same(
    small: VulkanDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = quantise_program(8)
    start(small, program)
    small.record(program).replay()
    whole = small.read(program.values["out"][1]).copy()
    monkeypatch.setattr(recording, "RATES", {})
    monkeypatch.setattr(recording, "SLOW", (1.0, 1.0))
    before = small.queue.submitted
    recorded = small.record(program)
    recorded.replay()
    assert small.queue.submitted - before == 8  # a launch each
    assert (small.read(program.values["out"][1]) == whole).all()
    recorded.replay()
    assert small.queue.submitted - before == 16


def test_steps_that_repeat_record_nothing(small: VulkanDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    program = quantise_program()
    start(small, program)
    recorded = small.record(program)
    recorded.replay()
    begun = []
    original = small.vk.BeginCommandBuffer
    monkeypatch.setattr(small.vk, "BeginCommandBuffer", lambda *args: begun.append(1) or original(*args))
    for _ in range(20):
        recorded.replay()
    assert not begun
    small.memory("step").view(np.int32)[0] = 3
    recorded.replay()
    assert len(begun) == 1


def test_timestamps(small: VulkanDevice) -> None:
    program = quantise_program(5)
    start(small, program)
    seconds = small.record(program).replay_timed()
    assert len(seconds) == 5 and all(0 <= s < 1 for s in seconds) and sum(seconds) > 0


@pytest.mark.parametrize(
    ("count", "most", "size"), [(0, 8, 1), (1, 8, 1), (3, 8, 4), (5, 6, 6), (512, 512, 512)]
)
def test_buckets(count: int, most: int, size: int) -> None:
    assert bucket(count, most) == size


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("layout", ["q4_0", "q6_k", "f16"])
def test_repacked_panels_are_those_of_the_cpu(
    small: VulkanDevice, layout: str, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.devices.vulkan.device.STAGING_BYTES", 40_000)  # a few panels at a time
    columns, panels = 512, 12
    weights = np.random.default_rng(1).standard_normal((panels * 16 - 5, columns)).astype(np.float32)
    packed = formats.quantise(formats.by_name(layout.upper()), weights)
    nbytes = LAYOUTS[layout].matrix_bytes(3 * panels * 16, columns)
    tensor = Tensor("w", "weights", layout, nbytes, 0, 0)
    program = Program([], {}, {"weights": nbytes})
    cpu = CPUDevice(threads=1)
    for device in (cpu, small):
        device.allocate(program)
    if hidden:
        hide = small.arenas["weights"].parts[0][1]
        hide.mapped = None
    for run, period in ((panels, panels), (2, 4)):
        for device in (cpu, small):
            begin = 2 * LAYOUTS[layout].matrix_bytes(16, columns)
            device.repack([WeightRows(tensor, begin, packed, columns, 1, run, period)])
        assert (small.read(tensor) == cpu.read(tensor)).all()
    cpu.close()


def test_transfers_larger_than_the_staging_buffers(small: VulkanDevice) -> None:
    nbytes = 2 * STAGING_BYTES + 12345
    small.allocate_arena("weights", nbytes)
    small.arenas["weights"].parts[0][1].mapped = None
    data = np.random.default_rng(0).integers(0, 256, nbytes - 7, np.uint8)
    small.write(Tensor("all", "weights", "u8", nbytes, offset=0), data)
    assert (
        small.read(Tensor("some", "weights", "u8", nbytes - 100, offset=3)) == data[3 : nbytes - 97]
    ).all()


def test_memory_starts_as_zeros_and_goes_back(small: VulkanDevice) -> None:
    program = quantise_program()
    for _ in range(3):
        start(small, program)
        assert not small.read(program.values["out.0"][1]).any()
        small.record(program).replay()


def test_a_small_limit_spills_and_gives_the_same(lavapipe: str) -> None:
    program, results = quantise_program(), []
    for limit in (None, 1000.0):
        device = VulkanDevice(lavapipe, gpu_memory=limit)
        start(device, program)
        device.record(program).replay()
        results.append(device.read(program.values["out"][1]).copy())
        spilled = {placed.part.arena for placed in device.placed if placed.spilled}
        assert spilled == (set() if limit is None else {"weights", "activations"})
        device.close()
    assert (results[0] == results[1]).all()


def test_the_second_start_compiles_nothing(lavapipe: str, tmp_path: Path) -> None:
    program = quantise_program()
    sizes = []
    for _ in range(2):
        device = VulkanDevice(lavapipe, cache=tmp_path / "new")
        start(device, program)
        device.record(program).replay()
        device.close()
        (file,) = (tmp_path / "new").iterdir()
        sizes.append((file.stat().st_size, file.stat().st_mtime_ns))
    assert sizes[0] == sizes[1] and sizes[0][0] > 0
    file.with_name(file.name.replace("-", "-0")).write_bytes(b"of older shaders")
    file.write_bytes(b"damaged")
    device = VulkanDevice(lavapipe, cache=tmp_path / "new")
    start(device, program)
    device.record(program).replay()
    device.close()
    assert list((tmp_path / "new").iterdir()) == [file] and file.read_bytes() != b"damaged"


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_cache_that_is_no_file_is_not_read(lavapipe: str, tmp_path: Path, kind: str) -> None:
    """A pipe would wait for its writer for ever."""
    device = VulkanDevice(lavapipe, cache=tmp_path)
    start(device, quantise_program())
    device.record(quantise_program()).replay()
    device.close()
    (file,) = tmp_path.iterdir()
    file.unlink()
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: path.symlink_to("/dev/zero")}[kind](file)
    device = VulkanDevice(lavapipe, cache=tmp_path)
    start(device, quantise_program())
    device.record(quantise_program()).replay()
    device.close()
    assert not file.is_file()  # nor is it replaced: somebody put it there


def test_no_cache_folder_is_no_failure(lavapipe: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    device = VulkanDevice(lavapipe, cache=tmp_path / "file" / "below")
    start(device, quantise_program())
    device.record(quantise_program()).replay()
    device.close()

"""`--hardware this`: measured once, kept, and measured again where it must be. What is measured is not timed here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tandem.bench.hardware import MEASURED, Hardware, load_hardware
from tandem.bench.result import Limits
from tandem.bench.sensors import Reading, Sensors
from tandem.devices.backends import open_device
from tandem.devices.cpu.device import CPUDevice
from tandem.devices.device import Device
from tandem.model.synthetic import SyntheticModel
from tandem.plan import this_machine as module
from tandem.plan.predict import Planned
from tandem.plan.this_machine import FEW, FEW_LAYERS, LAYERS, PROMPT, SHAPE, SMALL, _with_rate, this_machine

pytestmark = pytest.mark.fast


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that were measured."""
    devices: list[str] = []

    def measure(device: Device) -> Hardware:
        devices.append(device.describe())
        return dataclasses.replace(load_hardware("epyc-2-cores"), name="this", title=device.describe())

    monkeypatch.setattr(module, "measure", measure)
    return devices


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something small is measured."""
    for name, value in {
        "READ_BYTES": 8 << 20,
        "SHAPE": SMALL,
        "LAYERS": FEW_LAYERS,
        "PROMPT": FEW,
        "ROUNDS": 1,
    }.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("tandem.bench.rounds.WARM_UP", 0.0)
    monkeypatch.setattr("tandem.bench.bandwidth.MIN_SECONDS", 0.01)


def test_it_is_measured_once(measured: list[str], tmp_path: Path) -> None:
    first = this_machine(device="cpu", folder=tmp_path / "new")
    second = this_machine(device="cpu", folder=tmp_path / "new")
    assert dataclasses.replace(second, memory_gib=first.memory_gib) == first and len(measured) == 1
    assert first.status == MEASURED and list(first.heaps) == ["free"]
    this_machine(again=True, device="cpu", folder=tmp_path / "new")
    assert len(measured) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "this"}', '{"calibration": {}}'])
def test_a_damaged_file_is_no_trouble(measured: list[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "this-machine.json").write_text(text)
    this_machine(device="cpu", folder=tmp_path)
    assert len(measured) == 1


def test_what_is_free_is_asked_each_time(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this_machine(device="cpu", folder=tmp_path)
    monkeypatch.setattr(CPUDevice, "free_memory", lambda _: (0.0, 3.0 * 2**30))
    assert this_machine(device="cpu", folder=tmp_path).memory_gib == 3.0 and len(measured) == 1


@pytest.mark.parametrize(("others", "said"), [(0.04, ""), (0.82, "other processes took 82% of the machine")])
def test_a_busy_machine_is_remembered_as_such(
    others: float, said: str, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Reading(1.0, None, [], 0, others)
    monkeypatch.setattr(Sensors, "during", lambda self, run: (run(), reading))
    this_machine(device="cpu", folder=tmp_path)
    kept = this_machine(device="cpu", folder=tmp_path).warning
    assert kept.startswith(said) and ("--measure" in kept) == bool(said)


def test_other_factors_measure_again(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates of a prompt are told from what our kernels reach: with a new version of those, both are new."""
    first = this_machine(device="cpu", folder=tmp_path)
    newer = dataclasses.replace(first.calibration, matrix_ops=0.9)
    monkeypatch.setattr(module, "calibration_of", lambda kind: newer)
    this_machine(device="cpu", folder=tmp_path)
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written(measured: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert this_machine(device="cpu", folder=tmp_path / "file" / "below").name == "this" and measured


def test_another_device_is_measured(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this_machine(device="cpu", folder=tmp_path)
    monkeypatch.setattr(module, "open_device", lambda _: open_device("cpu", threads=7))
    this_machine(device="cpu", folder=tmp_path)
    assert len(set(measured)) == 2


def test_the_rate_is_the_one_that_explains_the_prompt() -> None:
    planned, machine = Planned(SyntheticModel(SHAPE, LAYERS), PROMPT), load_hardware("epyc-2-cores")
    unknown = dataclasses.replace(machine, matrix_tflop_s=1.0, dot_top_s=1.0, peak_top_s=1.0)
    for peak in (None, 1e9):
        found = _with_rate(unknown, planned, PROMPT, 0.5, peak)
        assert planned.predict(found, [(0, PROMPT)]).total == pytest.approx(0.5)
        assert found.peak_top_s == (peak or found.matrix_tflop_s)


def test_no_rate_is_above_a_peak_that_is_known() -> None:
    """A prompt that was faster than factors of other machines explain."""
    planned, machine = Planned(SyntheticModel(SHAPE, LAYERS), PROMPT), load_hardware("epyc-2-cores")
    unknown = dataclasses.replace(machine, matrix_tflop_s=1.0, dot_top_s=1.0, peak_top_s=1.0)
    found = _with_rate(unknown, planned, PROMPT, 1e-3, 0.9)
    assert found.matrix_tflop_s == found.dot_top_s == found.peak_top_s == 0.9


def test_this_cpu_is_measured(small: None) -> None:
    device = open_device("cpu")
    try:
        found = module.measure(device)
    finally:
        device.close()
    assert found.kind == "cpu" and found.matrix_tflop_s <= found.peak_top_s and found.read_gb_s > 0.1
    assert set(found.sources) == {f.name for f in dataclasses.fields(Hardware) if f.type in ("float", "int")}


def test_the_limit_is_the_better_of_before_and_after(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(rate: float) -> Callable[..., Limits]:
        return lambda *_: {"bytes_per_s": rate, "bytes_from": "reads", "ops_per_s": 1e12, "ops_from": "dots"}

    monkeypatch.setattr(module, "measure_limits", measured(30e9))
    monkeypatch.setattr("tandem.bench.roofline.measure_limits", measured(50e9))
    with closing(open_device("cpu")) as device:
        assert module.measure(device).read_gb_s == 50

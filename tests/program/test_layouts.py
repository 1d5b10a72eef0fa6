"""The device decides how weights and activations are stored: the Program, the weights and the results follow it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem.devices import backends
from tandem.devices.backends import Backend, OpenOptions, check_device, open_device, register
from tandem.devices.cpu.device import CPUDevice
from tandem.engine.engine import Engine
from tandem.engine.llm import LLM
from tandem.errors import DeviceError
from tandem.kernels.layout import Layout
from tandem.kernels.panels import LAYOUTS, panel_layout
from tandem.model.model import open_model
from tandem.program.validate import validate
from tests.cli.tiny_model import write_tiny_model
from tests.engine.tiny_models import write_model
from tests.program.programs import build, formats_of, real_config

pytestmark = pytest.mark.fast


class FloatDevice(CPUDevice):
    """A CPU that stores every matrix as float32 and therefore has no int8 activations."""

    name = "float"

    def weight_layout(self, format: str, rows: int, columns: int) -> Layout:
        return LAYOUTS["f32"]


def test_a_program_has_the_layouts_and_activations_that_were_chosen() -> None:
    config = real_config("Llama 3 8B")
    formats = formats_of(config, mixed=True)
    for choose, dtypes in ((panel_layout, {"q4_k", "q6_k"}), (lambda *_: LAYOUTS["f16"], {"f16"})):
        program = build(config, formats, tokens=16, rows=1, choose=choose)
        validate(program)
        tensors = [t for launch in program.launches for t in launch.touched("r") if t.arena == "weights"]
        assert {t.dtype for t in tensors} == {*dtypes, "f32"}, "matrices, and float32 vectors"
        kernels = {launch.kernel.name for launch in program.launches}
        assert {name for name in kernels if name.startswith("matmul_")} == {f"matmul_{d}" for d in dtypes}
        activations = {t.dtype for launch in program.launches for t in launch.touched("w")}
        assert ("q8" in activations) == any(LAYOUTS[dtype].activations == "q8" for dtype in dtypes)


def test_another_device_loads_and_computes_in_its_own_layout(tmp_path: Path) -> None:
    """The float device's weights are those of the file, dequantised, and its logits are close to the panels'."""
    path = write_model(tmp_path / "tiny.gguf", "Q4_0", "llama")
    logits = []
    for device in (CPUDevice(1), FloatDevice(1)):
        with open_model(path) as model:
            engine = Engine.load(model, device, context=64, batch=1)
            logits.append(engine.logits([3, 1, 4, 1, 5]))
            floats = model.nbytes(lambda *_: LAYOUTS["f32"])
            assert (model.nbytes(device.weight_layout) == floats) == (device.name == "float")
        device.close()
    assert not np.array_equal(*logits)
    np.testing.assert_allclose(*logits, atol=0.05 * np.abs(logits[1]).max())


def test_a_back_end_registers_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name opens it, messages list it, `auto` finds it; the other code does not change."""
    monkeypatch.setattr(backends, "BACKENDS", dict(backends.BACKENDS))

    def check(names: object) -> None:
        raise DeviceError(f"no float device {names}: use float")

    def opened(name: str, options: OpenOptions) -> CPUDevice:
        return FloatDevice(options.threads)

    register("float", Backend("float", opened, check, present=lambda: True))
    for name in ("float", "float:3", "auto"):
        device = open_device(name, threads=1)
        assert isinstance(device, FloatDevice)
        device.close()
    with pytest.raises(DeviceError, match=r"no float device \['float:7'\]"):
        check_device("float:7")
    with pytest.raises(DeviceError, match=r"no device 'gpu': use cpu, vulkan, .*, float or auto"):
        open_device("gpu")
    with LLM(write_tiny_model(tmp_path / "tiny.gguf"), device="float", threads=1, context=64) as llm:
        assert llm.device.name == "float" and llm.generate("x", max_tokens=2).token_ids


def test_devices_of_one_pipeline_agree_on_a_layout() -> None:
    from tandem.devices.split.device import SplitDevice

    devices = [CPUDevice(1), FloatDevice(1)]
    with pytest.raises(DeviceError, match="different layouts"):
        SplitDevice(devices).weight_layout("q4_0", 32, 32)
    assert SplitDevice(devices[:1] * 2).weight_layout("q4_0", 32, 32) == LAYOUTS["q4_0"]
    for device in devices:
        device.close()

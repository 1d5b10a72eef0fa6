"""A model's matmuls divided between the CPU and an NPU whose tools, driver and hardware are STAND-INS."""

from __future__ import annotations

import importlib
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.devices.cpu.device import CPUDevice
from tandem.devices.npu.attach import npu_missing, with_npu
from tandem.devices.npu.compile import find_tools
from tandem.devices.npu.detect import detect
from tandem.devices.npu.int8_matmuls import ALL, int8_matmuls
from tandem.devices.tensor_parallel.cut import Gemm, gemms
from tandem.devices.tensor_parallel.device import TensorParallelDevice
from tandem.devices.tensor_parallel.int8 import Int8Accelerator
from tandem.engine.engine import Engine
from tandem.engine.llm import LLM
from tandem.errors import DeviceError, RequestError
from tandem.model.model import open_model
from tests.npu import tools
from tests.npu.machine import phoenix
from tests.program.programs import GOLDENS, golden

IDS = list(range(3, 30))


def logits(accelerator: Any, name: str) -> np.ndarray[Any, Any]:
    """Of a tiny model, two thirds of whose columns the accelerator computes."""
    device = TensorParallelDevice(CPUDevice(1), [accelerator], fractions=(1, 2))
    try:
        with open_model(GOLDENS[name]) as model:
            return Engine.load(model, device, context=64, batch=4).logits(IDS)
    finally:
        device.close()


@pytest.mark.parametrize(("name", "block"), [("llama", None), ("gemma3-pattern3", 32), ("qwen2", None)])
def test_the_npu_computes_what_its_arithmetic_does(
    name: str, block: int | None, xrt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit; through the plans, the compiler's cache and the runtime."""
    tools.install(tmp_path, monkeypatch)
    accelerator = importlib.import_module("tandem.devices.npu.accelerator")
    npu = accelerator.NpuAccelerator(find_tools(), tmp_path / "cache", block, chunk=96)
    assert np.array_equal(logits(npu, name), logits(Int8Accelerator(block), name))
    assert xrt.calls.count("hw_context") == 1 and "start" in xrt.calls
    assert not [call for call in xrt.calls if call.startswith("failed")]


def test_a_model_with_the_npu(xrt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`require`, on a machine that looks as if it had one; whether it helps is up to the times."""
    tools.install(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = phoenix(tmp_path / "machine")
    device = with_npu(CPUDevice(1), "require", root=root)
    assert isinstance(device, TensorParallelDevice) and "not yet run on a Phoenix" in device.describe()
    device.close()


def test_an_answer_with_the_npu(xrt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way; the emulator is slow, so the times say that it does not pay, and the answer is the CPU's."""
    tools.install(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = phoenix(tmp_path / "machine")
    monkeypatch.setattr("tandem.devices.npu.attach.detect", lambda _: detect(root))
    allowed = {"llama 2 x 32 x 64": {"block": None, "groups": ["ffn_down"]}}
    (tmp_path / "cache/tandem/npu").mkdir(parents=True)
    (tmp_path / "cache/tandem/npu/int8_matmuls.json").write_text(json.dumps(allowed))
    prompt, how = list(range(3, 40)), {"device": "cpu", "threads": 1, "context": 64, "batch": 2}
    with LLM(GOLDENS["llama"], **how) as alone, LLM(GOLDENS["llama"], npu="require", **how) as helped:
        want = alone.generate(prompt, max_tokens=6).token_ids
        assert helped.generate(prompt, max_tokens=6).token_ids == want
        assert "it does not pay" in helped.device.describe() and "start" in xrt.calls
    assert not [call for call in xrt.calls if call.startswith("failed")]


@pytest.mark.parametrize("broken", ["compiler", "memory", "names"])
def test_auto_goes_on_where_it_cannot_be_made_ready(
    broken: str, xrt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is there, but the compiler refuses our text, memory runs out while weights are sent, or the file has other
    matmuls than were measured."""
    tools.install(tmp_path, monkeypatch, broken="error: unknown attribute" if broken == "compiler" else "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = phoenix(tmp_path / "machine")
    monkeypatch.setattr("tandem.devices.npu.attach.detect", lambda _: detect(root))
    group = "ffn_up" if broken == "names" else "ffn_down"
    allowed = {"llama 2 x 32 x 64": {"block": None, "groups": [group]}}
    (tmp_path / "cache/tandem/npu").mkdir(parents=True)
    (tmp_path / "cache/tandem/npu/int8_matmuls.json").write_text(json.dumps(allowed))
    xrt.weights_left = 1 if broken == "memory" else 100
    how = {"device": "cpu", "threads": 1, "context": 64, "batch": 2}
    said = {"compiler": "unknown attribute", "memory": "no buffer of", "names": "was measured in int8"}[
        broken
    ]
    with LLM(GOLDENS["llama"], **how) as alone:
        want = alone.generate(IDS, max_tokens=6).token_ids
    with pytest.raises(DeviceError, match=said):
        LLM(GOLDENS["llama"], npu="require", **how)
    xrt.weights_left = 1 if broken == "memory" else 100
    with (
        pytest.warns(UserWarning, match=f"going on without the NPU: .*{said}"),
        LLM(GOLDENS["llama"], npu="auto", **how) as llm,
    ):
        assert llm.generate(IDS, max_tokens=6).token_ids == want
        assert "not in use" in llm.device.describe() and "start" not in xrt.calls


@pytest.mark.fast
def test_models_that_were_not_measured_stay_off(
    xrt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of those that were, the matmuls that cost too much."""
    with pytest.raises(DeviceError, match=r"int8 costs a model of this shape \(a\) was not measured"):
        int8_matmuls("a", tmp_path)
    allowed = {
        "a": {"block": 512, "groups": ["ffn_down", "layer 1 attn_output"]},
        "b": {"block": None, "groups": []},
    }
    (tmp_path / "int8_matmuls.json").write_text(json.dumps(allowed))
    found = int8_matmuls("a", tmp_path)
    works = [work for work in gemms(golden("llama")) if isinstance(work, Gemm)]
    names = [work.weights.name for work in works if found.includes(work)]
    assert names == ["blk.0.ffn_down.weight", "blk.1.attn_output.weight", "blk.1.ffn_down.weight"]
    assert found.block == 512 and all(ALL.includes(work) for work in works)
    with pytest.raises(DeviceError, match="costs too much"):
        int8_matmuls("b", tmp_path)
    for damaged in ("{", "[1]", '{"a": {"block": 256}}', '{"a": 5}'):
        (tmp_path / "int8_matmuls.json").write_text(damaged)
        with pytest.raises(DeviceError, match="cannot be read: delete it, or measure again"):
            int8_matmuls("a", tmp_path)


@pytest.mark.fast
def test_without_an_npu(tmp_path: Path) -> None:
    times = []
    for _ in range(5):  # a busy machine may take long once
        begun = time.perf_counter()
        with pytest.raises(DeviceError, match="no NPU of AMD Phoenix in this machine"):
            npu_missing("require", tmp_path)
        with pytest.raises(DeviceError, match="no NPU"):
            with_npu(CPUDevice(1), "require", root=tmp_path)
        times.append(time.perf_counter() - begun)
    assert min(times) < 1
    assert re.match("going on without the NPU: no NPU", npu_missing("auto", tmp_path))
    assert npu_missing("off", tmp_path) == ""
    cpu = CPUDevice(1)
    with pytest.warns(UserWarning, match="going on without the NPU"):
        assert with_npu(cpu, "auto", root=tmp_path) is cpu
    assert with_npu(cpu, "off", root=tmp_path) is cpu
    cpu.close()
    with pytest.raises(RequestError, match="use off, auto, require"):
        npu_missing("yes", tmp_path)


@pytest.mark.fast
def test_without_compilers(xrt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    root = phoenix(tmp_path)
    with pytest.raises(DeviceError, match="no aiecc on the PATH"):
        with_npu(CPUDevice(1), "require", root=root)
    cpu = CPUDevice(1)
    with pytest.warns(UserWarning, match="going on without the NPU: no aiecc"):
        assert with_npu(cpu, "auto", root=root) is cpu
    cpu.close()


@pytest.mark.fast
def test_a_model_is_not_read_for_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tandem.devices.npu.attach.detect", lambda root: _none(tmp_path))
    with pytest.raises(DeviceError, match="no NPU"):
        LLM(tmp_path / "no such file.gguf", npu="require")


def _none(root: Path) -> Any:
    return detect(root / "empty")


@pytest.mark.fast
@pytest.mark.parametrize(
    "command", [["run", "none.gguf", "hello"], ["serve", "none.gguf"], ["bench", "none.gguf"]]
)
def test_commands_stop_where_it_is_required(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tandem.cli import main

    monkeypatch.setattr("tandem.devices.npu.attach.detect", lambda root: _none(tmp_path))
    assert main([*command, "--npu", "require"]) == 1
    said = capsys.readouterr().err
    assert said == "tandem: no NPU of AMD Phoenix in this machine; a Ryzen 7040 or 8040 has one\n"


def test_auto_says_it_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tandem.cli import main

    monkeypatch.setattr("tandem.devices.npu.attach.detect", lambda root: _none(tmp_path))
    model = str(GOLDENS["llama"])
    assert main(["bench", model, "-p", "4", "-n", "2", "-r", "1", "--device", "cpu", "--npu", "auto"]) == 0
    assert capsys.readouterr().err.count("going on without the NPU") == 1

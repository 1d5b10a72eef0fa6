"""The CPU and lavapipe in the roles of iGPU and NPU: the tokens of one, both at work, and fractions that react."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tandem.devices.backends import open_device
from tandem.devices.cpu.device import CPUDevice
from tandem.devices.tensor_parallel import balance
from tandem.devices.tensor_parallel.device import TensorParallelDevice
from tandem.engine.engine import Engine
from tandem.engine.params import SamplingParams
from tandem.model.model import open_model
from tests.engine.test_split import tokens_of
from tests.engine.tiny_models import opened, write_model
from tests.engine.workloads import CONTEXT, random_workload, serve
from tests.tensor_parallel import slow_devices
from tests.tensor_parallel.slow_devices import SlowCPU, SlowHelper, check_both_work, tensor_parallel_engine
from tests.vulkan.test_split import NEAR, below


@pytest.mark.parametrize(
    ("order", "placement", "split"),
    [
        ("cpu,{}", "columns", [3, 1]),
        ("{},cpu", "columns", [1, 3]),
        ("cpu,{}", "columns-overlapped", [3, 1]),
        ("{},cpu", "columns-overlapped", [1, 3]),
        ("cpu,{}", "npu-attention", None),
    ],
)
def test_the_same_tokens(
    lavapipe: str, order: str, placement: str, split: list[int] | None, tmp_path: Path
) -> None:
    """In float32. Requests come and go."""
    path = write_model(tmp_path / "tiny.gguf", "F32", "gemma3")
    workload = random_workload(np.random.default_rng(5), requests=5, prompt=60, answer=6)
    model, device = (
        open_model(path),
        open_device(order.format(lavapipe), threads=1, placement=placement, split=split),
    )
    with opened(path, context=CONTEXT, batch=8, kv="f32") as one:
        engine = Engine.load(model, device, context=CONTEXT, batch=8, kv="f32")
        found, expected = (tokens_of(serve(e, workload, frozenset()), workload) for e in (engine, one))
        assert found == expected
    device.close()
    model.gguf.close()


@pytest.mark.parametrize(("order", "placement"), [("{},cpu", "columns"), ("cpu,{}", "columns-overlapped")])
def test_quantised_tokens_are_those_of_one_devices_logits(
    lavapipe: str, order: str, placement: str, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "tiny.gguf", "Q4_0", "gemma3")
    workload = random_workload(np.random.default_rng(3), requests=4, prompt=60, answer=8, penalties=0)
    model = open_model(path)
    device = open_device(order.format(lavapipe), threads=1, placement=placement, split=[1, 1])
    engine = Engine.load(model, device, context=CONTEXT, batch=8)
    sequences = serve(engine, workload, frozenset())
    with opened(path, context=CONTEXT, batch=8) as one:
        greedy = [s for s in sequences if s.generated and not s.request.params.temperature]
        assert greedy and max(below(one, sequence) for sequence in greedy) < NEAR
    device.close()
    model.gguf.close()


def test_both_are_at_work(lavapipe: str, tmp_path: Path) -> None:
    """By when fractions began and ended. Neither device could end one if the other were not at its own, too."""
    check_both_work(write_model(tmp_path / "tiny.gguf", "Q4_0", "gemma3"), open_device(lavapipe))


def test_fractions_adapt(lavapipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fraction of a slowed-down device falls to zero; tokens do not change."""
    monkeypatch.setattr(balance, "REBALANCE_STEPS", 4)
    monkeypatch.setattr(balance, "MIN_GAIN", -math.inf)  # on a busy machine nothing may pay: that is below
    monkeypatch.setattr(slow_devices, "PER_ROW", 40e-6)
    path, ids = write_model(tmp_path / "tiny.gguf", "F32"), list(range(8))
    accelerator = SlowHelper(open_device(lavapipe))
    with (
        tensor_parallel_engine(path, SlowCPU(1), [accelerator], kv="f32") as engine,
        opened(path, kv="f32") as one,
    ):
        device, expected = engine.device, one.logits(ids)
        assert isinstance(device, TensorParallelDevice)
        accelerator.times_as_long = 0.25

        def fraction() -> float:
            np.testing.assert_allclose(engine.logits(ids), expected, atol=1e-3)
            found = device.balances[8]
            return sum(cut[1] / sum(cut) for cut in found.cuts.values()) / 4 if found.on else 0.0

        def reached(low: float, high: float) -> bool:
            """A busy machine may take some more steps."""
            return any(low < fraction() < high for _ in range(60))

        assert reached(0.4, 1.0)
        accelerator.times_as_long = 4.0
        assert reached(0.0, 0.3)
        monkeypatch.setattr(balance, "MIN_GAIN", 0.05)
        accelerator.times_as_long = 40.0
        assert any(fraction() == 0.0 and not device.balances[8].on for _ in range(60))
        accelerator.times.clear()
        fraction()
        assert not accelerator.times and "it does not pay" in device.describe()


def test_one_answers_while_others_wait(lavapipe: str, tmp_path: Path) -> None:
    """Two steps in flight: the CPU runs segments of one while lavapipe computes its partition of the other."""
    path = write_model(tmp_path / "tiny.gguf", "Q4_0", "gemma3")
    accelerator = SlowHelper(open_device(lavapipe))
    accelerator.times_as_long = 0.2
    with tensor_parallel_engine(
        path, CPUDevice(1), [accelerator], "columns-overlapped", fractions=(1, 1)
    ) as engine:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        sequences = [engine.submit([i, 5], params) for i in range(4)]
        while any(sequence.finish_reason is None for sequence in sequences):
            engine.step()
        device = engine.device
        assert isinstance(device, TensorParallelDevice) and device.runner
        spans, segments = sorted(accelerator.times), sorted(device.runner.times)
        assert any(b < begin < e for begin, _ in segments for b, e in spans)

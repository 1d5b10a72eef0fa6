"""The NPU's arithmetic, and the selection that keeps off what it costs too much."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tandem.devices.cpu.device import CPUDevice
from tandem.devices.npu.emulator import emulate
from tandem.devices.npu.plan import plan_gemm
from tandem.devices.tensor_parallel import balance
from tandem.devices.tensor_parallel.accelerator import DeviceAccelerator
from tandem.devices.tensor_parallel.cut import Gemm
from tandem.devices.tensor_parallel.device import TensorParallelDevice
from tandem.devices.tensor_parallel.int8 import Int8Accelerator, dot, matmul, quantise
from tandem.devices.tensor_parallel.int8_selection import LIMIT, groups, select_int8
from tandem.engine.engine import Engine
from tandem.errors import DeviceError
from tandem.kernels.kernel import Array
from tandem.model.model import Model, open_model
from tests.engine.tiny_models import opened, write_model
from tests.packages import model_path


@pytest.mark.fast
def test_sums_are_exact() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-127, 128, (n, 5000), dtype=np.int8) for n in (7, 19))
    x[0], w[0] = 127, 127  # the largest sum there is
    assert (dot(x, w) == x.astype(np.int64) @ w.astype(np.int64).T).all()


@pytest.mark.fast
def test_they_are_those_of_the_emulated_array() -> None:
    rng = np.random.default_rng(1)
    x, w = (rng.integers(-127, 128, (n, 96), dtype=np.int8) for n in (40, 64))
    assert (emulate(plan_gemm(40, 64, 96), x, np.ascontiguousarray(w.T)) == dot(x, w)).all()


@pytest.mark.fast
def test_scales_for_fewer_columns_are_nearer_to_floats() -> None:
    rng = np.random.default_rng(2)
    x, w = (rng.standard_normal((n, 512)).astype(np.float32) for n in (9, 33))
    x[:, 7] *= 60  # what makes a scale for all columns coarse
    exact, errors = x @ w.T, []
    for block in (None, 200, 64):  # one that does not divide the columns too
        found = matmul(quantise(x, block), quantise(w, block), block)
        errors.append(np.square(found - exact).mean() ** 0.5)
    assert 5.0 > errors[0] > 1.3 * errors[1] > 1.3**2 * errors[2] > 0.1
    zeros = quantise(np.zeros_like(x), 64)
    assert (matmul(zeros, quantise(w, 64), 64) == 0).all()


@pytest.mark.fast
def test_only_matmuls_are_taken(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", "Q4_0")
    with pytest.raises(DeviceError, match="computes matmuls only"):
        Int8Engine(path, None, placement="npu-attention")


class Int8Engine:
    """An engine with the matmuls of some groups computed as the NPU would."""

    def __init__(
        self, path: Path, block: int | None, placement: str = "columns", fraction: float = 1.0
    ) -> None:
        self.selected: frozenset[str] | None = None  # while weights are loaded: all
        self.model: Model = open_model(path)
        fractions = None if placement == "npu-attention" else (1 - fraction, fraction)
        self.device = TensorParallelDevice(
            CPUDevice(1), [Int8Accelerator(block)], placement, fractions, self.chosen
        )
        try:
            self.engine = Engine.load(self.model, self.device, context=256, batch=64)
        except BaseException:
            self.close()
            raise

    def chosen(self, gemm: Gemm) -> bool:
        return self.selected is None or any(group in self.selected for group in groups(gemm))

    def logits(self, ids: list[int], *selected: str) -> Array:
        self.selected = frozenset(selected)
        return self.engine.logits(ids)

    def close(self) -> None:
        self.device.close()
        self.model.gguf.close()


@pytest.mark.parametrize(
    ("architecture", "format"), [("gemma3", "Q4_K"), ("qwen2", "F32"), ("llama", "Q8_0")]
)
def test_each_partition_is_computed_in_int8(architecture: str, format: str, tmp_path: Path) -> None:
    """Whole matmuls or half of their columns; with nothing chosen the bits are the CPU's."""
    path, ids = write_model(tmp_path / "tiny.gguf", format, architecture), list(range(40, 100))
    with opened(path, context=256) as one:
        expected = one.logits(ids)
    for fraction in (1.0, 0.5):
        engine = Int8Engine(path, 128, fraction=fraction)
        assert engine.logits(ids).tobytes() == expected.tobytes()
        kinds = {groups(work)[0] for work in engine.device.works if isinstance(work, Gemm)}
        assert kinds == {"attn_q+attn_k+attn_v", "attn_output", "ffn_gate+ffn_up", "ffn_down"}
        for kind in kinds:
            found = engine.logits(ids, kind)
            assert 0 < np.abs(found - expected).max() < 0.35 * np.abs(expected).max(), kind
        engine.close()


class Picky(Int8Accelerator):
    """May take one kind of matmul, as the NPU does with a selection."""

    def supports(self, gemm: Gemm) -> bool:
        return groups(gemm)[0] == "ffn_down"


def test_three_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As iGPU, CPU and NPU: each matmul is divided among those that may compute it."""
    monkeypatch.setattr(balance, "MIN_GAIN", -math.inf)
    path, ids = write_model(tmp_path / "tiny.gguf", "Q8_0"), list(range(30))
    npu = Picky(None)
    device = TensorParallelDevice(CPUDevice(1), [DeviceAccelerator(CPUDevice(1))]).with_accelerator(npu)
    model = open_model(path)
    engine = Engine.load(model, device, context=256, batch=32)
    found = [engine.logits(ids) for _ in range(6)]
    for gemm in device.works:
        assert isinstance(gemm, Gemm)
        assert device.eligible(gemm) == (True, True, groups(gemm)[0] == "ffn_down")
        cut = device.balances[32].division(gemm, device.eligible(gemm))
        assert sum(cut) == gemm.units and (not cut[2] or groups(gemm)[0] == "ffn_down")
    assert set(npu._weights) == {i for i, work in enumerate(device.works) if device.eligible(work)[2]}
    with opened(path, context=256) as one:
        assert found[0].tobytes() == one.logits(ids).tobytes()  # still alone
    np.testing.assert_allclose(found[-1], found[0], atol=0.35 * np.abs(found[0]).max())
    with pytest.raises(DeviceError, match="needs measured partitions"):
        TensorParallelDevice(device.main, [], "npu-attention").with_accelerator(npu)
    device.close()
    model.gguf.close()


@pytest.mark.fast
def test_what_is_dear_stays_off() -> None:
    alone = {"a": 0.001, "b": 0.004, "c": 0.02, "d": 0.003}
    selection = select_int8(list(alone), lambda groups: sum(alone[group] for group in groups))
    assert (
        selection.selected == {"a", "d"}
        and selection.total == pytest.approx(0.004)
        and selection.costs == alone
    )
    assert select_int8(["c"], lambda groups: 0.02).selected == frozenset()


def test_a_layer_that_int8_ruins_is_found(tmp_path: Path) -> None:
    """Planted: a column of one layer's weights so large that a scale for a row leaves little of the others. What
    perplexity grows by is computed for texts of the model's own, of which it is the divergence."""
    planted, ids = tmp_path / "planted.gguf", list(range(100, 200))
    _plant(write_model(tmp_path / "tiny.gguf", "F32"), planted)
    selections = {}
    for block in (None, 32):
        engine = Int8Engine(planted, block)
        base = log_softmax(engine.logits(ids))

        def cost(selected: frozenset[str], engine: Int8Engine = engine, base: Array = base) -> float:
            found = log_softmax(engine.logits(ids, *selected))
            return float(np.expm1((np.exp(base) * (base - found)).sum(axis=1).mean()))

        works = [work for work in engine.device.works if isinstance(work, Gemm)]
        selection = selections[block] = select_int8([groups(work)[2] for work in works], cost)
        engine.close()
        print(
            block,
            {group: f"{value:+.3%}" for group, value in selection.costs.items()},
            f"{selection.total:+.3%}",
        )
        assert sum(map(selection.includes, works)) == len(selection.selected) and selection.total <= LIMIT
    ruined = "layer 1 ffn_down"
    assert selections[None].costs[ruined] > LIMIT and ruined not in selections[None].selected
    assert len(selections[None].selected) == len(selections[None].costs) - 1
    # Most columns have scales of their own.
    assert selections[32].costs[ruined] < selections[None].costs[ruined] / 10


def log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def _plant(source: Path, path: Path) -> None:
    """One column of a layer's weights a hundred times as large, and its inputs a hundredth: the model is the same."""
    data = bytearray(source.read_bytes())
    model = open_model(source)
    for name, rows, factor in (
        ("blk.1.ffn_down.weight", (slice(None), 5), 300.0),
        ("blk.1.ffn_up.weight", (5, slice(None)), 1 / 300),
    ):
        weights = model.gguf.raw(name).view(np.float32).copy()
        begin = data.index(weights.tobytes()[:256])
        weights[rows] *= factor
        data[begin : begin + weights.nbytes] = weights.tobytes()
    model.gguf.close()
    path.write_bytes(data)


@pytest.mark.soak
def test_the_gate_on_a_real_model() -> None:
    """Down-projections of Gemma 3 270M have inputs with outliers, for which a scale for a token is too coarse."""
    engine, ids = Int8Engine(model_path("gemma-3-270m"), None), list(range(1000, 1064))
    base = log_softmax(engine.logits(ids))

    def divergence(kind: str) -> float:
        return float((np.exp(base) * (base - log_softmax(engine.logits(ids, kind)))).sum(axis=1).mean())

    down, output = divergence("ffn_down"), divergence("attn_output")
    engine.close()
    print(f"KL of down {down:.4f}, of attention's output {output:.4f}")
    assert down > LIMIT and down > 1.5 * output

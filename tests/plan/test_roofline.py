"""Whatever is asked, nothing that `tandem plan` says is above what the hardware can do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.bench.hardware import PARTS, Calibration, Hardware, load_hardware
from tandem.errors import DeviceError
from tandem.kernels.abi import KV_TYPES
from tandem.model.architectures import ARCHITECTURES
from tandem.model.synthetic import SyntheticModel, _gemma3, _plain
from tandem.plan.predict import KERNELS, Planned
from tandem.plan.what_if import TARGET_DEPTHS, PlanOptions, experts, plan_of

CONTEXT = 1024
LAYOUTS = ("q4_0", "q4_1", "q5_0", "q8_0", "f16")
part = st.one_of(st.just(1.0), st.floats(0.001, 1.0))
rate = st.floats(-2, 5).map(lambda power: 10.0**power)


@st.composite
def hardware(draw: st.DrawFn) -> Hardware:
    """Of any speed, with kernels of any quality, perfect ones too."""
    reads, peak = draw(rate), draw(rate)
    us = {name: draw(st.sampled_from((0.0, 5.0))) for name in (*KERNELS, "other")}
    reached = Calibration(0.0, us, source="made up", **{name: draw(part) for name in PARTS})
    return Hardware(
        "random", "random", draw(st.sampled_from(("apu", "gpu", "cpu"))), True, reads, reads, reads * draw(part),
        peak * draw(part), peak, peak * draw(part), draw(st.integers(1, 64)), draw(st.floats(0.1, 100)), 0.0, {},
        reached,
    )  # fmt: skip


@st.composite
def planned(draw: st.DrawFn) -> Planned:
    layout = draw(st.sampled_from(LAYOUTS))
    model = SyntheticModel(f"smollm2-135m:{layout}")
    layers, kv_heads, size = (
        draw(st.integers(1, 6)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from((64, 128))),
    )
    heads, ffn = kv_heads * draw(st.integers(1, 4)), 64 * draw(st.integers(1, 8))
    if draw(st.booleans()):
        model.config = _gemma3(layers, 256, ffn, heads, kv_heads, size, draw(st.sampled_from((64, 512))), 512)
    else:
        family = draw(st.sampled_from(("llama", "qwen2", "qwen3")))
        model.config = _plain(
            family, layers, 256, ffn, heads, kv_heads, 512, head_dim=size, tied=draw(st.booleans())
        )
    model.architecture = ARCHITECTURES[model.config.architecture]
    return Planned(model, CONTEXT, draw(st.sampled_from(KV_TYPES)))


def within(rates: dict[str, Any]) -> None:
    limit, predicted = rates["limit"]["tokens_per_s"], rates["predicted"]["tokens_per_s"]
    assert 0 < predicted <= limit * (1 + 1e-9) < math.inf


@settings(max_examples=60, deadline=None, derandomize=True)
@given(planned(), planned(), hardware(), st.data())
def test_nothing_is_above_the_limit(
    model: Planned, draft: Planned, machine: Hardware, data: st.DataObject
) -> None:
    batches = data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=3))
    depths = data.draw(st.lists(st.integers(1, CONTEXT - 1), min_size=1, max_size=2))
    chances = data.draw(st.lists(st.floats(0, 0.99), min_size=1, max_size=2))
    target = data.draw(rate)
    wish = PlanOptions(CONTEXT, batches, depths, data.draw(st.integers(1, CONTEXT - 1)), chances, target)
    wish.check()
    found = plan_of(model, machine, wish, draft)
    within(found["prefill"])
    assert found["prefill"]["first_token_s"] >= found["prefill"]["first_token_limit_s"] * (1 - 1e-9)
    for row in found["decode"]:
        within(row)
        # By hand: each step reads the weights, and each token takes two operations of every one of them at least.
        limit = row["limit"]["tokens_per_s"] * (1 - 1e-9)
        assert limit <= row["batch"] * machine.read_gb_s * 1e9 / model.weights_read
        assert limit <= machine.peak_top_s * 1e12 / (2 * weights(model))
    for row in found["speculation"]:
        within(row)
        assert 1 <= row["tokens_per_step"] <= row["draft_tokens"] + 1
    assert [row["depth"] for row in found["target"]["rows"]] == [d for d in TARGET_DEPTHS if d < CONTEXT]
    for row in found["target"]["rows"]:
        predicted, limit = row["predicted"]["batch"], row["limit"]["batch"]
        assert predicted is None or (limit is not None and limit <= predicted)


def weights(model: Planned) -> float:
    """Of matrices that each token is multiplied by."""
    shapes = model.model.architecture.tensors(model.config)
    names = [name for name in shapes if len(shapes[name]) == 2 and name != "token_embd.weight"]
    head = 0 if "output.weight" in shapes else math.prod(shapes["token_embd.weight"])
    return sum(math.prod(shapes[name]) for name in names) + head


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.floats(1e6, 1e12), st.sampled_from(LAYOUTS), hardware())
def test_experts_are_within_it_too(active: float, layout: str, machine: Hardware) -> None:
    found = experts(active, layout, machine)
    assert 0 < found["predicted_tokens_per_s"] <= found["limit_tokens_per_s"] * (1 + 1e-9)
    assert found["limit_tokens_per_s"] <= machine.peak_top_s * 1e12 / (2 * active) * (1 + 1e-9)
    assert found["limit_tokens_per_s"] <= machine.read_gb_s * 1e9 / found["bytes_per_token"] * (1 + 1e-9)


WRONG = (
    {"usual_gb_s": 90.0},
    {"read_gb_s": 91.0},
    {"matrix_tflop_s": 15.0},
    {"dot_top_s": 0.0},
    {"matrix_ops": 1.1},
)


@pytest.mark.fast
@pytest.mark.parametrize("wrong", WRONG)
def test_hardware_that_would_allow_it_is_refused(wrong: dict[str, Any]) -> None:
    right = load_hardware("phoenix-780m")
    with pytest.raises(DeviceError):
        replace(right.calibration if "matrix_ops" in wrong else right, **wrong)

"""`tandem plan --npu`: the sum by published rates, and what is said of it."""

from __future__ import annotations

import json

import pytest

from tandem.bench.hardware import load_hardware
from tandem.cli import main
from tandem.errors import DeviceError
from tandem.model.synthetic import SyntheticModel
from tandem.plan.npu import GOOD_SHADER, INT32_TOP_S, npu_lines, npu_plan
from tandem.plan.predict import Planned
from tandem.plan.what_if import PlanOptions, plan_of

PHOENIX = load_hardware("phoenix-780m")


@pytest.fixture(scope="module")
def planned() -> Planned:
    return Planned(SyntheticModel("gemma-3-27b:q4_0"), 4096)


def test_prompts_gain_and_decoding_does_not(planned: Planned) -> None:
    found = npu_plan(planned, PHOENIX, 512, 128)
    good, ours = found["prefill"]
    assert 1.4 <= good["speedup"] <= 1.6 and good["recommended"] and 32 <= good["min_prompt_tokens"] <= 128
    # Together they cannot be faster than the sum of their rates, and most of that is reached.
    most = 1 + INT32_TOP_S / (PHOENIX.matrix_tflop_s * GOOD_SHADER)
    assert 0.9 * most < good["speedup"] < most
    faster, slower = sorted((good, ours), key=lambda row: -float(row["without_npu_tokens_per_s"]))
    assert 1 < faster["speedup"] < slower["speedup"], "the NPU adds least to the faster kernels"
    predicted = plan_of(planned, PHOENIX, PlanOptions(batches=(1,)))["prefill"]["predicted"]["tokens_per_s"]
    assert ours["without_npu_tokens_per_s"] == pytest.approx(predicted), (
        "one figure for our kernels without the NPU"
    )
    for row in found["decode"]:
        assert row["speedup"] == 1 and not row["recommended"] and row["npu_column_share"] == 0
    assert found["attention"]["speedup"] < 1


def test_the_sum_is_the_formula(planned: Planned) -> None:
    """A dispatch of a second: nothing is given to the NPU."""
    assert PHOENIX.npu
    slow = load_hardware("phoenix-780m")
    object.__setattr__(slow, "npu", {**PHOENIX.npu, "dispatch_us": 1e6})
    assert all(row["speedup"] == 1 for row in npu_plan(planned, slow, 512, 128)["prefill"])


def test_its_copy_of_the_weights_takes_memory(planned: Planned) -> None:
    weights = 62 * (2 * 5376 * 4096 + 2 * 5376 * 2048 + 3 * 5376 * 21504)  # of all layers, a byte each
    found = npu_plan(planned, PHOENIX, 512, 128)
    assert found["memory"]["copy"] == pytest.approx(weights) and found["memory"]["fits"]
    assert found["rates"]["weights"] == pytest.approx(32 / 18, rel=0.001), "of q4_0"
    assert "25.6 GB more" in npu_lines(found)[1] and npu_lines(found)[1].endswith(": fits")
    little = npu_plan(planned, load_hardware("phoenix-780m", 32), 512, 128)
    assert not little["memory"]["fits"] and "DOES NOT FIT" in npu_lines(little)[1]


def test_every_figure_says_that_it_was_not_run(planned: Planned) -> None:
    lines = npu_lines(npu_plan(planned, PHOENIX, 512, 128))
    assert "estimate; not yet run" in lines[0] and "emulated; not yet run on a Phoenix" in lines[0]
    assert "at most about 1.5x for prompts against a good shader, and nothing for decoding" in lines[-1]


def test_hardware_without_an_npu(planned: Planned) -> None:
    with pytest.raises(DeviceError, match="h200 has no known NPU"):
        npu_plan(planned, load_hardware("h200"), 512, 128)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "gemma-3-1b:q4_0", "--hardware", "phoenix-780m", "-b", "1", "-c", "1024"]
    assert main([*command, "--npu"]) == 0
    assert "emulated; not yet run on a Phoenix" in capsys.readouterr().out
    assert main([*command, "--npu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["npu"]["prefill"][0]["speedup"] > 1
    assert main(command) == 0
    assert "NPU" not in capsys.readouterr().out

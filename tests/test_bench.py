"""`tandem bench`: what is counted, how rounds are run, what is printed and refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tandem import cli
from tandem.bench import bandwidth, runs
from tandem.bench.bandwidth import measure_bandwidth
from tandem.bench.profile import profile
from tandem.bench.runs import Bench, Workload, added, step_costs
from tandem.devices.cpu.device import CPUDevice
from tandem.errors import DoesNotFitError, ModelNotFoundError
from tandem.model.synthetic import SyntheticModel

WORKLOADS = [Workload("prefill", 40), Workload("decode", 4, 3, 100), Workload("decode", 2, 1, 608)]
LAYERS = 2


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    device = CPUDevice(threads=2)
    yield Bench(SyntheticModel("smollm2-135m:q4_0", LAYERS), device, WORKLOADS)
    device.close()


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "WARM_UP", 0.0)
    monkeypatch.setattr(bandwidth, "ENOUGH", 0.01)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "billions"),
    [("gemma-3-1b", 1.000), ("gemma-3-4b", 3.880), ("gemma-3-12b", 11.766), ("gemma-3-27b", 27.009),
     ("llama-3-8b", 8.030), ("llama-3-70b", 70.554), ("smollm2-135m", 0.1345), ("qwen2.5-1.5b", 1.544),
     ("qwen2.5-7b", 7.616), ("qwen3-8b", 8.191), ("qwen3-32b", 32.762)],
)  # fmt: skip
def test_shapes_have_the_parameters_of_the_published_models(name: str, billions: float) -> None:
    model = SyntheticModel(name)
    shapes = model.architecture.tensors(model.config)
    assert sum(map(math.prod, shapes.values())) / 1e9 == pytest.approx(billions, abs=1e-3)


@pytest.mark.fast
def test_the_27b_in_q4_0_has_the_bytes_of_its_file() -> None:
    assert SyntheticModel("gemma-3-27b:q4_0").nbytes == pytest.approx(
        25.598e9 * 4.5 / 8 + 1.410e9 * 6.5625 / 8, rel=1e-3
    )


@pytest.mark.fast
@pytest.mark.parametrize("name", ["gemma-3-2b", "gemma-3-27b:q9", ""])
def test_unknown_shapes_and_formats(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"use one of gemma-3-1b, .*then : and one of q4_0"):
        SyntheticModel(name)


def test_bytes_and_operations_are_those_of_a_hand_count(bench: Bench) -> None:
    program, config = bench.engine.program, bench.engine.model.config
    one, deep = (added(step_costs(program, [(depth, 1)])) for depth in (0, 1000))
    matrices = bench.engine.model.nbytes
    assert matrices < one.bytes < 1.03 * matrices
    weights = LAYERS * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576) + 49152 * 576
    assert one.ops == pytest.approx(2 * weights, rel=0.01)
    per_position = LAYERS * 2 * config.kv_heads * config.head_dim * 2
    assert deep.bytes - one.bytes == 1000 * per_position
    assert deep.ops - one.ops == 1000 * LAYERS * 4 * config.q_heads * config.head_dim


def test_a_window_bounds_what_attention_reads() -> None:
    model = SyntheticModel("gemma-3-1b", LAYERS)
    device = CPUDevice(threads=1)
    program = Bench(model, device, [Workload("decode", 1, 1, 0)]).engine.program
    device.close()
    near, far = (added(step_costs(program, [(depth, 1)])).bytes for depth in (511, 5000))
    assert near == far  # both layers look back on 512 positions


def test_rounds_are_what_was_asked_for(bench: Bench) -> None:
    for workload, steps in zip(WORKLOADS, (1, 4, 2), strict=True):
        row = bench.measure(workload, rounds=3)
        assert len(row.seconds) == 3 and row.steps == steps
        assert row.interval[0] <= row.tokens_per_s <= row.interval[1]
    assert bench.engine.cache.free_blocks == bench.engine.cache.blocks, "rounds give their memory back"


def test_a_known_delay_is_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    recording: Any = bench.engine.turns[0].recording
    start = recording.start
    monkeypatch.setattr(recording, "start", lambda: (time.sleep(0.05), start()))
    row = bench.measure(Workload("decode", 4, 3, 100), rounds=3)
    assert 4 * 0.05 < min(row.seconds) < 4 * 0.05 + 0.5  # other processes may be in the way
    assert row.tokens_per_s == 12 / row.median


def test_a_profile_has_every_launch(bench: Bench) -> None:
    groups = profile(bench, Workload("decode", 4, 3, 100))
    assert sum(group.launches for group in groups) == len(bench.engine.program.launches)
    assert {group.name for group in groups if group.launches == LAYERS} >= {"ffn_act", "attn", "kv"}
    total = added(step_costs(bench.engine.program, [(100, 1)] * 3))
    assert sum(group.cost.bytes for group in groups) == pytest.approx(total.bytes)
    assert bench.engine.cache.free_blocks == bench.engine.cache.blocks


def test_more_sequences_than_there_is_memory_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, calls = bench.engine.cache, []
    reserve = cache.reserve

    def refuse_the_last(tables: Any, tokens: int) -> bool:
        calls.append(tokens)
        return len(calls) < 20 and reserve(tables, tokens)

    monkeypatch.setattr(cache, "reserve", refuse_the_last)
    with pytest.raises(DoesNotFitError, match="no room for the keys and values of 3 sequences of 105 tokens"):
        bench.round(Workload("decode", 4, 3, 100))
    assert len(calls) == 20 and cache.free_blocks == cache.blocks, "what the others had is given back"


def test_the_bandwidth_of_the_cpu() -> None:
    device = CPUDevice(threads=1)
    rate, how = measure_bandwidth(device, 100_000_000)
    device.close()
    assert how == "reads" and 1e8 < rate < 1e12


def test_the_table_and_the_data(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cli.bench.SyntheticModel", lambda name: SyntheticModel(name, LAYERS))
    arguments = [
        "bench",
        "--synthetic",
        "smollm2-135m:q8_0",
        "--device",
        "cpu",
        "-p",
        "16",
        "-n",
        "2",
        "-b",
        "1,2",
    ]
    arguments += ["-d", "0,32", "--profile"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    for label in ("prefill 16 ", "decode 2, batch 2 ", "prefill 16 at 32 ", "decode 2, batch 1 at 32 "):
        assert f"\n{label}" in shown
    assert "matmul_q8_0" in shown and "GB/s; median of 5 rounds" in shown
    assert cli.main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in data["rows"]][:2] == ["prefill 16", "decode 2, batch 1"]
    assert all(len(row["seconds"]) == 5 and row["of_bandwidth"] > 0 for row in data["rows"])
    assert set(data["profiles"]) == {row["label"] for row in data["rows"]}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a MODEL or --synthetic"),
        (["smollm2", "--synthetic", "gemma-3-1b"], "give either a MODEL or --synthetic"),
        (["--synthetic", "gemma-3-1b", "-p", "0", "-n", "0"], "nothing to measure"),
        (["--synthetic", "gpt"], "no synthetic model 'gpt'"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_run_imports_nothing_of_it() -> None:
    script = (
        "import sys, tandem.cli.run, tandem.engine.llm\n"
        "sys.exit(any(name.startswith('tandem.bench') or 'synthetic' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_more_than_the_memory_gives_is_called_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cli.bench.SyntheticModel", lambda name: SyntheticModel(name, LAYERS))
    monkeypatch.setattr("tandem.cli.bench.measure_bandwidth", lambda device, nbytes: (1e3, "a lie"))
    assert (
        cli.main(["bench", "--synthetic", "smollm2-135m", "--device", "cpu", "-p", "0", "-n", "1", "-r", "1"])
        == 0
    )
    assert "Wrong: decode 1, batch 1 is above the bandwidth" in capsys.readouterr().out

"""`tandem bench`: what is counted, how rounds are run, what is printed and refused."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem import cli
from tandem.bench import bandwidth, rounds
from tandem.bench.bandwidth import measure_bandwidth
from tandem.bench.benchmark import take
from tandem.bench.profile import profile, step_written
from tandem.bench.result import BenchResult, Row
from tandem.bench.roofline import MAX_SHARE, measure_limits
from tandem.bench.rounds import Bench, Round, Workload
from tandem.bench.rows import make_row
from tandem.bench.sensors import Sensors
from tandem.bench.step_cost import added, min_cost, step_costs
from tandem.cli.bench import read_result
from tandem.cli.terminal import without_folder
from tandem.devices.cpu.device import CPUDevice
from tandem.errors import DoesNotFitError, ModelNotFoundError, RequestError
from tandem.kernels.abi import CHUNK_SOURCE, CHUNK_TOKENS
from tandem.kernels.panels import panel_layout
from tandem.kernels.states import NO_STATE
from tandem.model.model import open_model
from tandem.model.synthetic import SyntheticModel
from tandem.plan.predict import Planned
from tests.bench.data import result
from tests.models.draft_heads import GOLDENS

WORKLOADS = [Workload("prefill", 40), Workload("decode", 4, 3, 100), Workload("decode", 2, 1, 608)]
LAYERS = 2


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    device = CPUDevice(threads=2)
    yield Bench(SyntheticModel("smollm2-135m:q4_0", LAYERS), device, WORKLOADS)
    device.close()


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "WARM_UP", 0.0)
    monkeypatch.setattr(bandwidth, "MIN_SECONDS", 0.01)


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
    assert SyntheticModel("gemma-3-27b:q4_0").nbytes(panel_layout) == pytest.approx(
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
    matrices = bench.engine.model.nbytes(panel_layout)
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


@pytest.mark.fast
def test_the_least_that_the_27b_reads_and_computes_a_token() -> None:
    """As tandem plan has it, and by hand: the weights of layers and head; a key and a value a layer."""
    planned = Planned(SyntheticModel("gemma-3-27b:q4_0"), 4096)
    token = min_cost(planned.program, [(0, 1)])
    keys = 62 * 2 * 16 * 128 * 2
    assert token.bytes == pytest.approx(15.57e9, rel=2e-3) and token.bytes == planned.weights_read + keys
    assert token.ops == pytest.approx(2 * (25.598e9 + 1.410e9), rel=1e-3)
    deep = min_cost(planned.program, [(3000, 1)] * 8)
    assert deep.bytes - token.bytes == pytest.approx(8 * (52 * 1024 + 10 * 3001) * keys / 62 - keys)


def test_rounds_are_what_was_asked_for(bench: Bench) -> None:
    for workload, steps in zip(WORKLOADS, (1, 4, 2), strict=True):
        row = bench.measure(workload, rounds=3)
        assert len(row.seconds) == 3 and row.steps == steps
        assert row.interval[0] <= row.tokens_per_s <= row.interval[1]
    assert bench.engine.cache.free_blocks == bench.engine.cache.blocks, "rounds give their memory back"


def test_a_known_delay_is_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    recording: Any = bench.engine.step_slots[0].recording
    start = recording.start
    monkeypatch.setattr(recording, "start", lambda: (time.sleep(0.05), start()))
    row = bench.measure(Workload("decode", 4, 3, 100), rounds=3)
    assert 4 * 0.05 < min(row.seconds) < 4 * 0.05 + 0.5  # other processes may be in the way
    assert row.tokens_per_s == 12 / row.median
    assert all(0.05 < each.first < each.seconds and min(each.steps) > 0.05 for each in row.rounds)


@pytest.mark.parametrize("tokens", [1, 8, 512])
def test_a_gpu_is_warm_before_it_is_measured(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: the first round compiles for 3 s, and the GPU is slow for its first 1.5 s of work."""
    now, busy = 0.0, 0.0

    class Gpu(Bench):
        def __init__(self) -> None:
            self.engine = SimpleNamespace(device=None)  # type: ignore[assignment]

        def round(self, workload: Workload) -> Round:
            nonlocal now, busy
            seconds = 0.004 * workload.tokens * (1.0 if busy > 1.5 else 3.0)
            now, busy = now + seconds + (0.0 if busy else 3.0), busy + seconds
            return Round(seconds, seconds, [seconds])

    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: now))
    gpu = Gpu()
    gpu.warm_up(Workload("decode", tokens))
    assert gpu.round(Workload("decode", tokens)).seconds == pytest.approx(0.004 * tokens)
    assert now < 3.0 + rounds.MAX_GPU_WARM_UP + 0.02 * tokens


def test_a_planted_outlier_is_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own, so that what other processes do has no part in it."""
    recording: Any = bench.engine.step_slots[0].recording
    start, steps, now = recording.start, itertools.count(), 0.0
    slow = 4 * 3  # steps of the round that warms up, and of two more

    def start_after_a_while() -> None:
        nonlocal now
        step = next(steps)
        now += 1.0 if step == slow else 0.01 + 1e-5 * step
        start()

    monkeypatch.setattr(recording, "start", start_after_a_while)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: now))
    sensors = Sensors(root=Path("/nowhere"))
    measured, readings, _ = take(bench, Workload("decode", 4, 3, 100), 5, sensors)
    limits = measure_limits(CPUDevice(threads=1), 1_000_000)
    row = make_row(measured, readings, sensors, limits)
    assert row["outliers"] == [2] and len(row["samples"]) == 5 and row["samples"][2] < 12
    assert any(warning.startswith("round 3 of 5 is an outlier") for warning in row["warnings"])


def test_a_profile_has_every_launch(bench: Bench) -> None:
    groups = profile(bench, Workload("decode", 4, 3, 100))
    assert sum(group.launches for group in groups) == len(bench.engine.program.launches)
    assert {group.name for group in groups if group.launches == LAYERS} >= {"ffn_act", "attn", "kv"}
    total = added(step_costs(bench.engine.program, [(100, 1)] * 3))
    assert sum(group.cost.bytes for group in groups) == pytest.approx(total.bytes)
    assert bench.engine.cache.free_blocks == bench.engine.cache.blocks


def test_a_profile_of_recurrent_layers_reads_and_writes_states() -> None:
    with open_model(GOLDENS / "qwen35.gguf") as model:
        workload = Workload("decode", 1, 2, 16)
        recurrent = Bench(model, CPUDevice(threads=1), [workload])
        with step_written(recurrent, workload, [(16, 1)] * 2) as step_slot:
            chunks = step_slot.batch.inputs.chunks[:2]
            assert chunks[:, CHUNK_TOKENS].tolist() == [1, 1]
            assert len({NO_STATE, *chunks[:, CHUNK_SOURCE].tolist()}) == 3
            assert step_slot.batch.inputs.states[:2].tolist() == chunks[:, CHUNK_SOURCE].tolist()
        states = recurrent.engine.cache.states
        assert states and states.num_free == len(states.references)


def test_a_profile_is_of_the_launches_that_the_device_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it fuses some: here, without the last."""
    program = bench.engine.program
    fused = replace(program, launches=program.launches[:-1])
    monkeypatch.setattr(bench.engine.device, "step_program", lambda *_: fused)
    monkeypatch.setattr("tandem.bench.profile.launch_seconds", lambda *_: [1.0] * len(fused.launches))
    groups = profile(bench, Workload("decode", 4, 3, 100))
    assert sum(group.launches for group in groups) == len(fused.launches)
    assert "sample" not in {group.kernel for group in groups}


def test_more_sequences_than_there_is_memory_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, calls = bench.engine.cache, []
    reserve = cache.reserve

    def refuse_the_last(tables: Any, tokens: int) -> bool:
        calls.append(tokens)
        return len(calls) < 20 and reserve(tables, tokens)

    monkeypatch.setattr(cache, "reserve", refuse_the_last)
    with pytest.raises(DoesNotFitError, match="KV cache of 3 sequences of 105 tokens does not fit"):
        bench.round(Workload("decode", 4, 3, 100))
    assert len(calls) == 20 and cache.free_blocks == cache.blocks, "what the others had is given back"


def test_the_bandwidth_of_the_cpu() -> None:
    device = CPUDevice(threads=1)
    rate, how = measure_bandwidth(device, 100_000_000)
    device.close()
    assert how == "reads" and 1e8 < rate < 1e12


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that measure a model of two layers."""
    monkeypatch.setattr(
        "tandem.cli.bench.SyntheticModel", lambda name, **options: SyntheticModel(name, LAYERS, **options)
    )
    return [
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


def test_the_table_and_the_data(small: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main([*small, "-d", "0,32", "--profile", "--json"]) == 0
    text = capsys.readouterr().out
    data: BenchResult = json.loads(text)
    assert data.keys() == BenchResult.__annotations__.keys() and data["schema"] == 1
    assert [row["label"] for row in data["rows"]][:2] == ["prefill 16", "decode 2, batch 1"]
    for row in data["rows"]:
        assert row.keys() == Row.__annotations__.keys()
        assert len(row["seconds"]) == 5 and len(row["step_seconds"]) == 5 * row["steps"]
        assert 0 < row["ttft"] <= max(row["seconds"]) and row["of_roofline"] > 0
        assert row["valid"] == (row["of_roofline"] <= MAX_SHARE)
    assert set(data["profiles"]) == {row["label"] for row in data["rows"]}
    assert data["limits"]["ops_per_s"] and data["command"].startswith("tandem bench --synthetic")

    older = tmp_path / "older.json"
    older.write_text(text)
    assert cli.main([*small, "-d", "0,32", "--profile", "--compare", str(older)]) == 0
    shown = capsys.readouterr().out
    for label in ("prefill 16", "decode 2, batch 2", "prefill 16 at 32", "decode 2, batch 1 at 32"):
        assert shown.count(f"\n{label}  ") == 2, "measured, and compared"
    assert "matmul_q8_0" in shown and "GB/s (reads)" in shown and "median of 5 rounds" in shown
    assert any(verdict in shown for verdict in ("faster", "slower", "the same"))


def test_other_forms(small: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    assert cli.main([*small, "-r", "1", "--csv", "--html", str(page)]) == 0
    lines = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [line["label"] for line in lines] == ["prefill 16", "decode 2, batch 1", "decode 2, batch 2"]
    assert all(float(line["low"]) <= float(line["tokens_per_s"]) <= float(line["high"]) for line in lines)
    assert "<html" in page.read_text() and str(tmp_path) not in page.read_text()
    assert cli.main([*small, "-r", "1", "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert "\n| test | tok/s | 95% |" in shown and "\n| decode 2, batch 2 | " in shown
    assert "| GB/s | TOP/s |" in shown


def test_figures_are_shown_though_the_page_cannot_be_written_and_the_other_way_round(
    small: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    page = tmp_path / "out.html"
    with monkeypatch.context() as patch:
        patch.setattr("tandem.bench.html_report.write_html", full)
        assert cli.main([*small, "-r", "1", "--html", str(page)]) == 1
    shown = capsys.readouterr()
    assert "decode 2, batch 2" in shown.out and shown.err == "tandem: No space left on device\n"
    monkeypatch.setattr("tandem.cli.bench._print", full)
    assert cli.main([*small, "-r", "1", "--html", str(page)]) == 1 and "<html" in page.read_text()


def test_a_clock_that_lies_is_found_out(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs 10,000 times too slowly, while the limits are measured by a true one."""
    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() / 1e4))
    assert cli.main([*small, "-r", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("INVALID") == 3
    assert re.search(
        r"Invalid: decode 2, batch 1: [\d,e+.]+ GB/s is above the roofline of .*\(memory\)", shown
    )
    assert re.search(r"Invalid: prefill 16: .* is above the roofline", shown)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--synthetic", "gpt"], "no synthetic model 'gpt'"),
        (["--synthetic", "smollm2-135m", "-d", "200000"], "200512 tokens exceed the trained context of"),
        (["--synthetic", "gemma-3-1b", "--compare", "none.json"], "none.json cannot be read"),
        (["--synthetic", "gemma-3-1b", "--compare", __file__], "is not a result of `tandem bench --json`"),
        (["--synthetic", "gemma-3-1b", "--html", "no/such/x.html"], "no/such/x.html cannot be written: name"),
        (["--synthetic", "gemma-3-1b", "--html", "/proc/x.html"], "/proc/x.html cannot be written: name"),
        (
            ["no-such-model", "--against", "llama.cpp", "--peer", "/no/python"],
            "/no/python cannot be run: give --peer",
        ),
    ],
)
def test_what_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench"], "no model given: name a MODEL, such as smollm2 or a .gguf file, or a shape"),
        (["tune"], "no model given: name a MODEL, such as smollm2 or a .gguf file, or a shape"),
        (["bench", "smollm2", "--synthetic", "gemma-3-1b"], "exclude each other"),
        (["bench", "--synthetic", "gemma-3-1b", "-p", "0", "-n", "0"], "nothing to measure"),
        (["bench", "--synthetic", "smollm2-135m", "--peer", "python3"], "add --against llama.cpp"),
        (["bench", "--synthetic", "gemma-3-1b", "--against", "llama.cpp"], "llama.cpp needs a file"),
        (["bench", "--synthetic", "gemma-3-1b", "--csv", "--profile"], "use --json or --markdown"),
        (["bench", "smollm2", "--placement", "npu-attention", "--profile"], "leave --profile and --html out"),
        (["plan", "gemma-3-1b"], "--hardware this, or one of phoenix-780m, "),
        (["bench", "serve", "http://127.0.0.1:9", "--rate", "0"], "above 0"),
        (["bench", "serve", "http://127.0.0.1:9", "--rate", "1,nan"], "above 0"),
    ],
)
def test_wrong_usage_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("tandem: ") and error.count("\n") == 1


@pytest.mark.fast
def test_a_batch_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "--synthetic", "smollm2-135m", "-b", "1,0"])
    assert stopped.value.code == 2 and "-b/--batch: 0 is less than 1" in capsys.readouterr().err


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"schema": 99}, "was written by another version of Tandem"),
        ({"rows": []}, "is not a result of"),
        ({"rows": [{"label": "prefill 16"}]}, "is not a result of"),
        ({"rows": [{"label": "a", "valid": True, "median": 1.0, "samples": []}]}, "is not a result of"),
        ({"machine": {}}, "is not a result of"),
        ({"model": None, "kv": ...}, "is not a result of"),
    ],
)
def test_an_older_result_must_be_whole(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    whole = {**result(), **change}
    file = tmp_path / "older.json"
    file.write_text(json.dumps({key: value for key, value in whole.items() if value is not ...}))
    if not message:
        assert read_result(file)["rows"]
        return
    with pytest.raises(RequestError, match=message):
        read_result(file)


@pytest.mark.fast
def test_results_name_no_folders(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    said = {str(file): "old.json", f"--compare={file}": "--compare=old.json", "./m.gguf": "m.gguf"}
    for argument in ("smollm2", "hf.co/user/repo:Q4_0", "--json", "gemma-3-1b:q4_0", "-p"):
        said[argument] = argument
    assert {argument: without_folder(argument) for argument in said} == said


def test_run_imports_nothing_of_it() -> None:
    script = (
        "import sys, tandem.cli.run, tandem.engine.llm\n"
        "sys.exit(any(name.startswith('tandem.bench') or 'synthetic' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0

"""`tandem plan`: what it counts equals hand counts, what it says keeps its form, and what it cannot do it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tandem.bench.hardware import NOT_RUN, RAN, Hardware, known_hardware, load_hardware
from tandem.bench.step_cost import step_costs
from tandem.cli import main
from tandem.cli.plan import _print_step_down
from tandem.engine.image_encoder import encoder_program
from tandem.errors import DeviceError, ModelNotFoundError, RequestError
from tandem.kernels.panels import panel_layout
from tandem.model.model import open_model
from tandem.model.synthetic import SyntheticModel
from tandem.model.vision import VisionModel
from tandem.plan.predict import Planned
from tandem.plan.published_mtp import rate_of_share
from tandem.plan.what_if import PlanOptions, experts, parameters, plan_of
from tests.cli.tiny_model import write_tiny_model
from tests.models.test_vision import GOLDENS as VISION

pytestmark = pytest.mark.fast

# Gemma 3 27B by hand: 62 layers of q and o (32 heads of 128), k and v (16), gate, up and down; one embedding.
LAYER = 2 * 5376 * 4096 + 2 * 5376 * 2048 + 3 * 5376 * 21504
LAYERS, EMBEDDING = 62 * LAYER, 262208 * 5376
Q4_0, Q6_K = 18 / 32, 210 / 256  # bytes a weight
KV_TOKEN = 2 * 16 * 128 * 2  # bytes a layer keeps of a token, in float16


@cache
def gemma(kv: str = "f16", context: int = 8192) -> Planned:
    return Planned(SyntheticModel("gemma-3-27b:q4_0"), context, kv)


PHOENIX = load_hardware("phoenix-780m")


def plan(planned: Planned, hardware: Hardware = PHOENIX, **wishes: Any) -> dict[str, Any]:
    return plan_of(planned, hardware, PlanOptions(context=8192, **wishes))


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_encoder_beside_a_model_needs_memory(capsys: pytest.CaptureFixture[str]) -> None:
    with VisionModel.open(VISION / "mmproj-gemma3.gguf") as vision:
        encoder, _, _ = encoder_program(vision, panel_layout)
    found = said(capsys, str(VISION / "gemma3.gguf"), "--hardware", "phoenix-780m", "-c", "128")
    parts = found["plans"][0]["memory"]["parts"]
    assert parts["vision encoder"] == sum(encoder.arena_bytes.values()) > 100_000


def test_parameters_by_hand() -> None:
    assert round(LAYERS / 1e9, 3) == 25.598 and round(EMBEDDING / 1e9, 3) == 1.410
    assert parameters(gemma().model) == {"layers": LAYERS, "embedding": EMBEDDING, "head": 0}


def test_bytes_and_operations_by_hand() -> None:
    program = gemma().program
    costs = list(zip(program.launches, step_costs(program, [(0, 1)]), strict=True))
    ops = sum(cost.ops for launch, cost in costs if launch.kernel.name.startswith("matmul"))
    assert ops == 2 * (LAYERS + EMBEDDING)
    norms = 62 * (4 * 5376) * 4 + 5376 * 4  # vectors of float32; those of q and k are rotation's
    assert gemma().weights_read == LAYERS * Q4_0 + EMBEDDING * Q6_K + norms
    assert gemma().weights_read == pytest.approx(15.57e9, rel=1e-3)


def test_keys_and_values_by_hand() -> None:
    """52 layers see 1,024 positions, 10 see all."""
    limits = [gemma().limit(PHOENIX, [(depth, 1)]).memory for depth in (4095, 8190)]
    first = gemma().weights_read + (52 * 1024 + 10 * 4096) * KV_TOKEN
    assert limits[0] * PHOENIX.read_gb_s * 1e9 == pytest.approx(first, rel=1e-9)
    more = (limits[1] - limits[0]) * PHOENIX.read_gb_s * 1e9
    assert more == pytest.approx(10 * 4095 * KV_TOKEN, rel=1e-6)


def test_one_stream_is_bound_by_memory_and_prompts_by_arithmetic() -> None:
    found = plan(gemma())
    one = found["decode"][0]
    assert one["limit"]["bottleneck"] == "memory" and one["limit"]["tokens_per_s"] == pytest.approx(
        5.55, abs=0.03
    )
    assert found["prefill"]["limit"]["bottleneck"] == "arithmetic"
    assert found["prefill"]["first_token_s"] > found["prefill"]["first_token_limit_s"]


@pytest.mark.parametrize("name", known_hardware())
def test_no_prediction_beats_the_limit(name: str) -> None:
    found = plan(gemma(), load_hardware(name), batches=(1, 9, 64))
    for row in (*found["decode"], found["prefill"]):
        assert row["predicted"]["tokens_per_s"] < row["limit"]["tokens_per_s"]


@pytest.mark.parametrize("name", known_hardware())
def test_every_figure_has_a_source(name: str) -> None:
    hardware = load_hardware(name)
    figures = {f.name for f in fields(Hardware) if f.type in ("float", "int")}
    assert figures == set(hardware.sources) and all(hardware.sources.values())
    assert hardware.usual_gb_s <= hardware.read_gb_s <= hardware.pin_gb_s
    assert hardware.npu is None or hardware.npu["source"]


@pytest.mark.parametrize("name", known_hardware())
def test_what_ran_has_its_results_in_the_repository_and_all_else_says_so(name: str) -> None:
    hardware, root = load_hardware(name), Path(__file__).parents[2]
    cited = re.findall(r"benchmarks/results/[\w.*-]+\.json", " ".join(hardware.sources.values()))
    assert all(list(root.glob(file)) for file in cited)
    assert hardware.status == (RAN if cited else NOT_RUN)
    assert hardware.ran or "not yet run" in hardware.status


def test_int8_keys_and_values_take_half_and_are_faster() -> None:
    half, whole = gemma("q8"), gemma()
    assert 0.5 < half.kv_bytes(8192, 1) / whole.kv_bytes(8192, 1) < 0.55
    rows = [plan(each, batches=(32,), depths=(4095,))["decode"][0] for each in (half, whole)]
    assert rows[0]["limit"]["tokens_per_s"] > 1.3 * rows[1]["limit"]["tokens_per_s"]


def test_a_model_without_attention_on_an_amd_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    mamba = str(VISION.parent / "mamba2.gguf")
    found = said(capsys, mamba, "--hardware", "phoenix-780m", "-c", "128", "-p", "64", "-d", "64")
    assert found["plans"][0]["decode"]


def test_a_model_that_generates_nothing_is_refused() -> None:
    model = open_model(VISION.parent / "encoders" / "bert.gguf")
    with closing(model.gguf), pytest.raises(RequestError, match="a plan is of generating ones"):
        Planned(model, 64)


def test_81_tokens_a_second() -> None:
    """The least batch is the least: one sequence fewer is not enough."""
    row = plan(gemma(), target=81.0)["target"]["rows"][0]
    batch = row["limit"]["batch"]
    seconds = [gemma().limit(PHOENIX, [(512, 1)] * n).total for n in (batch - 1, batch)]
    assert (batch - 1) / seconds[0] < 81 <= batch / seconds[1]
    predicted = row["predicted"]["batch"]
    assert predicted is None or predicted / gemma().predict(PHOENIX, [(512, 1)] * predicted).total >= 81


def test_a_target_is_looked_for_at_the_depths_asked_for_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "gemma-3-1b", "--hardware", "h200", "-d", "2000", "-b", "1", "--target", "81")
    assert [row["depth"] for row in found["plans"][0]["target"]["rows"]] == [512, 2000]


def test_speculation_counts_the_draft() -> None:
    draft = Planned(SyntheticModel("gemma-3-1b:q4_0"), 8192)
    wish = PlanOptions(context=8192, acceptance=(0.0, 0.7))
    never, often = plan_of(gemma(), PHOENIX, wish, draft)["speculation"]
    plain = gemma().predict(PHOENIX, [(128, 1)]).total
    assert never["draft_tokens"] == 1 and never["predicted"]["seconds"] > plain
    assert often["predicted"]["tokens_per_s"] > 1.5 / plain
    assert often["tokens_per_step"] == pytest.approx((1 - 0.7 ** (often["draft_tokens"] + 1)) / 0.3)


@pytest.mark.parametrize(
    ("hardware", "plain", "drafted"), [("phoenix-780m", 4.1, 8.4), ("strix-halo-8060s", 11.5, 23.7)]
)
def test_a_draft_head_beside_what_others_measured(
    hardware: str, plain: float, drafted: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """The speed-up is within 10% of the published one; the rates are of our kernels and of a smaller file."""
    command = ["qwen3.6-27b:q4_k_m", "--hardware", hardware, "-b", "1", "-d", "128", "--mtp"]
    found = said(capsys, *command)["plans"][0]
    row = found["published"][0]
    assert (row["plain"], row["drafted"], row["draft_tokens"]) == (plain, drafted, 2)
    gain = row["predicted_drafted"] / row["predicted_plain"]
    assert gain == pytest.approx(drafted / plain, rel=0.1)
    assert row["predicted_plain"] == pytest.approx(found["decode"][0]["predicted"]["tokens_per_s"])
    assert rate_of_share(row["accepted"], 2) == pytest.approx(row["acceptance"])
    assert form(row) == PUBLISHED_ROW
    assert main(["plan", *command]) == 0
    text = capsys.readouterr().out
    assert f"{plain} tok/s, and {drafted} with 2 draft tokens" in text and row["source"] in text
    assert found["memory"]["parts"]["recurrent states"] > 1e9


def test_without_a_draft_head_its_weights_are_not_counted() -> None:
    with_head, without = (
        Planned(SyntheticModel("qwen3.6-27b:q4_k_m", layers=8), 1024, mtp=mtp) for mtp in (True, False)
    )
    assert with_head.program.arena_bytes["weights"] > without.program.arena_bytes["weights"]
    times = [planned.predict(PHOENIX, [(128, 1)]).total for planned in (with_head, without)]
    assert times[0] == pytest.approx(times[1], rel=0.001), "a step stores hidden states"
    assert with_head.kv_bytes(1024, 1) == 1.5 * without.kv_bytes(1024, 1)


def test_a_draft_takes_memory_too(capsys: pytest.CaptureFixture[str]) -> None:
    gib = "16.4"  # the model has room in it with one sequence, and no draft
    command = ["gemma-3-27b", "--hardware", "rtx-4090", "--memory", gib, "-b", "1", "--draft", "gemma-3-1b"]
    found = said(capsys, *command)["plans"][0]
    assert found["memory"]["fits"] and not found["speculation"][0]["fits"]
    assert main(["plan", *command]) == 0 and "both models together DO NOT FIT" in capsys.readouterr().out


def test_short_steps_have_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "smollm2-135m:q4_0", "--hardware", "phoenix-780m", "-b", "1", "-d", "128"]) == 0
    found = re.search(r"128 .* ([\d.]+)  \w+ +([\d.]+)  yes", capsys.readouterr().out)
    assert found and 1000 / float(found[1]) == pytest.approx(float(found[2]), rel=0.005)


def test_experts_by_hand() -> None:
    found = experts(3e9, "q4_0", PHOENIX)
    assert found["bytes_per_token"] == 3e9 * Q4_0
    assert found["limit_tokens_per_s"] == pytest.approx(86.7e9 / (3e9 * Q4_0))


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("llama-3-70b:q8_0", "--hardware", "phoenix-780m", "--memory", "32", "-b", "1")
    memory = said(capsys, *arguments)["plans"][0]["memory"]
    assert not memory["fits"] and memory["max_sequences"] == 0 and memory["free"] < 0
    assert main(["plan", *arguments]) == 0
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("hardware", "gib", "words"),
    [
        ("phoenix-780m", "64", "(Linux's default, half of 64 GiB): fits, with room for 18 such contexts"),
        ("phoenix-780m", "32", "fits, but leaves only 555 MB"),
        (
            "phoenix-780m",
            "30",
            "DOES NOT FIT, 519 MB are missing; it would fit with a higher memory limit for the GPU",
        ),
        ("phoenix-780m", "16", "DOES NOT FIT, 8.04 GB are missing\n"),
        ("rtx-4090", "18", "(18 GiB): fits, with room for 3 such contexts"),
        ("rtx-4090", "16", "(16 GiB): fits, but leaves only"),
        ("rtx-4090", "14", "are missing\n"),
    ],
)
def test_what_fits_and_what_helps(
    hardware: str, gib: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "gemma-3-27b:q4_0", "--hardware", hardware, "--memory", gib, "-b", "1"]) == 0
    assert words in capsys.readouterr().out


def test_the_limit_of_one_sequence_is_said_with_its_sum(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gemma-3-27b:q4_0", "--hardware", "phoenix-780m", "-b", "1"]) == 0
    said = "each step reads 15.6 GB of weights at 86.7 GB/s or less: at batch 1 no more than 5.6 tok/s"
    assert said in capsys.readouterr().out


def test_a_step_down_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """A larger batch that is slower would look like a mistake."""
    rows = [{"batch": n, "depth": 1, "predicted": {"tokens_per_s": rate}} for n, rate in ((2, 9.0), (4, 8.0))]
    for name, why in (
        ("rtx-4090", "from 3 tokens on, matmuls use the matrix units"),
        ("phoenix-780m", "other shaders"),
    ):
        _print_step_down(rows, load_hardware(name))
        assert re.search(f"Batch 4 is predicted to be slower than 2: .*{why}", capsys.readouterr().out)
    _print_step_down(rows[::-1], PHOENIX)
    assert not capsys.readouterr().out


def test_what_is_predicted_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gemma-3-27b:q4_0", "--hardware", "phoenix-780m", "--target", "81"]) == 0
    shown = capsys.readouterr().out
    assert "LIMIT: the roofline, which no engine can exceed" in shown
    assert re.search(r"81 tok/s in total at depth 512: limit from batch \d+ \(4\.\d tok/s each\)", shown)
    assert "Predicted from what each kernel executes, counted in an emulator" in shown and NOT_RUN in shown
    assert main(["plan", "gemma-3-27b:q4_0", "--hardware", "h200"]) == 0
    assert "Calibration: fitted" in capsys.readouterr().out


def test_unknown_names_are_refused() -> None:
    with pytest.raises(DeviceError, match="phoenix-780m, strix"):
        load_hardware("phoenix")
    with pytest.raises(ModelNotFoundError, match="gemma-3-27b"):
        SyntheticModel("gemma-4-99b:q4_0")
    with pytest.raises(RequestError, match="context"):
        Planned(SyntheticModel("gemma-3-1b:q4_0"), 1 << 30)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-model", "--hardware", "h200"], "gemma-3-27b"),
        (["there-is-no.gguf", "--hardware", "h200"], "there-is-no.gguf"),
        (["gemma-2-9b", "--hardware", "h200"], "or plan for a shape, which needs no file: gemma-3-1b"),
        (["no-such-model", "--hardware", "this"], "gemma-3-27b"),
        (["gemma-3-1b", "--hardware", "abacus"], "phoenix-780m"),
        (["gemma-3-1b", "--hardware", "h200", "-b", "65"], "64"),
        (["gemma-3-1b", "--hardware", "h200", "-d", "5000"], "--context"),
        (["gemma-3-1b", "--hardware", "h200", "--acceptance", "1"], "must be from 0 to below 1"),
        (["gemma-3-1b", "--hardware", "h200", "--draft", "smollm2-135m"], "same family"),
        (["gemma-3-1b", "--hardware", "h200", "--mtp"], "no draft head"),
        (["gemma-3-1b", "--hardware", "h200", "--memory", "0"], "memory"),
        (["gemma-3-1b", "--hardware", "h200", "--memory", "1e300"], "memory"),
        (["gemma-3-1b", "--hardware", "h200", "--active", "1e300"], "active parameters"),
        (["gemma-3-1b", "--hardware", "h200", "-b", "0,1"], "batch"),
    ],
)
def test_errors_are_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("tandem.plan.this_machine.this_machine", lambda *_: pytest.fail("measured in vain"))
    assert main(["plan", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tandem: ") and words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv", "q3"], "q8"),
        (["--mtp", "--draft", "gemma-3-270m"], "exclude each other"),
        (["--acceptance", "0.5"], "--draft"),
        (["--device", "cpu"], "--hardware this"),
        (["--measure"], "--hardware this"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "gemma-3-1b", "--hardware", "h200", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tandem: ") and words in error and error.count("\n") == 1


def form(data: Any) -> Any:
    """The keys of data, nested; of a list those of its first element."""
    if isinstance(data, dict):
        return {key: form(value) for key, value in data.items()}
    return [form(data[0])] if isinstance(data, list) and data else type(data).__name__


RATES = {
    "limit": {"tokens_per_s": "float", "seconds": "float", "bottleneck": "str"},
    "predicted": {"tokens_per_s": "float", "seconds": "float", "bottleneck": "str"},
}
PUBLISHED_ROW = {
    **dict.fromkeys(("hardware", "shape", "about", "source"), "str"),
    **dict.fromkeys(("plain", "accepted", "drafted", "acceptance"), "float"),
    **dict.fromkeys(("predicted_plain", "predicted_drafted"), "float"),
    "draft_tokens": "int",
}
BATCH = {"batch": "int", "fits": "bool"}
PLAN = {
    "model": "str",
    "kv": "str",
    "weight_bytes_per_step": "float",
    "memory": {
        "parts": dict.fromkeys(
            ("weights", "keys and values", "activations", "inputs and results", "headroom"), "float"
        ),
        "heaps": {key: {"bytes": "float", "used": "float"} for key in ("carved out", "GTT")},
        "needed": "float",
        "fits": "bool",
        "free": "float",
        "max_sequences": "int",
    },
    "decode": [{"batch": "int", "depth": "int", "fits": "bool", **RATES}],
    "prefill": {"tokens": "int", "first_token_s": "float", "first_token_limit_s": "float", **RATES},
    "speculation": [{"acceptance": "float", "draft_tokens": "int", "tokens_per_step": "float", "fits": "bool",
                     **RATES}],
    "published": "NoneType",
    "target": {"tokens_per_s": "float", "max_batch": "int",
               "rows": [{"depth": "int", "limit": BATCH, "predicted": BATCH}]},
}  # fmt: skip


def test_the_form_of_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs read it: what changes here changes docs/PLAN.md, and SCHEMA if something goes."""
    found = said(
        capsys, "gemma-3-4b:q4_0", "--hardware", "phoenix-780m", "--weights", "q4_0,q8_0", "--kv", "f16,q8",
        "--draft", "gemma-3-1b:q4_0", "--target", "81", "--active", "3", "-b", "1,8", "-c", "1024",
    )  # fmt: skip
    assert found["schema"] == 2 and found["status"] == NOT_RUN == "estimate; not yet run"
    names = [(each["model"], each["kv"]) for each in found["plans"]]
    assert names == [(f"gemma-3-4b:{f}", kv) for f in ("q4_0", "q8_0") for kv in ("f16", "q8")]
    assert form(found["plans"]) == [PLAN]
    assert list(found) == ["schema", "status", "model", "hardware", "context", "draft", "plans", "experts"]
    assert list(found["experts"]) == [
        "active_parameters", "weights", "bytes_per_token", "limit_tokens_per_s", "predicted_tokens_per_s",
    ]  # fmt: skip
    assert found["experts"]["weights"] == "q4_0", "the first of the formats"
    assert {"name", "title", "status", "heaps", "sources", "calibration"} < set(found["hardware"])


def test_a_file_or_a_model_in_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, more = str(write_tiny_model(tmp_path / "tiny.gguf")), ["--hardware", "h200", "-b", "1"]
    found = said(capsys, file, *more)
    assert found["model"]["name"] == found["plans"][0]["model"] == "tiny.gguf", "no folders"
    monkeypatch.setattr("tandem.model.locate.resolve", lambda name: {"qwen3-4b": Path(file)}[name])
    assert said(capsys, "qwen3-4b", *more)["plans"] == found["plans"]
    assert said(capsys, "gemma-3-1b", *more)["plans"][0]["model"] == "gemma-3-1b:q4_0"
    assert said(capsys, "Gemma-3-1B:Q8_0", *more) == said(
        capsys, "gemma-3-1b", *more, "--weights", "Q8_0"
    ) | {"model": said(capsys, "gemma-3-1b:q8_0", *more)["model"]}, "formats are written both ways"
    assert main(["plan", file, *more, "--weights", "q8_0"]) == 2
    assert "--weights does not apply to a file" in capsys.readouterr().err


def test_the_whole_command_is_quick() -> None:
    """Under 3 seconds with the start of Python, and without any file; of processor time, whoever else is busy."""
    command = ["gemma-3-27b:q4_0", "--hardware", "phoenix-780m", "--json"]
    begun = time.perf_counter()
    code = (
        "import sys, time; from tandem.cli import main; code = main(sys.argv[1:]); "
        "print(time.process_time(), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", *command],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert json.loads(done.stdout)["schema"] == 2
    assert min(float(done.stderr), time.perf_counter() - begun) < 3

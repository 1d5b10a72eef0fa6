"""`tandem report`: one file, whole and without names, also where something fails half-way."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.bench import kernel_checks
from tandem.bench.kernel_checks import Checked, check_kernels, open_for_checks
from tandem.cli import main
from tandem.cli.report import _summary
from tandem.doctor import checks
from tandem.doctor.finding import Finding
from tandem.errors import DeviceError, DeviceLostError
from tandem.kernels import all_kernels
from tandem.kernels.kernel import Array
from tandem.report import sections
from tandem.report.sections import Report, _save

DOCUMENT = Path(__file__).parents[2] / "docs" / "DOCTOR.md"
# As on a machine with Python, NumPy and cffi alone; everything is there, but less of it than usual.
SMALLER = """
import sys
for name in ("fastapi", "httptools", "jinja2", "llguidance", "prometheus_client", "pydantic", "regex", "rich",
             "uvicorn", "tests", "benchmarks"):
    sys.modules[name] = None
from tandem.bench import bandwidth, kernel_checks, rounds
from tandem.doctor import finding as doctor_finding
from tandem.doctor import checks
from tandem.report import sections
from tandem.kernels import all_kernels
kernel_checks.all_kernels = lambda: {"norm": all_kernels()["norm"]}
kernel_checks.large_matmuls = lambda rng: iter(())
bandwidth.MIN_SECONDS = rounds.WARM_UP = 0.0
doctor_finding.host_read_rate = lambda: 2e10
sections.READ_BYTES, sections.ROUNDS, sections.ROWS, sections.LAYOUTS = 1 << 24, 2, {"cpu": 256}, ("q4_0", "f16")
sections.TINY = {"gemma-3-27b:f16": 0.01, "qwen3-8b:q8_0": 0.1}
sections.SMALL = {"cpu": "smollm2-135m:q4_0"}
sections.WORKLOADS = (sections.Workload("prefill", 8), sections.Workload("decode", 2, 2, 16))
from tandem.cli import main
sys.exit(main(["report", "--device", "cpu", "--output", sys.argv[1]]))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str]:
    """(data, text, what was printed) of a report by a process that has no package but those it must have."""
    file = tmp_path_factory.mktemp("reports") / "report.json"
    done = subprocess.run(
        [sys.executable, "-c", SMALLER, str(file)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), file.read_text(), done.stdout


def test_it_is_whole(made: tuple[dict[str, Any], str, str]) -> None:
    data, _, shown = made
    assert data["during"] == "" and data["problems"] == [] and not data["full"]
    assert list(data["seconds"]) == ["doctor", "device", "rates", "kernels", "models", "bench"]
    assert data["kernels"][0] == {**data["kernels"][0], "kernel": "norm", "cases": 67, "failures": []}
    assert [m["passed"] for m in data["models"]] == [True] * 4 and 0 < max(
        m["error"] for m in data["models"]
    ) < 0.1
    assert data["rates"]["int8_ops_per_s"] > 1e8 and data["rates"]["fp16_matrix_ops_per_s"] is None
    [bench] = data["bench"]
    # The rest is for the tests of `tandem bench`.
    assert bench["profiles"] and bench["limits"]["bytes_per_s"] > 0
    assert [row["label"] for row in bench["rows"]] == ["prefill 8", "decode 2, batch 2 at 16"]
    assert "all kernels match NumPy" in shown and "tokens/s  smollm2-135m:q4_0, prefill 8" in shown


def test_it_has_no_names(made: tuple[dict[str, Any], str, str]) -> None:
    import getpass
    import socket

    _, text, _ = made
    words = set(re.findall(r"\w+", DOCUMENT.read_text()))
    for name in {getpass.getuser(), socket.gethostname()} - words:  # a host may be called "cpu"
        assert not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text), name
    assert str(Path.home()) not in text and str(Path.cwd()) not in text


def test_its_fields_are_documented(made: tuple[dict[str, Any], str, str]) -> None:
    data, document = made[0], DOCUMENT.read_text()
    keys = set(data) | {key for name in ("device", "rates") for key in data[name]}
    keys |= {key for name in ("kernels", "models") for key in data[name][0]}
    keys |= set(data["rates"]["matmuls"][0])
    assert not [key for key in keys if f"`{key}`" not in document]


# ---- what goes wrong


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections that take no time."""
    monkeypatch.setattr(checks, "examine", lambda: iter([Finding("cpu", "pass", "one")]))
    monkeypatch.setattr(sections, "rates", lambda _: {})
    monkeypatch.setattr(sections, "models", lambda *_: [])
    monkeypatch.setattr(sections, "bench", lambda *_: [])
    monkeypatch.setattr(sections, "check_kernels", lambda _: iter([Checked("norm", 1, [], 0.0)]))


@pytest.mark.fast
def test_a_wrong_kernel_is_a_problem(
    short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted: a reference that wants the double, and one kernel that is right."""
    kernels = all_kernels()

    def doubled(*args: Any) -> dict[str, Array]:
        return {name: 2 * array for name, array in kernels["embed_f32"].reference(*args).items()}

    wrong = replace(kernels["embed_f32"], reference=doubled)
    planted = {"embed_f32": wrong, "embed_f16": kernels["embed_f16"]}
    monkeypatch.setattr(kernel_checks, "all_kernels", lambda: planted)
    monkeypatch.setattr(kernel_checks, "large_matmuls", lambda _: iter(()))
    monkeypatch.setattr(sections, "check_kernels", check_kernels)
    assert main(["report", "--device", "cpu", "--output", str(tmp_path / "r.json")]) == 1
    data = json.loads((tmp_path / "r.json").read_text())
    failures = {checked["kernel"]: len(checked["failures"]) for checked in data["kernels"]}
    cases = len(list(wrong.cases(np.random.default_rng(0))))
    assert failures == {"embed_f32": cases, "embed_f16": 0, "larger matmuls": 0}
    assert len(data["problems"]) == cases > 1 and "problem: embed_f32: " in capsys.readouterr().out


@pytest.mark.fast
def test_a_kernel_that_writes_elsewhere_is_found() -> None:
    """Planted: extents that leave out the end of what is written."""
    embed = all_kernels()["embed_f32"]
    lying = replace(embed, extents=lambda *_: {b.name: 4 for b in embed.buffers})
    case = next(iter(embed.cases(np.random.default_rng(1))))
    device = open_for_checks("cpu", 1)
    with pytest.raises(AssertionError, match="writes outside of its outputs: byte"):
        kernel_checks.check_case(device, lying, case)
    kernel_checks.check_case(device, embed, case)
    device.close()


@pytest.mark.fast
def test_a_section_that_fails_leaves_the_others(
    short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise DeviceError(f"{Path.home()} is broken: mend it")

    monkeypatch.setattr(sections, "models", fail)
    data = Report("cpu").write(tmp_path / "r.json")
    assert data["models"] == {"error": "~ is broken: mend it"} and data["bench"] == []
    assert data["problems"] == ["models: ~ is broken: mend it"] and data["during"] == ""


@pytest.mark.fast
def test_a_mistake_of_ours_is_told(short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "rates", lambda _: 1 // 0)
    told = Report("cpu").write(tmp_path / "r.json")["rates"]["error"]
    assert re.fullmatch(r"ZeroDivisionError in test_report.py, line \d+: .*", told)


@pytest.mark.fast
def test_a_device_that_is_lost_ends_it(short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(_: Any) -> Iterator[Checked]:
        raise DeviceLostError("the GPU stopped: load the model again")
        yield

    monkeypatch.setattr(sections, "check_kernels", lose)
    data = Report("cpu").write(tmp_path / "r.json")
    assert "lost" in data["kernels"] and "models" not in data and data["problems"]


@pytest.mark.fast
def test_a_crash_leaves_what_was_found_before(
    short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C stands for it: nothing runs after either."""

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sections, "bench", crash)
    with pytest.raises(KeyboardInterrupt):
        Report("cpu").write(tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["during"] == "bench" and data["kernels"] and data["doctor"]["counts"]["pass"] == 1


@pytest.mark.fast
def test_a_device_that_is_not_there(short: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--device", "vulkan:no such GPU", "--output", str(tmp_path / "r.json")]) == 1
    data = json.loads((tmp_path / "r.json").read_text())
    assert "error" in data["device"] and data["doctor"]
    assert not {"rates", "kernels", "models", "bench"} & data.keys()
    assert capsys.readouterr().out.count("problem: ") == 1 == len(data["problems"])


@pytest.mark.fast
def test_a_file_that_cannot_be_written_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--output", "no/such/report.json"]) == 1
    assert capsys.readouterr().err == (
        "tandem: no/such/report.json cannot be written: name a file in a writable folder\n"
    )


@pytest.mark.fast
def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    assert _save(tmp_path / "null", {"problems": []}) == {"problems": []}
    assert (tmp_path / "null").is_symlink() and len(list(tmp_path.iterdir())) == 1


@pytest.mark.fast
def test_the_summary_says_what_figures_are_worth(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"label": "prefill 8", "median": 10.0, "valid": True, "others": 0.0},
            {"label": "decode 2", "median": 1e9, "valid": False, "others": 0.5}]  # fmt: skip
    bench = [{"model": "m", "rows": rows}, {"left_out": "x"}]
    about = {"asked_for": "cpu", "device": {"description": "a CPU"}, "problems": []}
    _summary({**about, "bench": bench, "npu": {"missing": "no NPU"}})
    said = capsys.readouterr().out
    assert "10.0 tokens/s  m, prefill 8" in said and "NPU: no NPU" in said
    assert (
        re.search("INVALID +m, decode 2", said) and "Warning: other processes took 50% of the machine" in said
    )


@pytest.mark.fast
def test_the_npu_has_its_own_report(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "npu" in Report("cpu", npu=True).sections() and "npu" not in Report("cpu").sections()
    monkeypatch.setattr("tandem.report.npu.collect", lambda: {"missing": "an NPU"})
    assert sections.npu(lambda _: None) == {"missing": "an NPU"}

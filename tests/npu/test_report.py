"""`tandem report --npu` with STAND-INS for the machine, AMD's tools and XRT: the emulator answers, not an NPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.devices.npu import report
from tandem.devices.npu.report import collect
from tandem.model.model import open_model
from tandem.report import npu as npu_report
from tests.npu import tools
from tests.npu.machine import phoenix
from tests.program.programs import GOLDENS

SHAPES = ((40, 64, 48), (64, 130, 70))


@pytest.mark.fast
def test_every_file_says_what_was_not_done() -> None:
    """Until a report from a Phoenix is in the repository."""
    here = Path(report.__file__).parent
    sources = [path for path in (*here.glob("*.py"), *here.glob("*.cc")) if path.stat().st_size]
    silent = [path.name for path in sources if "mulated; not yet run on a Phoenix" not in path.read_text()]
    assert len(sources) > 15 and not silent


@pytest.mark.fast
def test_without_an_npu(tmp_path: Path) -> None:
    found = collect(tmp_path)
    assert found["missing"].startswith("no NPU of AMD Phoenix") and "gemm" not in found
    assert npu_report.collect(tmp_path) == found
    json.dumps(found)


@pytest.mark.fast
def test_without_compilers(xrt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = collect(phoenix(tmp_path))
    assert found["missing"].startswith("no aiecc on the PATH")
    assert all(check["ok"] for check in found["checks"])


def test_all_of_it(xrt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools.install(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with open_model(GOLDENS["llama"]) as model:
        found = npu_report.collect(phoenix(tmp_path / "m"), model, 16, shapes=SHAPES, rounds=2)
    json.dumps(found)
    assert (
        found["missing"] == ""
        and "STAND-IN" in found["tools"]
        and found["lowering"] == "no aie-opt on the PATH"
    )
    assert [(item["weights"], item["output"], item["exact"]) for item in found["smoke"]] == [
        ("int8", "int32", True),
        ("int8", "int8", True),
        ("int4", "int32", True),
    ]
    assert len(found["dispatch"]["seconds"]) == 2 and found["dispatch"]["of_chain"] == 16
    assert [item["shape"] for item in found["gemm"]] == [[64, 130, 70]] * 3
    assert all(item["ops_per_s"] > 0 and item["bytes_per_s"] > 0 for item in found["gemm"])
    without, with_it = found["prefill"]
    assert without["npu"] == "off" and with_it["npu"] == "require" and "error" not in with_it
    assert "not yet run on a Phoenix" in with_it["device"]


def test_what_fails_is_said_and_the_rest_goes_on(
    xrt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason, which compilers do not print last; and without a folder's name."""
    reason = f"{tmp_path}/gemm.mlir:3:1: error: out of descriptors\naiecc: pipeline failed"
    tools.install(tmp_path, monkeypatch, broken=reason)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = collect(phoenix(tmp_path / "m"), SHAPES, 1)
    assert all(
        "out of descriptors" in item["error"] for item in (*found["smoke"], found["dispatch"], *found["gemm"])
    )
    (tmp_path / "llvm-aie/bin/clang++").unlink()
    found["without Peano"] = collect(phoenix(tmp_path / "n"), SHAPES, 1)
    assert "no Peano" in found["without Peano"]["missing"] and "STAND-IN" in found["tools"]
    assert str(tmp_path) not in json.dumps(found)


def test_a_wrong_result_is_seen(xrt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools.install(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dispatch = xrt.EmulatedArray.dispatch

    def off_by_one(*args: Any) -> Any:
        words = dispatch(*args)
        words[0] += 1
        return words

    monkeypatch.setattr(xrt.EmulatedArray, "dispatch", off_by_one)
    found = collect(phoenix(tmp_path / "m"), SHAPES, 1)
    assert [item["exact"] for item in found["smoke"]] == [False] * 3 and found["smoke"][0]["wrong"] == 1

"""Compiling with STAND-INS for AMD's tools: what is asked of them, the cache, its keys, what is missing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.devices.npu import compile as compiling
from tandem.devices.npu.compile import compile_configuration, compile_instructions, find_tools
from tandem.devices.npu.emit import KERNEL_SOURCE, emit, emit_configuration
from tandem.devices.npu.plan import plan_gemm, plan_resident
from tandem.errors import CompilerError
from tests.npu.tools import install, install_in_venv

PLANS = plan_resident([(40, 90, 50), (9, 70, 120)])


def test_what_the_tools_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, cache = install(tmp_path, monkeypatch), tmp_path / "cache"
    tools = find_tools()
    xclbin = compile_configuration(PLANS[0], tools, cache)
    assert xclbin.read_bytes() == b"xclbin2\0" + emit_configuration(PLANS[0]).encode()
    assert compile_instructions(PLANS[1], tools, cache).rstrip(b"\0") == emit(PLANS[1]).encode()
    core, first, _, second = log.read_text().splitlines()
    t = PLANS[0].tiling
    for option in (
        f"-DTILE_M={t.m} -DTILE_K={t.k} -DTILE_N={t.n}",
        "-DWEIGHT_BITS=8",
        "--target=aie2-none",
        "-c",
    ):
        assert option in core
    assert f"-I{tmp_path / 'mlir_aie/include'}" in core and f"--peano={tmp_path / 'llvm-aie'}" in first
    assert "--get-xclbin" in first and "--get-npu-insts" in second


def test_all_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, cache = install(tmp_path, monkeypatch), tmp_path / "cache"
    tools = find_tools()
    first = compile_configuration(PLANS[0], tools, cache)
    assert compile_configuration(PLANS[1], tools, cache) == first  # another shape, the same configuration
    for _ in range(2):
        compile_instructions(PLANS[0], tools, cache)
    assert log.read_text().count("aiecc") == 2
    assert {path.suffix for path in cache.iterdir()} == {".xclbin", ".insts", ".sha256"}


def test_each_part_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, source, options and the versions of both tools."""
    install(tmp_path, monkeypatch)
    tools, cache = find_tools(), tmp_path / "cache"
    found = [compile_configuration(PLANS[0], tools, cache)]
    found.append(compile_configuration(plan_gemm(40, 90, 50, weights="int4"), tools, cache))
    install(tmp_path, monkeypatch, version="1.4.4")
    found.append(compile_configuration(PLANS[0], find_tools(), cache))
    install(tmp_path, monkeypatch, peano="22.0.0")
    found.append(compile_configuration(PLANS[0], find_tools(), cache))
    changed = tmp_path / "gemm.cc"
    changed.write_text(KERNEL_SOURCE.read_text() + "// changed\n")
    monkeypatch.setattr(compiling, "KERNEL_SOURCE", changed)
    found.append(compile_configuration(PLANS[0], tools, cache))
    monkeypatch.setattr(compiling, "kernel_options", lambda plan: ["-DOTHER"])
    found.append(compile_configuration(PLANS[0], tools, cache))
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("damage", ["cut", "changed", "no sum", "other sum"])
def test_damaged_results_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    log = install(tmp_path, monkeypatch)
    tools, cache = find_tools(), tmp_path / "cache"
    path = compile_configuration(PLANS[0], tools, cache)
    whole, total = path.read_bytes(), path.with_name(path.name + ".sha256")
    if damage == "cut":
        path.write_bytes(whole[:-1])
    elif damage == "changed":
        path.write_bytes(b"?" + whole[1:])
    elif damage == "no sum":
        total.unlink()
    else:
        total.write_text("0" * 64)
    assert compile_configuration(PLANS[0], tools, cache).read_bytes() == whole
    assert compile_configuration(PLANS[0], tools, cache) == path
    assert log.read_text().count("aiecc") == 2


def test_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerError, match=r"no aiecc on the PATH: install MLIR-AIE 1\.4 and Peano"):
        find_tools()
    install(tmp_path, monkeypatch)
    (tmp_path / "llvm-aie/bin/clang++").rename(tmp_path / "clang++")
    with pytest.raises(CompilerError, match="no Peano beside"):
        find_tools()
    (tmp_path / "elsewhere/bin").mkdir(parents=True)
    (tmp_path / "clang++").rename(tmp_path / "elsewhere/bin/clang++")
    monkeypatch.setenv("PEANO_INSTALL_DIR", str(tmp_path / "elsewhere"))
    assert find_tools().compiler == tmp_path / "elsewhere/bin/clang++"


def test_both_are_found_after_pip_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`<venv>/bin/aiecc` is a script; Peano and the AIE API lie in site-packages."""
    packages = install_in_venv(tmp_path / "venv", monkeypatch)
    tools = find_tools()
    assert tools.aiecc == tmp_path / "venv/bin/aiecc"
    assert tools.compiler == packages / "llvm-aie/bin/clang++"
    assert tools.headers == packages / "mlir_aie/include"
    assert compile_configuration(PLANS[0], tools, tmp_path / "cache").exists()
    monkeypatch.setenv("PATH", f"{packages / 'mlir_aie/bin'}:/usr/bin:/bin")
    assert find_tools().compiler == tools.compiler and find_tools().headers == tools.headers


def test_peano_of_the_user_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_in_venv(tmp_path / "venv", monkeypatch)
    install(tmp_path / "own", monkeypatch)
    monkeypatch.setenv("PATH", f"{tmp_path / 'venv/bin'}:/usr/bin:/bin")
    monkeypatch.setenv("PEANO_INSTALL_DIR", str(tmp_path / "own/llvm-aie"))
    assert find_tools().compiler == tmp_path / "own/llvm-aie/bin/clang++"


def test_aiecc_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    (tmp_path / "mlir_aie/include/aie_api/aie.hpp").unlink()
    with pytest.raises(CompilerError, match=r"no AIE API \(aie_api/aie\.hpp\) .* install MLIR-AIE"):
        find_tools()


def test_the_release_is_that_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`aiecc --version` of 1.4 names a commit, which says nothing of the release."""
    install_in_venv(tmp_path, monkeypatch, release="1.3.9")
    with pytest.raises(CompilerError, match=r"is of MLIR-AIE 1\.3: install MLIR-AIE 1\.4"):
        find_tools()


def test_aiecc_py_where_there_is_no_aiecc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    script = (tmp_path / "mlir_aie/bin/aiecc").rename(tmp_path / "mlir_aie/bin/aiecc.py")
    assert find_tools().aiecc == script
    (tmp_path / "mlir_aie_no_rtti-1.3.1.dist-info").mkdir()
    with pytest.raises(CompilerError, match=r"aiecc\.py is of MLIR-AIE 1\.3: install MLIR-AIE 1\.4"):
        find_tools()


def test_an_old_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, version="1.3.2")
    with pytest.raises(CompilerError, match=r"is of MLIR-AIE 1\.3: install MLIR-AIE 1\.4"):
        find_tools()


def test_the_older_spelling_of_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install(tmp_path, monkeypatch, options="--aie-generate-xclbin --aie-generate-npu-insts")
    compile_configuration(PLANS[0], find_tools(), tmp_path / "cache")
    assert "--aie-generate-xclbin --no-xchesscc --no-xbridge" in log.read_text()


def test_a_failure_is_said_and_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, broken="error: unknown attribute")
    with pytest.raises(CompilerError, match=r"aiecc failed \(error: unknown attribute\)"):
        compile_configuration(PLANS[0], find_tools(), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


LINKER = """\
ld.lld: error: section '.bss' will not fit in region 'data': overflowed by 64 bytes
clang++: error: ld.lld command failed with exit code 1 (use -v to see invocation)
aiecc: core main_core_0_2: its .data/.rodata/.bss exceed the `data` region of /tmp/x/ldScripts_core_0_2.ld.script
ld.lld: error: section '.bss' will not fit in region 'data': overflowed by 64 bytes
aiecc: edge 'core_0_2.elf' (key 'input.mlir') failed
aiecc: pipeline failed"""


def test_the_linkers_reason_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line says only that something failed; the reason stands above it, and no folder is named."""
    install(tmp_path, monkeypatch, broken=LINKER)
    with pytest.raises(CompilerError, match="overflowed by 64 bytes") as error:
        compile_configuration(PLANS[0], find_tools(), tmp_path / "cache")
    said = str(error.value)
    assert said.count("overflowed by 64 bytes") == 1 and "exceed the `data` region" in said
    assert "/tmp/" not in said and str(tmp_path) not in said


def test_a_reason_without_the_word_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, broken="\n".join(f"line {i}" for i in range(1000)))
    with pytest.raises(CompilerError, match=r"aiecc failed \(.*line 998; line 999\)") as error:
        compile_configuration(PLANS[0], find_tools(), tmp_path / "cache")
    assert len(str(error.value)) < 3000


def test_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    tools = replace(find_tools(), aiecc=Path("/bin/true"))
    with pytest.raises(CompilerError, match="aiecc made no xclbin"):
        compile_configuration(PLANS[0], tools, tmp_path / "cache")


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_lowering_by_the_real_compiler(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the passes of an aie-opt, where there is one; there has been none yet."""
    aie_opt = shutil.which("aie-opt")
    if aie_opt is None:
        with capsys.disabled():
            print(
                f"\nNPU: the text of int8 x {weights} is NOT VERIFIED: no aie-opt on the PATH (docs/NPU.md)"
            )
        pytest.skip("no aie-opt on the PATH")
    for plan in (
        plan_gemm(512, 512, 512, weights=weights),
        plan_gemm(150, 120, 48, "int8", weights=weights, shift=6),
    ):
        lowered = compiling.lower(emit(plan), aie_opt)
        assert "aie.dma_bd" in lowered and "aiex.npu." in lowered


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_building_with_the_real_compilers(
    weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The core kernels by Peano, and all that an NPU is given by aiecc, where both are; they have not been yet."""
    try:
        tools = find_tools()
    except CompilerError as error:
        with capsys.disabled():
            print(f"\nNPU: int8 x {weights} is NOT COMPILED: {error}")
        pytest.skip(str(error))
    plan = plan_gemm(512, 512, 512, weights=weights)
    assert compile_configuration(plan, tools, tmp_path).stat().st_size
    assert compile_instructions(plan, tools, tmp_path)

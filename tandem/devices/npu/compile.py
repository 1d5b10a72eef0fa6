"""Compiles plans with AMD's tools, where the user has them, and keeps what comes out. Not yet done with the real tools.

`aiecc` (MLIR-AIE 1.4) and Peano (llvm-aie) make an xclbin of a configuration and instructions of each plan. Results are
kept in the user's cache under a key of all that went into them; each has its sum beside it, and one that is damaged is
made again. Emulated; not yet run on a Phoenix.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.devices.npu.emit import (
    KERNEL_SOURCE,
    OBJECT_FILE,
    VERSION,
    emit,
    emit_configuration,
    kernel_options,
)
from tandem.devices.npu.plan import GemmPlan
from tandem.errors import CompilerError
from tandem.files import write_whole
from tandem.settings import read_settings

INSTALL = f"install MLIR-AIE {VERSION} and Peano (wheels mlir_aie and llvm-aie; docs/NPU.md has the steps)"
AIE_API = "aie_api/aie.hpp"  # what gemm.cc includes
SAID = r"(?:mlir[-_]aie|aiecc)\D*(\d+)\.(\d+)"  # of itself, by `aiecc --version`
TIMEOUT_SECONDS = 600  # a compilation takes some
MAX_REASONS, MAX_REASON = 6, 400  # lines of a compiler's output in an error, and characters of each
# What aie-opt is asked for, so that text is not only parsed: routes, addresses, descriptors and instructions are made.
LOWERING = (
    "--aie-assign-buffer-addresses",
    "--aie-create-pathfinder-flows",
    "--aie-substitute-shim-dma-allocations",
    "--aie-assign-runtime-sequence-bd-ids",
    "--aie-dma-tasks-to-npu",
    "--aie-dma-to-npu",
)


@dataclass(frozen=True)
class Tools:
    """`headers` has the AIE API; `versions` is what both say of themselves."""

    aiecc: Path
    compiler: Path
    headers: Path
    versions: str
    options: str  # what aiecc says of its own


def find_tools() -> Tools:
    """aiecc by the PATH, the AIE API in the package that it is of, and Peano by PEANO_INSTALL_DIR, or as the package
    beside that one."""
    found = shutil.which("aiecc") or shutil.which("aiecc.py")
    if found is None:
        raise CompilerError(f"no aiecc on the PATH: {INSTALL}")
    aiecc = Path(found).resolve()
    package = next((folder for folder in _packages(aiecc) if (folder / "include" / AIE_API).exists()), None)
    if package is None:
        raise CompilerError(f"no AIE API ({AIE_API}) in the package of {aiecc.name}: {INSTALL}")
    folders = [read_settings().peano, package.parent / "llvm-aie"]
    compilers = [folder / "bin" / "clang++" for folder in folders if folder]
    compiler = next((path for path in compilers if path.exists()), None)
    if compiler is None:
        raise CompilerError(f"no Peano beside {aiecc.name}: {INSTALL}, or set PEANO_INSTALL_DIR")
    says = _run([str(aiecc), "--version"])
    release = _release(package, says)
    if release and release < tuple(map(int, VERSION.split("."))):
        # An older one drops attributes it does not know without a word.
        raise CompilerError(f"{aiecc.name} is of MLIR-AIE {release[0]}.{release[1]}: {INSTALL}")
    versions = _without_folders(says + _run([str(compiler), "--version"]))
    return Tools(aiecc, compiler, package / "include", versions, _run([str(aiecc), "--help"]))


def _packages(aiecc: Path) -> Iterator[Path]:
    """Folders that may be MLIR-AIE's: `mlir_aie/bin/aiecc` is in it; `<venv>/bin/aiecc` is a script that pip made."""
    prefix = aiecc.parents[1]
    yield prefix
    yield from sorted(prefix.glob("lib*/python3*/*-packages/mlir_aie"), reverse=True)


def _release(package: Path, says: str) -> tuple[int, ...] | None:
    """MLIR-AIE's major and minor version: of the wheel, or what aiecc says, which since 1.4 is a commit."""
    wheels = (folder.name for folder in package.parent.glob("mlir_aie*.dist-info"))
    for text, pattern in (*((name, r"-(\d+)\.(\d+)") for name in wheels), (says, SAID)):
        if number := re.search(pattern, text):
            return int(number[1]), int(number[2])
    return None


def compile_configuration(plan: GemmPlan, tools: Tools, cache: Path) -> Path:
    """The xclbin of the plan's configuration, which is that of all plans with this tile."""
    text = emit_configuration(plan)
    return _cached(
        cache, _key("xclbin", text, plan, tools), "xclbin", lambda: _build("xclbin", text, plan, tools)
    )


def compile_instructions(plan: GemmPlan, tools: Tools, cache: Path) -> bytes:
    """What the NPU is sent to run this plan."""
    text = emit(plan)
    path = _cached(
        cache, _key("npu-insts", text, plan, tools), "insts", lambda: _build("npu-insts", text, plan, tools)
    )
    return path.read_bytes()


def lower(text: str, aie_opt: str) -> str:
    """The text after the compiler's own passes."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "gemm.mlir"
        source.write_text(text)
        return _run([aie_opt, *LOWERING, str(source)])


def _key(kind: str, text: str, plan: GemmPlan, tools: Tools) -> str:
    parts = [kind, text, KERNEL_SOURCE.read_text(), kernel_options(plan), tools.versions]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _cached(cache: Path, key: str, suffix: str, build: Callable[[], bytes]) -> Path:
    """The file in the cache, made now if it is not there whole."""
    path = cache / f"{key[:32]}.{suffix}"
    checksum = path.with_name(path.name + ".sha256")
    if path.exists() and checksum.exists() and _digest(path.read_bytes()) == checksum.read_text():
        return path
    data = build()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
        write_whole(checksum, _digest(data).encode())
    except OSError as error:
        raise CompilerError(f"{path} cannot be written ({error.strerror}): make room in the cache") from None
    return path


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _build(kind: str, text: str, plan: GemmPlan, tools: Tools) -> bytes:
    """`kind`: xclbin or npu-insts, as aiecc calls them."""
    with tempfile.TemporaryDirectory(prefix="tandem-npu-") as name:
        folder = Path(name)
        (folder / "gemm.mlir").write_text(text)
        _run([str(tools.compiler), *_core_options(plan, tools), "-o", str(folder / OBJECT_FILE)])
        result = folder / "result"
        command = [str(tools.aiecc), *_output_options(kind, tools), f"--{kind}-name={result}"]
        peano = f"--peano={tools.compiler.parents[1]}"
        _run([*command, peano, f"--tmpdir={folder / 'work'}", str(folder / "gemm.mlir")], folder)
        if not result.exists():
            raise CompilerError(f"aiecc made no {kind}: its version may not be {VERSION}; {INSTALL}")
        return result.read_bytes()


def _core_options(plan: GemmPlan, tools: Tools) -> list[str]:
    """For a core of the first generation; the macro keeps the AIE API from a header that only Vitis has."""
    target = ["--target=aie2-none-unknown-elf", "-std=c++20", "-O2", "-DNDEBUG", "-D__AIE_API_AIE_ADF_HPP__"]
    return [*target, f"-I{tools.headers}", *kernel_options(plan), "-c", str(KERNEL_SOURCE)]


def _output_options(kind: str, tools: Tools) -> list[str]:
    """Releases of 1.4 spell them in two ways; the older one has to be told not to use Vitis."""
    if f"aie-generate-{kind}" not in tools.options:
        return [f"--get-{kind}"]
    return [f"--aie-generate-{kind}", "--no-xchesscc", "--no-xbridge"]


def _run(command: Sequence[str], folder: Path | None = None) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", cwd=folder, timeout=TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(
            f"{Path(command[0]).name} does not run ({_without_folders(str(error))}): {INSTALL}"
        ) from None
    if done.returncode:
        said = _reason(done.stderr + "\n" + done.stdout) or str(done.returncode)
        raise CompilerError(f"{Path(command[0]).name} failed ({said}): {INSTALL}")
    return done.stdout


def _reason(output: str) -> str:
    """Why a compiler failed: its first lines with an error and what explains them, or its last lines. Drivers end with
    a line that says only that something failed."""
    lines = [line.strip() for line in _without_folders(output).splitlines() if line.strip()]
    reasons = [line for line in lines if re.search(r"(?i)error|fail|exceed|overflow|undefined", line)]
    kept = list(dict.fromkeys(reasons))[:MAX_REASONS] or lines[-MAX_REASONS:]
    return "; ".join(line[:MAX_REASON] for line in kept)


def _without_folders(text: str) -> str:
    """Of each path the last part: reports name no folders."""
    return re.sub(r"(?<![\w.:/])/\S*/", "", text)

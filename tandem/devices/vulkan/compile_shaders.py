"""Compiles each kernels/*.slang with entry points to spirv/*.spv: `make shaders`, or this module with names of kernels.

The SPIR-V is kept in the repository, so that neither an install nor a run needs the compiler. spirv/sources.json holds
a hash of the sources of each module, which a test compares. The compiler comes from a wheel (`slangpy`, 92 MB), fetched
into build/ at first use.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.devices.vulkan.shader_modules import SPIRV

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "tandem" / "kernels"
COMPILER = ROOT / "build" / "slang"
WHEEL = "slangpy==0.43.1"  # carries Slang 2026.12
WHEEL_SHA256 = "965dbbd1d907c90e17027945780146a67c66baf766f3d0b8af3f52ea2c4a8eb9"
SUMS = SPIRV / "sources.json"
DRIVER = Path(__file__).with_suffix(".cpp")


def modules() -> list[str]:
    """The Slang files with entry points."""
    return sorted(path.stem for path in KERNELS.glob("*.slang") if "[shader(" in path.read_text())


def source_checksum(module: str) -> str:
    """The hash of a module, of all modules that it imports and of the compiler."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in seen and (KERNELS / f"{name}.slang").exists():
            seen.add(name)
            waiting += re.findall(r"^(?:__exported )?import (\w+);", _source(name), re.M)
    texts = [WHEEL, DRIVER.read_text(), *(name + _source(name) for name in sorted(seen))]
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


def _source(module: str) -> str:
    return (KERNELS / f"{module}.slang").read_text()


def known_sums() -> dict[str, str]:
    """Module -> the `source_checksum` that its SPIR-V was compiled from."""
    sums: dict[str, str] = json.loads(SUMS.read_text()) if SUMS.exists() else {}
    return sums


def stale() -> list[str]:
    """Modules whose SPIR-V is older than their sources, or missing."""
    sums = known_sums()
    return [m for m in modules() if sums.get(m) != source_checksum(m) or not (SPIRV / f"{m}.spv").exists()]


def fetch_compiler() -> Path:
    """The folder with slang.h and the library; downloads them once."""
    folder = COMPILER / "slangpy"
    if not (folder / "include" / "slang.h").exists():
        COMPILER.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        platform = ["--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_34_x86_64"]
        subprocess.run([*pip, *platform, "--dest", str(COMPILER), WHEEL], check=True)
        wheel = next(COMPILER.glob("slangpy-*.whl"))
        with open(wheel, "rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != WHEEL_SHA256:
                wheel.unlink()
                raise SystemExit(f"the wheel of {WHEEL} is not the known one (its SHA-256 differs)")
        with zipfile.ZipFile(wheel) as files:
            wanted = ("slangpy/include/slang", "slangpy/libslang-", "slangpy/slang-standard-module")
            files.extractall(COMPILER, [name for name in files.namelist() if name.startswith(wanted)])
        wheel.unlink()
    return folder


def driver() -> Path:
    """Our program around the compiler's library, compiled if it is older than its source."""
    program = COMPILER / "compile_shaders"
    if not program.exists() or program.stat().st_mtime < DRIVER.stat().st_mtime:
        folder = fetch_compiler()
        library = next(folder.glob("libslang-compiler.so*"))
        link = [str(library), f"-Wl,-rpath,{folder}"]
        subprocess.run(
            ["g++", "-std=c++17", "-O1", f"-I{folder / 'include'}", str(DRIVER), *link, "-o", str(program)],
            check=True,
        )
    return program


def compile_modules(names: list[str], out: Path) -> None:
    """Writes out/<module>.spv for each."""
    out.mkdir(parents=True, exist_ok=True)
    if not names:
        return
    program = driver()

    def compile_module(name: str) -> None:
        subprocess.run([str(program), str(KERNELS), str(out), name], check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_module, names))


def refresh(names: list[str] | None = None) -> list[str]:
    """Compiles stale modules (all, or those in `names`) and removes SPIR-V without a source; returns their names."""
    COMPILER.mkdir(parents=True, exist_ok=True)
    with open(COMPILER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two at a time would lose each other's sums
        return _refresh([name for name in stale() if names is None or name in names])


def _refresh(names: list[str]) -> list[str]:
    sums = {m: known for m, known in known_sums().items() if m in modules()}
    # Before compiling: a source that is saved meanwhile stays stale.
    sums |= {name: source_checksum(name) for name in names}
    compile_modules(names, COMPILER / "new")
    SPIRV.mkdir(exist_ok=True)
    for name in names:
        # Atomically: a test may be reading it.
        (COMPILER / "new" / f"{name}.spv").replace(SPIRV / f"{name}.spv")
    SUMS.write_text(json.dumps(sums, indent=1, sort_keys=True) + "\n")
    for path in SPIRV.glob("*.spv"):
        if path.stem not in sums:
            path.unlink()
    return names


if __name__ == "__main__":
    print("compiled:", *refresh(sys.argv[1:] or None))

"""STAND-INS for AMD's aiecc and Peano, as programs on the PATH. They compile nothing: an "xclbin" is a word and the
text of the configuration, "instructions" are the text of the whole plan, which the stand-in for pyxrt understands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

AIECC = """#!{python} -SE
# A STAND-IN for aiecc, for tests.
import pathlib, sys
if "--version" in sys.argv: print("aiecc (STAND-IN) of mlir-aie {version}"); sys.exit()
if "--help" in sys.argv: print("{options}"); sys.exit()
here = pathlib.Path({log!r})
with here.open("a") as log: log.write("aiecc " + " ".join(sys.argv[1:]) + "\\n")
source = pathlib.Path(sys.argv[-1])
text = source.read_bytes()
if not (source.parent / "tandem_gemm.o").exists(): sys.exit("no object file")
if {broken!r}: print({broken!r}, file=sys.stderr); sys.exit(1)
for option in sys.argv[1:-1]:
    name, _, value = option.partition("=")
    if name == "--xclbin-name": pathlib.Path(value).write_bytes(b"xclbin2\\0" + text)
    if name == "--npu-insts-name": pathlib.Path(value).write_bytes(text + b"\\0" * (-len(text) % 4))
"""
CLANG = """#!{python} -SE
# A STAND-IN for Peano, for tests.
import pathlib, sys
if "--version" in sys.argv: print("clang (STAND-IN) {version}\\nInstalledDir:", sys.argv[0]); sys.exit()
with pathlib.Path({log!r}).open("a") as log: log.write("clang++ " + " ".join(sys.argv[1:]) + "\\n")
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("object")
"""


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    version: str = "1.4.3",
    peano: str = "21.0.0",
    options: str = "",
    broken: str = "",
) -> Path:
    """Both as their wheels lie in `folder`, with `mlir_aie/bin` on the PATH; returns the log of what they were asked
    for."""
    log = folder / "log"
    _program(
        folder / "mlir_aie/bin/aiecc", AIECC.format(**_with(log, version, options=options, broken=broken))
    )
    _program(folder / "llvm-aie/bin/clang++", CLANG.format(**_with(log, peano)))
    headers = folder / "mlir_aie/include/aie_api"
    headers.mkdir(parents=True, exist_ok=True)
    (headers / "aie.hpp").write_text("")
    monkeypatch.setenv("PATH", f"{folder / 'mlir_aie/bin'}:/usr/bin:/bin")
    monkeypatch.delenv("PEANO_INSTALL_DIR", raising=False)
    return log


def install_in_venv(venv: Path, monkeypatch: pytest.MonkeyPatch, *, release: str = "1.4.2") -> Path:
    """As `pip install mlir_aie llvm-aie` leaves them: only scripts are on the PATH, and `aiecc --version` names a
    commit. Returns the folder of the packages."""
    packages = venv / "lib/python3.12/site-packages"
    install(packages, monkeypatch, version="at 2fbe248")
    (packages / f"mlir_aie-{release}.dist-info").mkdir()
    for name in ("aiecc", "aie-opt"):
        _program(venv / "bin" / name, f'#!/bin/sh\nexec "{packages}/mlir_aie/bin/{name}" "$@"\n')
    monkeypatch.setenv("PATH", f"{venv / 'bin'}:/usr/bin:/bin")
    return packages


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def _with(log: Path, version: str, **more: str) -> dict[str, str]:
    return {"python": sys.executable, "log": str(log), "version": version, **more}

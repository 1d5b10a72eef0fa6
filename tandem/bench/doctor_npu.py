"""`tandem doctor`: the NPU, where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from tandem.bench.doctor_finding import Finding, Place
from tandem.devices.npu.detect import detect

AIE, PEANO = "aie", "llvm_aie"  # modules of the compiler's packages


def npu(place: Place) -> Iterator[Finding]:
    """Models do not need it: what is missing is a warning."""
    found = detect(place.root)
    if not found.hardware:
        yield Finding("npu", "pass", f"{found.checks[0].found}: none is needed")
        return
    for check in found.checks:
        name, data = f"npu {check.name}", {"ok": check.ok}
        yield Finding(name, "pass" if check.ok else "warn", check.found, "" if check.ok else check.fix, data)
    yield _compiler()


def _compiler() -> Finding:
    """MLIR-AIE's aiecc, and Peano for the cores' C++."""
    there = {
        "aiecc": find_spec(AIE) is not None or shutil.which("aiecc.py") is not None,
        "Peano": find_spec(PEANO) is not None,
    }
    missing = [name for name, is_there in there.items() if not is_there]
    if missing:
        fix = "install the wheels mlir_aie 1.4 and llvm-aie of github.com/Xilinx (docs/NPU.md has the steps)"
        return Finding("npu compiler", "warn", f"no {' and no '.join(missing)}", fix, dict(there))
    return Finding("npu compiler", "pass", "aiecc and Peano", data=dict(there))

"""Checks of `tandem doctor` for the NPU, if there is one."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.devices.npu.compile import find_tools
from tandem.devices.npu.detect import detect
from tandem.doctor.finding import Finding, Place
from tandem.errors import CompilerError


def npu(place: Place) -> Iterator[Finding]:
    """Models run without an NPU, so what is missing is only a warning."""
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
    try:
        tools = find_tools()
    except CompilerError as error:
        found, _, fix = str(error).partition(": ")
        return Finding("npu compiler", "warn", found, fix)
    return Finding("npu compiler", "pass", "aiecc and Peano", data={"versions": tools.versions})

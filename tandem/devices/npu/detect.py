"""Is there a Phoenix NPU that can be used, and if not, what is missing? Only files are read until all are there.

Emulated; not yet run on a Phoenix.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

AMD = "0x1022"
PHOENIX = "0x1502"
OTHERS = {"0x17f0": "an XDNA2 NPU", "0x17f1": "an XDNA2 NPU", "0x17f2": "an XDNA2 NPU"}
FIRMWARE = ("npu.dev.sbin", "npu_7.sbin", "npu.sbin")  # in the driver's order; distributions compress them
KERNEL = (6, 14)  # the first with amdxdna
LOCKED_BYTES = 64 * 2**20  # the driver's heap alone
HOW = "docs/NPU.md has the steps"


@dataclass(frozen=True)
class Check:
    """`found` says what is there; `fix` is what to do where it is not enough."""

    name: str
    ok: bool
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Detection:
    """`hardware`: the NPU is in this machine, whether or not it can be used."""

    hardware: bool
    checks: tuple[Check, ...]

    @property
    def ready(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def missing(self) -> str:
        """What to tell a user, in one sentence; empty if nothing is missing."""
        wrong = [check for check in self.checks if not check.ok]
        if not wrong:
            return ""
        if not self.hardware:
            return f"{wrong[0].found}; {wrong[0].fix}"
        return "the NPU cannot be used: " + "; ".join(f"{check.found}: {check.fix}" for check in wrong)


def detect(root: Path = Path("/")) -> Detection:
    """`root`: where /sys, /proc, /dev and /lib are; another one in tests."""
    pci, other = _pci(root)
    if pci is None:
        found = f"no NPU of AMD Phoenix in this machine{f' ({other})' if other else ''}"
        return Detection(False, (Check("hardware", False, found, "a Ryzen 7040 or 8040 has one"),))
    files = (
        Check("hardware", True, f"Phoenix NPU, PCI {pci.name}"),
        _kernel(root, pci),
        _driver(pci),
        _firmware(root, pci),
        _node(root, pci),
        _locked(),
    )
    return Detection(True, (*files, _xrt(root, all(check.ok for check in files))))


def _pci(root: Path) -> tuple[Path | None, str]:
    """The NPU's folder in sysfs, and what else of AMD's was met."""
    other = ""
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _text(folder / "vendor") != AMD:
            continue
        device = _text(folder / "device")
        if device == PHOENIX:
            return folder, ""
        if device in OTHERS:
            other = f"{OTHERS[device]} is, of another kind"
    return None, other


def _kernel(root: Path, pci: Path) -> Check:
    release = _text(root / "proc/sys/kernel/osrelease")
    numbers = re.match(r"(\d+)\.(\d+)", release)
    new = numbers is not None and tuple(map(int, numbers.groups())) >= KERNEL
    ok = new or _driver(pci).ok  # AMD also builds the driver for older kernels
    return Check("kernel", ok, f"Linux {release or 'of unknown version'}", "install Linux 6.14 or newer")


def _driver(pci: Path) -> Check:
    link = pci / "driver"
    name = link.resolve().name if link.exists() else ""
    found = f"driver {name}" if name else "no driver is bound to the NPU"
    fix = "switch the NPU (IPU) on in the firmware set-up, keep the IOMMU on, then `modprobe amdxdna`"
    return Check("driver", name == "amdxdna", found, fix)


def _firmware(root: Path, pci: Path) -> Check:
    if version := _text(pci / "fw_version"):
        return Check("firmware", True, f"firmware {version} is running")
    files = [
        path.name
        for folder in ("lib/firmware", "usr/lib/firmware")
        for name in FIRMWARE
        for path in sorted((root / folder / "amdnpu/1502_00").glob(f"{name}*"))
    ]
    found = f"firmware {files[0]}" if files else "no firmware amdnpu/1502_00/npu.sbin"
    return Check("firmware", bool(files), found, "install a linux-firmware of 2025 or newer")


def _node(root: Path, pci: Path) -> Check:
    """The file that programs open the NPU by."""
    for entry in sorted((root / "sys/class/accel").glob("accel*")):
        if (entry / "device").resolve() != pci.resolve():
            continue
        node = root / "dev/accel" / entry.name
        if not node.exists():
            break
        shown = f"/dev/accel/{entry.name}"
        if os.access(node, os.R_OK | os.W_OK):
            return Check("node", True, shown)
        return Check(
            "node", False, f"{shown} may not be opened", "join its group: `usermod -aG render $USER`"
        )
    return Check("node", False, "no /dev/accel/accel* of the NPU", "look for amdxdna in `dmesg`")


def _locked() -> Check:
    """The driver pins what the NPU reads."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    ok = limit == resource.RLIM_INFINITY or limit >= LOCKED_BYTES or os.geteuid() == 0
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.0f} MiB"
    return Check("locked memory", ok, f"locked memory {shown}", "allow more: `ulimit -l unlimited`")


def _xrt(root: Path, usable: bool) -> Check:
    """XRT's Python module; with a `usable` NPU also its plugin for amdxdna, which only opening devices shows."""
    fix = f"install XRT with its plugin for amdxdna, for this Python ({HOW})"
    if importlib.util.find_spec("pyxrt") is None:
        if (root / "opt/xilinx/xrt/python").is_dir():
            fix = "run `source /opt/xilinx/xrt/setup.sh` first"
        return Check("XRT", False, "Python finds no module pyxrt", fix)
    try:
        pyxrt = import_module("pyxrt")
        count = pyxrt.enumerate_devices() if usable else 0
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return Check("XRT", False, f"pyxrt does not load ({error})", fix)
    if usable and not count:
        return Check("XRT", False, "XRT sees no device", fix)
    return Check("XRT", True, "pyxrt")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

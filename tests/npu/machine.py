"""A folder that looks like the files of a machine with a Phoenix NPU. There is no NPU: tests of detection only."""

from __future__ import annotations

from pathlib import Path

PCI = "0000:c7:00.1"


def phoenix(
    root: Path, *, device: str = "0x1502", kernel: str = "6.17.9-1-amd64", driver: str = "amdxdna"
) -> Path:
    pci = root / "sys/devices/pci0000:00" / PCI
    _write(pci / "vendor", "0x1022")
    _write(pci / "device", device)
    _link(root / "sys/bus/pci/devices" / PCI, pci)
    _write(root / "proc/sys/kernel/osrelease", kernel)
    if driver:
        (root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True)
        _link(pci / "driver", root / f"sys/bus/pci/drivers/{driver}")
        _write(pci / "fw_version", "1.5.5.391")
    _write(root / "lib/firmware/amdnpu/1502_00/npu.sbin.zst", "")
    _link(root / "sys/class/accel/accel0/device", pci)
    _write(root / "dev/accel/accel0", "")
    return root


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)

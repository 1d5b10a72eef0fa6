"""Detection of the NPU, in folders that look like machines. None of them has one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.devices.npu.detect import detect
from tests.npu.machine import PCI, phoenix

pytestmark = pytest.mark.fast


@pytest.fixture
def xrt(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A pyxrt that sees one device."""
    module = SimpleNamespace(enumerate_devices=lambda: 1, __spec__=object())
    monkeypatch.setitem(sys.modules, "pyxrt", module)  # type: ignore[arg-type]
    return module


def wrong(root: Path) -> list[str]:
    found = detect(root)
    assert found.hardware and not found.ready
    return [check.name for check in found.checks if not check.ok]


def test_all_there(tmp_path: Path, xrt: SimpleNamespace) -> None:
    found = detect(phoenix(tmp_path))
    assert found.ready and found.missing == ""
    assert PCI in found.checks[0].found and "1.5.5.391" in found.checks[3].found


def test_no_npu(tmp_path: Path) -> None:
    found = detect(tmp_path)
    assert not found.hardware and not found.ready and len(found.checks) == 1
    assert found.missing == "no NPU of AMD Phoenix in this machine; a Ryzen 7040 or 8040 has one"


def test_another_npu(tmp_path: Path) -> None:
    assert "XDNA2" in detect(phoenix(tmp_path, device="0x17f0")).missing


def test_old_kernel_and_no_driver(tmp_path: Path, xrt: SimpleNamespace) -> None:
    root = phoenix(tmp_path, kernel="6.1.0-37-amd64", driver="")
    assert wrong(root) == ["kernel", "driver"]
    assert "install Linux 6.14" in detect(root).missing and "modprobe amdxdna" in detect(root).missing


def test_old_kernel_with_amds_own_driver(tmp_path: Path, xrt: SimpleNamespace) -> None:
    assert detect(phoenix(tmp_path, kernel="6.11.0-29-generic")).ready


def test_another_driver(tmp_path: Path, xrt: SimpleNamespace) -> None:
    assert wrong(phoenix(tmp_path, driver="vfio-pci")) == ["driver"]


def test_no_firmware(tmp_path: Path, xrt: SimpleNamespace) -> None:
    root = phoenix(tmp_path, driver="")
    (root / "lib/firmware/amdnpu/1502_00/npu.sbin.zst").unlink()
    assert wrong(root) == ["driver", "firmware"]


def test_no_node(tmp_path: Path, xrt: SimpleNamespace) -> None:
    (phoenix(tmp_path) / "dev/accel/accel0").unlink()
    assert wrong(tmp_path) == ["node"]


def test_node_of_somebody_else(tmp_path: Path, xrt: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    phoenix(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert wrong(tmp_path) == ["node"] and "usermod" in detect(tmp_path).missing


def test_little_locked_memory(tmp_path: Path, xrt: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda what: (8 * 2**20, 8 * 2**20))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert wrong(phoenix(tmp_path)) == ["locked memory"]


def test_no_xrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert wrong(phoenix(tmp_path)) == ["XRT"]
    (tmp_path / "opt/xilinx/xrt/python").mkdir(parents=True)
    assert "source /opt/xilinx/xrt/setup.sh" in detect(tmp_path).missing


def test_xrt_without_its_plugin(tmp_path: Path, xrt: SimpleNamespace) -> None:
    xrt.enumerate_devices = lambda: 0
    assert wrong(phoenix(tmp_path)) == ["XRT"] and "XRT sees no device" in detect(tmp_path).missing


def test_broken_xrt(tmp_path: Path, xrt: SimpleNamespace) -> None:
    def fail() -> int:
        raise RuntimeError("no such device")

    xrt.enumerate_devices = fail
    assert wrong(phoenix(tmp_path)) == ["XRT"] and "no such device" in detect(tmp_path).missing


def test_this_machine() -> None:
    """Whatever it is, an answer comes, and says what to do where something is missing."""
    found = detect()
    assert found.ready or found.missing

"""`tandem doctor`: right on machines with much, little or damaged. Those of AMD are made of files: none was at hand."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import main
from tandem.devices.tuned_choices import Choices, write_choices
from tandem.devices.vulkan.capabilities import Capabilities
from tandem.devices.vulkan.feature_report import features_of_all_models
from tandem.doctor import checks
from tandem.doctor import finding as doctor_finding
from tandem.doctor import gpu as doctor_gpu
from tandem.doctor import host as doctor_host
from tandem.doctor.caches import caches as cache_check
from tandem.doctor.caches import models
from tandem.doctor.checks import as_data, examine, without_names
from tandem.doctor.finding import Finding, Place
from tandem.doctor.host import memory_modules
from tandem.doctor.vulkan_probe import VulkanProbe, probe_vulkan
from tandem.errors import DeviceError
from tests.npu.machine import phoenix
from tests.vulkan import conftest
from tests.vulkan.machines import PHOENIX, SOFTWARE
from tests.vulkan.mesa import FAMILIES, newer_driver, system_driver

DOCUMENT = Path(__file__).parents[2] / "docs" / "DOCTOR.md"
GIB = 2**30
lavapipe = conftest.lavapipe  # a fixture: installs it where we may
RADEON = replace(PHOENIX, name="AMD Radeon 780M", features=features_of_all_models())


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own for each test, and a memory that need not be measured."""
    home = tmp_path / "jane-doe"
    for name in ("HF_HUB_CACHE", "HF_HOME", "OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    monkeypatch.setattr(doctor_finding, "host_read_rate", lambda: 70e9)
    (home / ".cache" / "tandem").mkdir(parents=True)
    return home / ".cache"


def files(root: Path, texts: dict[str, object]) -> Path:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def laptop(root: Path, memory_gib: float, gtt_gib: float, driver: str = "amdgpu") -> Path:
    """FAKE: the files of a laptop with a Radeon 780M, as the kernel's documentation and its owners show them."""
    pci, meminfo = "sys/bus/pci/devices/0000:c6:00.0", int(memory_gib * 2**20)
    files(root, {
        f"{pci}/class": "0x030000", f"{pci}/vendor": "0x1002", f"{pci}/device": "0x15bf",
        "sys/class/drm/card1/device/mem_info_vram_total": GIB // 2,
        "sys/class/drm/card1/device/mem_info_gtt_total": int(gtt_gib * GIB),
        "sys/module/amdgpu/parameters/gttsize": -1,
        "sys/module/ttm/parameters/pages_limit": int(gtt_gib * GIB) // 4096,
        "sys/module/ttm/parameters/page_pool_size": int(gtt_gib * GIB) // 4096,
        "proc/meminfo": f"MemTotal: {meminfo} kB\nMemFree: {meminfo} kB\nMemAvailable: {meminfo} kB",
        "proc/sys/kernel/osrelease": "6.17.9-1-amd64", "dev/dri/renderD128": "",
    })  # fmt: skip
    if driver:
        (root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True)
        (root / pci / "driver").symlink_to(root / f"sys/bus/pci/drivers/{driver}")
    return root


def findings(place: Place) -> dict[str, Finding]:
    """By name, after what holds for all of them."""
    found = list(examine(place))
    for finding in found:
        assert finding.status in ("pass", "warn", "fail") and finding.found, finding
        assert bool(finding.fix) == (finding.status != "pass"), finding
    assert {f.name for f in found} <= documented_names()
    keys = {key for finding in found for key in finding.data if not finding.name.startswith("vulkan:")}
    assert not [key for key in keys if f"`{key}`" not in DOCUMENT.read_text()]
    return {finding.name: finding for finding in found}


def documented_names() -> set[str]:
    names = set(re.findall(r"^\| `([^`]+)` \|", DOCUMENT.read_text(), re.M))
    npu = {f"npu {n}" for n in ("hardware", "kernel", "driver", "firmware", "node", "locked memory", "XRT")}
    return names | npu | {f"vulkan:{i}" for i in range(9)}


def answer(*devices: Capabilities) -> VulkanProbe:
    return VulkanProbe("1.3.296", list(devices))


# ---- the machines of the issue


def test_no_vulkan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real loader is hidden by a file that is none."""
    (tmp_path / "libvulkan.so.1").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    found = findings(Place(root=files(tmp_path / "root", MEMORY)))
    assert found["vulkan"].status == "warn" and "libvulkan1" in found["vulkan"].fix
    assert found["device"].found == "auto selects the CPU" and found["cpu"].status in ("pass", "warn")
    assert "fail" not in {f.status for f in found.values()}
    with_gpu = findings(Place(root=laptop(tmp_path / "laptop", 32, 15.5)))
    assert with_gpu["vulkan"].status == "fail"  # there is a GPU that does not work


MEMORY: dict[str, object] = {"proc/meminfo": "MemTotal: 33554432 kB\nMemFree: 33554432 kB"}


@pytest.mark.fast
def test_only_lavapipe(tmp_path: Path) -> None:
    place = Place(
        files(tmp_path, MEMORY), lambda: answer(replace(SOFTWARE, features=RADEON.features, index=0))
    )
    found = findings(place)
    assert found["vulkan:0"].status == "pass" and "only when named" in found["vulkan:0"].found
    assert found["device"].found == "auto selects the CPU" and found["gpu"].found.startswith("none")
    assert "fail" not in {f.status for f in found.values()}


def test_only_the_real_lavapipe(lavapipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = list(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"))
    if not manifests:
        pytest.skip("lavapipe is not installed (mesa-vulkan-drivers)")
    monkeypatch.setenv("VK_ICD_FILENAMES", str(manifests[0]))
    monkeypatch.setenv("VK_DRIVER_FILES", str(manifests[0]))
    told = probe_vulkan()
    assert not told.problem and [d.kind for d in told.devices] == ["software"]
    [finding] = [doctor_gpu.device_finding(device) for device in told.devices]
    assert finding.status == "pass" and "matrix units" in finding.data["features_missed"]


@pytest.fixture
def null_device(lavapipe: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, VulkanProbe]]:
    """What RADV, which comes with lavapipe, says of each family: one it knows, one it dies of."""
    driver = system_driver() or newer_driver()
    if driver is None:
        pytest.skip("RADV is not installed (mesa-vulkan-drivers)")
    told = {}
    for family in FAMILIES:
        for name, value in driver.environment(family).items():
            monkeypatch.setenv(name, value)
        told[family] = probe_vulkan()
    yield told


def test_radvs_null_device(null_device: dict[str, VulkanProbe], tmp_path: Path) -> None:
    root = files(tmp_path, MEMORY)
    known, unknown = sorted(null_device.values(), key=lambda told: bool(told.problem))
    found = findings(Place(root, lambda: known))
    assert found["vulkan:0"].status == "warn" and "RADV_FORCE_FAMILY" in found["vulkan:0"].fix
    assert found["device"].found == "auto selects the CPU"
    crashed = findings(Place(root, lambda: unknown))  # the driver's process is gone, and ours is not
    assert crashed["vulkan"].status == "warn" and "crashes" in crashed["vulkan"].found
    assert json.loads(json.dumps(as_data(list(found.values())), allow_nan=False))


@pytest.mark.fast
def test_no_permission(tmp_path: Path) -> None:
    """FAKE machine; that the file may not be opened is told to it."""
    place = Place(laptop(tmp_path, 32, 15.5), lambda: answer(SOFTWARE), lambda _: False)
    found = findings(place)
    assert found["gpu rights"].status == "fail" and "usermod -aG" in found["gpu rights"].fix
    assert found["gpu"].status == "pass" and found["device"].status == "warn"
    assert found["vulkan driver"].status == "fail" and "mesa-vulkan-drivers" in found["vulkan driver"].fix


NOBODY = 65534


@pytest.mark.fast
def test_no_real_permission() -> None:
    """A node that only its owner may open, seen by another user where we may become one; else of mode 0."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        node = Path(folder) / "dev/dri/renderD128"
        node.parent.mkdir(parents=True)
        node.touch(mode=0o600 if os.geteuid() == 0 else 0)
        if child := os.fork():
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        else:
            try:
                if os.geteuid() == 0:
                    os.setuid(NOBODY)
                os._exit([f.status for f in doctor_gpu.kernel(Place(Path(folder)))] != ["fail"])
            finally:
                os._exit(2)


@pytest.mark.fast
def test_a_damaged_cache(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = caches / "tandem"
    uuid = bytes(range(16))
    (folder / f"{uuid.hex()}-0.pipelines").write_bytes(struct.pack("<IIII", 32, 1, 0, 0) + uuid + b"sound")
    write_choices(folder / "sound.tuned", Choices({"norm dim=8": {"threads": 64}}), {})
    (folder / "this-machine.json").write_text("{}")
    [sound] = cache_check(Place())
    assert sound.status == "pass" and sound.data["pipelines"] == sound.data["tuned"] == 1
    (folder / f"{uuid.hex()}-1.pipelines").write_bytes(bytes(40))
    (folder / "other.tuned").write_text('{"sum": "", "choices": {}}')
    (folder / "this-machine.json").write_text("{")
    [damaged] = cache_check(Place())
    assert damaged.status == "warn" and damaged.data["damaged"] == 3
    assert sorted(Path(name).suffix for name in damaged.shown) == [".json", ".pipelines", ".tuned"]
    assert "jane-doe" not in json.dumps(as_data([damaged]))


@pytest.mark.fast
def test_a_damaged_model(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = caches / "huggingface/hub/models--Jane--Secret-GGUF"
    (repository / "snapshots/1").mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs/2.incomplete").write_bytes(b"GG")
    [unfinished] = models(Place())
    assert unfinished.status == "warn" and unfinished.data["unfinished"] == 1
    (repository / "snapshots/1/secret-Q4_0.gguf").write_bytes(b"GGUF" + bytes(3))
    [finding] = models(Place())
    assert finding.status == "fail" and finding.data["damaged"] == 1 and "tandem rm" in finding.fix
    assert "Secret" in finding.shown[0] and "Secret" not in json.dumps(as_data([finding]))


# ---- AMD, from files


@pytest.mark.fast
def test_a_780m_with_the_usual_limit(tmp_path: Path) -> None:
    """FAKE: 32 GB, of which the GPU may map half: a 27B does not fit, and the fix is the one of docs/AMD.md."""
    found = findings(Place(laptop(tmp_path, 31.0, 15.5), lambda: answer(RADEON)))
    assert {f.status for n, f in found.items() if n != "gpu memory"} <= {"pass"}, found
    memory = found["gpu memory"]
    assert memory.status == "warn" and memory.data["limit_bytes"] == 16 * GIB
    assert f"ttm.pages_limit={int(19.5 * GIB) // 4096}" in memory.fix
    assert f"amdgpu.gttsize={int(19.5 * 1024)}" in memory.fix
    assert "matrix units" in found["vulkan:4"].data["features_used"]
    assert found["device"].found == "auto selects AMD Radeon 780M"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("memory", "gtt", "status"), [(62.0, 31.0, "pass"), (31.0, 24.0, "pass"), (15.0, 7.5, "warn")]
)
def test_limits_of_gtt(tmp_path: Path, memory: float, gtt: float, status: str) -> None:
    """FAKE machines."""
    found = findings(Place(laptop(tmp_path, memory, gtt), lambda: answer(RADEON)))
    assert found["gpu memory"].status == status


@pytest.mark.fast
def test_older_and_missing_drivers(tmp_path: Path) -> None:
    """FAKE: Mesa before 23.3 shows no matrix units; a device without integer dot products runs nothing."""
    old = doctor_gpu.device_finding(replace(RADEON, matrix_shapes=()))
    assert old.status == "warn" and "23.3" in old.fix
    bare = doctor_gpu.device_finding(replace(RADEON, features=RADEON.features - {"shaderIntegerDotProduct"}))
    assert bare.status == "fail" and "shaderIntegerDotProduct" in bare.found
    found = findings(Place(laptop(tmp_path, 32, 15.5, driver=""), lambda: answer()))
    assert found["gpu"].status == "fail" and "modprobe amdgpu" in found["gpu"].fix


@pytest.mark.fast
def test_the_npu(tmp_path: Path) -> None:
    """FAKE: the files of a Phoenix NPU."""
    found = findings(Place(phoenix(laptop(tmp_path, 62, 31)), lambda: answer(RADEON)))
    assert found["npu driver"].status == found["npu firmware"].status == "pass"
    assert found["npu XRT"].status == "warn" and found["npu compiler"].status == "warn"
    assert "llvm-aie" in found["npu compiler"].fix


def module(bank: str, megabytes: int = 16384, speed: int = 5600, bits: int = 64) -> bytes:
    """A memory device of SMBIOS 3."""
    fields = bytearray(0x28)
    struct.pack_into("<BBHHHHHHBBBBBHHBBBBBIH", fields, 0, 17, len(fields), 0, 0, 0, bits, bits, megabytes, 9, 0, 1, 2,
                     0x22, 0, speed, 0, 0, 0, 0, 0, 0, speed)  # fmt: skip
    return bytes(fields) + b"DIMM 0\0" + bank.encode() + b"\0\0"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("modules", "channels", "status"),
    [
        ([module("P0 CHANNEL A"), module("P0 CHANNEL B")], 2, "pass"),
        ([module("P0 CHANNEL A"), module("P0 CHANNEL B", 0)], 1, "warn"),
        ([module("P0 CHANNEL A"), module("P0 CHANNEL A")], 1, "warn"),
        ([module(f"BANK {i}", bits=32) for i in range(4)], 4, "pass"),
        ([b"\x11", b"\x11\x28" + bytes(60)], None, "pass"),
    ],
)
def test_channels(tmp_path: Path, modules: list[bytes], channels: int | None, status: str) -> None:
    """FAKE tables of the firmware; the last is damaged."""
    table = files(tmp_path, MEMORY) / "sys/firmware/dmi/tables/DMI"
    table.parent.mkdir(parents=True)
    table.write_bytes(b"".join(modules) + b"\x7f\x04\0\0\0\0")
    rate = 75e9 if channels in (2, 4) else 40e9
    found = findings(Place(tmp_path, lambda: answer(), read_rate=lambda: rate))["bandwidth"]
    assert (found.data["channels"], found.status) == (channels, status), found
    if channels in (2, 4):
        assert found.data["peak_bytes_per_s"] == 89.6e9 and "DDR5-5600" in found.found


@pytest.mark.fast
@pytest.mark.parametrize(("load", "busy"), [("0.00", False), ("900.1", True)])
def test_a_busy_machine_reads_less(tmp_path: Path, load: str, busy: bool) -> None:
    files(tmp_path, {**MEMORY, "proc/loadavg": f"{load} 0.5 0.1 2/300 77"})
    found = findings(Place(tmp_path, lambda: answer(), read_rate=lambda: 40e9))["bandwidth"]
    assert ("other processes keep the machine busy" in found.found) == busy and found.data["load"] == float(
        load
    )


@pytest.mark.fast
def test_a_rate_above_the_modules_is_no_rate(tmp_path: Path) -> None:
    table = files(tmp_path, MEMORY) / "sys/firmware/dmi/tables/DMI"
    table.parent.mkdir(parents=True)
    table.write_bytes(module("A") + module("B"))
    found = findings(Place(tmp_path, lambda: answer(), read_rate=lambda: 200e9))["bandwidth"]
    assert found.status == "warn" and "wrong" in found.found and len(memory_modules(Place(tmp_path))) == 2


@pytest.mark.fast
def test_a_table_in_a_folder_of_the_administrator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in most containers."""
    stat = os.stat

    def refused(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("tables/DMI"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *arguments, **options)

    place = Place(files(tmp_path, MEMORY), lambda: answer(), read_rate=lambda: 40e9)
    monkeypatch.setattr(os, "stat", refused)
    assert findings(place)["bandwidth"].status == "pass"


# ---- the command


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "Place", lambda: Place(probe=answer))


@pytest.mark.fast
def test_one_screen(unasked: None, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert code == int(any(line.startswith("fail") for line in lines))
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert re.fullmatch(r"\d+ pass, \d+ warn, \d+ fail", lines[-1])
    assert all(line.startswith(("pass  ", "warn  ", "fail  ", "      ")) for line in lines[:-1])


@pytest.mark.fast
def test_a_check_that_fails_is_a_finding(
    unasked: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_THREADS", "many")
    assert main(["doctor"]) == 1
    shown = capsys.readouterr()
    assert "fail  cpu" in shown.out and "fix: give a number of threads" in shown.out and not shown.err


@pytest.mark.fast
def test_packages_that_are_missing(unasked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    [first, *_] = doctor_host.versions(Place())
    assert first.status == "warn" and first.fix == "pip install rich"

    def lacks(_: Place) -> Iterator[Finding]:
        import rich  # noqa: F401

        yield first

    monkeypatch.setattr(checks, "CHECKS", (lacks,))
    [finding] = examine(Place(probe=answer))
    assert finding.status == "fail" and finding.fix == "pip install rich"


@pytest.mark.fast
def test_data_without_names(
    unasked: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither of this machine nor of one whose names an error quotes."""

    def quotes(_: Place) -> Iterator[Finding]:
        raise DeviceError(f"{Path.home()}/x of jane on janes-laptop (janes-laptop.lan): ask jane")
        yield

    words = set(re.findall(r"\w+", DOCUMENT.read_text()))
    names = {getpass.getuser(), socket.gethostname()} - words  # a host may be called "cpu"
    monkeypatch.setattr(getpass, "getuser", lambda: "jane")
    monkeypatch.setattr(socket, "gethostname", lambda: "janes-laptop.lan")
    monkeypatch.setattr(checks, "CHECKS", (*checks.CHECKS, quotes))
    assert main(["doctor", "--json"]) == 1
    text = capsys.readouterr().out
    data = json.loads(text)
    assert data["schema"] == 1 and set(data) == {"schema", "version", "counts", "findings"}
    assert data["findings"][-1]["found"] == "~/x of (name) on (name) ((name))"
    assert str(Path.home()) not in text and "jane" not in text
    for name in names:
        assert not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text), name
    assert without_names({"a": [float("inf"), 1.5, True]}) == {"a": [None, 1.5, True]}
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    assert without_names("run it as root on janes-laptop") == "run it as root on (name)"

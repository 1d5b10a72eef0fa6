"""Checks of `tandem doctor` for GPUs: kernel driver, permissions, Vulkan loader and drivers, devices, and memory."""

from __future__ import annotations

import grp
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.doctor.finding import Finding, Place, Status, from_error
from tandem.doctor.host import memory_total
from tandem.errors import DeviceError

if TYPE_CHECKING:
    from tandem.devices.vulkan.capabilities import Capabilities

VENDORS = {0x1002: "AMD", 0x10DE: "NVIDIA", 0x8086: "Intel"}
NODES = ("dev/dri/renderD*", "dev/nvidiactl", "dev/dxg")
KERNEL_FIX = {
    "AMD": "`sudo modprobe amdgpu`, and install its firmware (Debian: firmware-amd-graphics)",
    "NVIDIA": "install NVIDIA's driver, and `sudo modprobe nvidia`",
    "Intel": "`sudo modprobe i915`, or xe for newer ones",
}
VULKAN_FIX = {
    "AMD": "install Mesa's driver (Debian, Ubuntu: mesa-vulkan-drivers; Fedora: the same; Arch: vulkan-radeon)",
    "NVIDIA": "install NVIDIA's own driver with its Vulkan part (Debian: nvidia-vulkan-icd)",
    "Intel": "install Mesa's driver (Debian, Ubuntu: mesa-vulkan-drivers; Arch: vulkan-intel)",
}
MATRIX_FIX = {"AMD": "RDNA3 has matrix units, which Mesa reports from 23.3 on: update Mesa"}
PAGE = 4096
MEMORY_WANTED = 20 << 30  # bytes: Gemma 3 27B in 4 bits with a long context
MAX_GPU_SHARE = 0.75  # of an APU's memory that its GPU can safely use


@dataclass(frozen=True)
class Card:
    """A GPU as the kernel shows it."""

    vendor: str
    id: str
    driver: str


def cards(place: Place) -> list[Card]:
    found = []
    for folder in place.files("sys/bus/pci/devices/*"):
        vendor, device = place.number(folder / "vendor"), place.number(folder / "device")
        if place.text(folder / "class").startswith("0x03") and vendor in VENDORS and device is not None:
            driver = (folder / "driver").resolve().name if (folder / "driver").exists() else ""
            found.append(Card(VENDORS[vendor], f"{vendor:04x}:{device:04x}", driver))
    return found


def nodes(place: Place) -> list[Path]:
    return [node for pattern in NODES for node in place.files(pattern)]


def kernel(place: Place) -> Iterator[Finding]:
    """The GPUs that the kernel lists, and whether this user may open them (/dev/kfd is not needed)."""
    there, opened = Counter(cards(place)), nodes(place)
    for card, count in there.items():
        title, data = f"{card.vendor} GPU {card.id}", {**asdict(card), "count": count}
        title += f" ({count} of them)" if count > 1 else ""
        if card.driver:
            yield Finding("gpu", "pass", f"{title}, kernel driver {card.driver}", data=data)
        else:
            yield Finding("gpu", "fail", f"{title} without a kernel driver", KERNEL_FIX[card.vendor], data)
    if opened:
        yield _rights(place, opened)
    elif there:
        fix = "in a container, pass the device (--device /dev/dri); else look for errors in `sudo dmesg`"
        yield Finding("gpu rights", "warn", "there is no /dev/dri/renderD* node", fix)
    else:
        yield Finding("gpu", "pass", "none: models run on the CPU")


def _rights(place: Place, opened: list[Path]) -> Finding:
    may, may_not = ([n for n in opened if place.may_open(n) is side] for side in (True, False))
    names = [", ".join(f"/{node.relative_to(place.root)}" for node in found) for found in (may, may_not)]
    data = {"may_open": len(may), "may_not_open": len(may_not)}
    if not may_not:
        return Finding("gpu rights", "pass", f"may open {names[0]}", data=data)
    fix = f"`sudo usermod -aG {_group(may_not[0])} $USER`, then log in again"
    return Finding("gpu rights", "warn" if may else "fail", f"may not open {names[1]}", fix, data)


def _group(node: Path) -> str:
    try:
        name = grp.getgrgid(node.stat().st_gid).gr_name
    except (KeyError, OSError):
        return "render"
    return name if name in ("render", "video") else "render"  # users should not join any other group


def vulkan(place: Place) -> Iterator[Finding]:
    """The Vulkan loader, the installed drivers, and whether each GPU has one."""
    probe, wanted = place.vulkan, bool(nodes(place))
    bad: Status = "fail" if wanted else "warn"  # without a GPU, Vulkan is not needed
    drivers = sorted(
        {path.stem.split("_icd")[0] for path in place.files("*/share/vulkan/icd.d/*.json")}
        | {path.stem.split("_icd")[0] for path in place.files("etc/vulkan/icd.d/*.json")}
    )
    data = {"loader": probe.loader, "drivers": drivers}
    if not probe.loader:
        yield from_error("vulkan", DeviceError(probe.problem), bad)
        return
    found = f"loader {probe.loader}, drivers: {', '.join(drivers) or 'none in the usual folders'}"
    if probe.problem:
        problem, _, fix = probe.problem.partition(": ")
        yield Finding("vulkan", bad, f"{found}; {problem}", fix, data)
        return
    yield Finding("vulkan", "pass", found, data=data)
    for vendor in sorted({card.vendor for card in cards(place) if card.driver and wanted}):
        if not any(device.vendor == vendor for device in probe.devices):
            yield Finding(
                "vulkan driver", "fail", f"no Vulkan device for the {vendor} GPU", VULKAN_FIX[vendor]
            )


def devices(place: Place) -> Iterator[Finding]:
    for device in place.vulkan.devices:
        yield device_finding(device)


def device_finding(device: Capabilities) -> Finding:
    from tandem.devices.vulkan.capabilities import check_usable
    from tandem.devices.vulkan.feature_report import feature_paths, features_of_all_models

    paths = feature_paths(device)
    used, missed = ([name for name, there, _ in paths if there is side] for side in (True, False))
    data = {**capability_data(device), "features_used": used, "features_missed": missed}
    name, title = f"vulkan:{device.index}", f"{device.name} ({device.kind}, {device.driver})"
    if not device.heaps:
        fix = "unset RADV_FORCE_FAMILY: this is Mesa's null device, for compiling only"
        return Finding(name, "warn", f"{title} has no memory and cannot run kernels", fix, data)
    lacking = sorted(features_of_all_models() - device.features)
    try:
        check_usable(device)
        if lacking:
            raise DeviceError(f"{device.name} lacks {', '.join(lacking)}: update its driver")
    except DeviceError as error:
        return Finding(name, "fail", f"{title}: {error}", "update its driver, or use another device", data)
    if device.kind == "software":
        return Finding(name, "pass", f"{title}: slow, used only when named", data=data)
    size = sum(heap.nbytes for heap in device.heaps if heap.device_local)
    found = f"{title}, {size / 2**30:.1f} GiB: uses {', '.join(used)}"
    if "matrix units" in missed:
        fix = MATRIX_FIX.get(device.vendor, "a newer driver may report some")
        return Finding(name, "warn", f"{title} reports no matrix units: prompts take longer", fix, data)
    return Finding(name, "pass", found + (f"; without {', '.join(missed)}" if missed else ""), data=data)


def capability_data(device: Capabilities) -> dict[str, Any]:
    """The capabilities of a device for JSON."""
    left_out = ("choices", "cache_key", "index")
    data = {key: value for key, value in vars(device).items() if key not in left_out}
    data |= {
        "features": sorted(device.features),
        "heaps": [asdict(heap) for heap in device.heaps],
        "memory_types": [asdict(kind) for kind in device.memory_types],
        "matrix_shapes": [asdict(shape) for shape in device.matrix_shapes],
    }
    return data


def chosen(place: Place) -> Iterator[Finding]:
    """The device that `--device auto` selects."""
    if not nodes(place):
        yield Finding("device", "pass", "auto selects the CPU")
        return
    from tandem.devices.vulkan.capabilities import choose

    try:
        yield Finding("device", "pass", f"auto selects {choose(place.vulkan.devices, 'vulkan').name}")
    except DeviceError as error:
        yield Finding("device", "warn", f"auto selects the CPU: {error}", "see the lines above")


def gpu_memory(place: Place) -> Iterator[Finding]:
    """The memory that amdgpu lets a GPU use: its own (VRAM) and the machine's (GTT)."""
    settings = {
        "amdgpu.gttsize": place.number("sys/module/amdgpu/parameters/gttsize"),
        "ttm.pages_limit": place.number("sys/module/ttm/parameters/pages_limit"),
        "ttm.page_pool_size": place.number("sys/module/ttm/parameters/page_pool_size"),
    }
    total, integrated = memory_total(place), any(d.kind == "integrated" for d in place.vulkan.devices)
    for folder in place.files("sys/class/drm/card*/device"):
        vram, gtt = (place.number(folder / f"mem_info_{kind}_total") for kind in ("vram", "gtt"))
        if vram is None or gtt is None:
            continue
        pages = settings["ttm.pages_limit"]
        mapped = min(gtt, pages * PAGE) if pages else gtt
        data = {"vram_bytes": vram, "gtt_bytes": gtt, "limit_bytes": vram + mapped, "settings": settings}
        shown = ", ".join(f"{name}={value}" for name, value in settings.items() if value is not None)
        found = (
            f"{vram / 2**30:.1f} GiB VRAM, {mapped / 2**30:.1f} GiB GTT of {total / 2**30:.1f} GiB ({shown})"
        )
        wanted = int(min(MAX_GPU_SHARE * total, MEMORY_WANTED))
        if integrated and vram + mapped < wanted:
            limit = -(-(wanted - vram) // PAGE)
            fix = f"for larger models boot with ttm.pages_limit={limit} (older kernels: amdgpu.gttsize={limit >> 8})"
            yield Finding("gpu memory", "warn", found, fix, data)
        else:
            yield Finding("gpu memory", "pass", found, data=data)

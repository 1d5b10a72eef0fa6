"""`tandem inspect --device`: the devices of this machine, the selected one, and the features that kernels use on it."""

from __future__ import annotations

import argparse
from typing import Any

from tandem.cli.terminal import human_size, print_json, print_table
from tandem.devices.backends import open_device
from tandem.devices.vulkan.capabilities import Capabilities
from tandem.devices.vulkan.device import VulkanDevice, devices
from tandem.devices.vulkan.feature_report import feature_paths
from tandem.devices.vulkan.memory import HOST_VISIBLE
from tandem.errors import DeviceError


def main(options: argparse.Namespace) -> int:
    try:
        found, problem = devices(), ""
    except DeviceError as error:
        if options.device.startswith("vulkan"):
            raise
        found, problem = [], str(error)
    device = open_device(options.device, threads=options.threads)
    try:
        data: dict[str, Any] = {"devices": [_summary(d) for d in found], "problem": problem}
        data |= {"asked_for": options.device, "used": device.name, "description": device.describe()}
        if isinstance(device, VulkanDevice):
            data |= _details(device.capabilities, device.heaps_free())
    finally:
        device.close()
    print_json(data) if options.json else _show(data)
    return 0


def _summary(device: Capabilities) -> dict[str, Any]:
    return {
        "name": f"vulkan:{device.index}",
        "gpu": device.name,
        "kind": device.kind,
        "memory": sum(heap.nbytes for heap in device.heaps if heap.device_local),
        "api": ".".join(map(str, device.api)),
        "driver": device.driver,
    }


def _details(device: Capabilities, free: list[float]) -> dict[str, Any]:
    mapped = {t.heap for t in device.memory_types if t.flags & HOST_VISIBLE}
    return {
        "features": [
            {"feature": name, "there": there, "path": path} for name, there, path in feature_paths(device)
        ],
        "heaps": [
            {
                "bytes": heap.nbytes,
                "free": int(free[i]),
                "device_local": heap.device_local,
                "mapped": i in mapped,
            }
            for i, heap in enumerate(device.heaps)
        ],
        "limits": {
            "allocation": human_size(device.largest_allocation),
            "shared memory of a workgroup": human_size(device.shared_memory),
            "threads of a workgroup": device.workgroup_invocations,
            "threads of a subgroup": _sizes(device),
        },
    }


def _sizes(device: Capabilities) -> str:
    if device.subgroup_min == device.subgroup_max:
        return str(device.subgroup)
    return f"{device.subgroup} ({device.subgroup_min} to {device.subgroup_max})"


def _show(data: dict[str, Any]) -> None:
    rows = [
        (d["name"], d["gpu"], d["kind"], human_size(d["memory"]), d["api"], d["driver"])
        for d in data["devices"]
    ]
    if rows:
        print_table(("DEVICE", "GPU", "KIND", "MEMORY:", "VULKAN", "DRIVER"), rows)
    else:
        print(data["problem"] or "no Vulkan device")
    print(f"\n{data['asked_for']} selects {data['used'] if 'features' in data else data['description']}")
    if "features" not in data:
        return
    print()
    print_table(
        ("FEATURE", "PRESENT", "USED FOR"),
        [(f["feature"], "yes" if f["there"] else "no", f["path"]) for f in data["features"]],
    )
    print()
    print_table(
        ("HEAP:", "SIZE:", "FREE:", "KIND"),
        [
            (str(i), human_size(h["bytes"]), human_size(h["free"]), _kind(h))
            for i, h in enumerate(data["heaps"])
        ],
    )
    print("\nlimits: " + ", ".join(f"{name} {value}" for name, value in data["limits"].items()))


def _kind(heap: dict[str, Any]) -> str:
    kind = "device memory" if heap["device_local"] else "host memory"
    return f"{kind}, {'host-visible' if heap['mapped'] else 'not host-visible'}"

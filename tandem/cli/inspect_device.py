"""`tandem inspect --device`: the devices of this machine, the one that is used, and which path each feature takes."""

from __future__ import annotations

import argparse
from typing import Any

from tandem.cli.terminal import human_size, print_json, print_table
from tandem.devices.opening import open_device
from tandem.devices.vulkan.capabilities import REQUIRED, Capabilities
from tandem.devices.vulkan.device import VulkanDevice, devices
from tandem.devices.vulkan.grids import FEW_TOKENS, has_matrix_units
from tandem.devices.vulkan.memory import HOST_VISIBLE
from tandem.devices.vulkan.pipelines import SPIRV, needed_features
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
            {"feature": name, "there": there, "path": path} for name, there, path in _features(device)
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


def _features(device: Capabilities) -> list[tuple[str, bool, str]]:
    """(feature, whether it is there, what that leads to)."""
    few = f"products of up to {FEW_TOKENS} tokens"
    optional = [
        ("matrix units", has_matrix_units(device), f"products of more than {FEW_TOKENS} tokens",
         "products of any number of tokens use integer dot products"),
        ("subgroup size control", device.subgroup_size_control, "subgroups of 32 where matrix units need them",
         "subgroups have the driver's size"),
        ("memory budget", device.memory_budget, "the driver says what is free", "a tenth of each heap is left free"),
        ("timestamps", bool(device.timestamp_ns), "each launch can be timed", "only whole steps can be timed"),
    ]  # fmt: skip
    needed = [
        ("integer dot product", "shaderIntegerDotProduct", few),
        ("float16 arithmetic", "shaderFloat16", "scales, and products on matrix units"),
        ("16-bit storage", "storageBuffer16BitAccess", "scales and the KV cache"),
        ("8-bit storage", "storageBuffer8BitAccess", "weights"),
        ("timeline semaphore", "timelineSemaphore", "steps in segments, each waited for on its own"),
    ]
    shaders = _shader_needs()
    rows = [(name, there, yes if there else no) for name, there, yes, no in optional]
    for name, feature, path in needed:
        there, must = feature in device.features, feature in shaders
        rows.append(
            (name, there, path if there else "models do not run without it" if must else "not needed")
        )
    return rows


def _shader_needs() -> set[str]:
    """Features that no model runs without: those of shaders that do not need matrix units."""
    needs = [needed_features(path.read_bytes()) for path in SPIRV.glob("*.spv")]
    return set(REQUIRED).union(*(need for need in needs if "cooperativeMatrix" not in need))


def _show(data: dict[str, Any]) -> None:
    rows = [
        (d["name"], d["gpu"], d["kind"], human_size(d["memory"]), d["api"], d["driver"])
        for d in data["devices"]
    ]
    if rows:
        print_table(("DEVICE", "GPU", "KIND", "MEMORY:", "VULKAN", "DRIVER"), rows)
    else:
        print(data["problem"] or "no Vulkan device")
    print(f"\n{data['asked_for']} uses {data['used'] if 'features' in data else data['description']}")
    if "features" not in data:
        return
    print()
    print_table(
        ("FEATURE", "THERE", "PATH"),
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
    kind = "the device's" if heap["device_local"] else "the host's"
    return f"{kind}, {'seen by both' if heap['mapped'] else 'not seen by the host'}"

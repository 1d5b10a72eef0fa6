"""`--hardware this`: measures the machine at hand with our own kernels, and saves the result in a file.

It measures the read bandwidth, the prefill of a prompt, and a CPU's peak; free memory is read each time. The peak rate
for predictions is the one that explains the prefill time, given the share that our kernels reach (`calibration` in
hardware.toml). If the true peak is not known, that rate stands for it, and the arithmetic limit is an estimate.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from tandem.bench.hardware import Calibration, Hardware, calibration_of
from tandem.bench.machine import disturbed
from tandem.bench.result import Limits
from tandem.bench.roofline import measure_limits, raised
from tandem.bench.rounds import Bench, Workload
from tandem.bench.sensors import Sensors
from tandem.devices.backends import check_timed, open_device
from tandem.devices.device import Device
from tandem.devices.vulkan.device import VulkanDevice
from tandem.errors import DeviceError
from tandem.model.synthetic import SyntheticModel
from tandem.plan.predict import Planned
from tandem.settings import read_settings

SHAPE, LAYERS, PROMPT = "qwen2.5-1.5b:q4_0", 4, 512
SMALL, FEW_LAYERS, FEW = "smollm2-135m:q4_0", 2, 32  # for Vulkan in software, which would take minutes
READ_BYTES = 512 << 20
ROUNDS = 3
NEVER = 1_000_000  # tokens of a step: a CPU has no matrix units


def this_machine(again: bool = False, device: str = "auto", folder: Path | None = None) -> Hardware:
    """The saved measurement; a new one if `again`, or if the device or the calibration has changed."""
    file = (folder or read_settings().pipelines) / "this-machine.json"
    check_timed(device)
    opened = open_device(device)
    try:
        known = _kept(file, opened.describe())
        if known and not again:
            return replace(known, memory_gib=_free_gib(opened))
        found = measure(opened)
    finally:
        opened.close()
    with suppress(OSError):  # if it cannot be saved, it is measured each time
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(found), indent=1))
    return found


def measure(device: Device) -> Hardware:
    kind = _kind(device)
    few = {"cpu": NEVER, "software": 2}.get(kind, 3 if "NVIDIA" in device.describe() else 9)
    shape, layers, prompt = (SMALL, FEW_LAYERS, FEW) if kind == "software" else (SHAPE, LAYERS, PROMPT)
    memory, model, work = _free_gib(device), SyntheticModel(shape, layers), Workload("prefill", prompt)

    def both() -> tuple[Limits, float]:
        before, found = measure_limits(device, READ_BYTES), Bench(model, device, [work]).measure(work, ROUNDS)
        return raised(before, device, READ_BYTES), found.median

    (limits, seconds), seen = Sensors().during(both)
    read, peak = limits["bytes_per_s"], limits["ops_per_s"]
    read_source = f"measured: {limits['bytes_from']}"
    rate_source = f"what a prompt of {prompt} reached, over matrix_ops of `calibration`"
    unknown = Hardware(
        "this",
        device.describe(),
        kind,
        True,
        read / 1e9,
        read / 1e9,
        read / 1e9,
        1.0,
        1.0,
        1.0,
        few,
        memory,
        0.0,
        {
            **dict.fromkeys(("pin_gb_s", "read_gb_s", "usual_gb_s"), read_source),
            **dict.fromkeys(("matrix_tflop_s", "dot_top_s"), rate_source),
            "peak_top_s": limits["ops_from"] or f"not known: {rate_source}",
            "matrix_from": "docs/VULKAN.md, by the maker",
            "memory_gib": "free now",
            "carve_out_gib": "in memory_gib",
        },
        calibration_of(kind),
        warning=disturbed(seen.others) and f"{disturbed(seen.others)} during it: repeat with --measure",
    )
    return _with_rate(unknown, Planned(model, prompt), prompt, seconds, peak and peak / 1e12)


def _free_gib(device: Device) -> float:
    return device.free_memory()[1] / 2**30


def _kind(device: Device) -> str:
    if isinstance(device, VulkanDevice):
        return "software" if device.capabilities.kind == "software" else "gpu"
    return "cpu" if device.name == "cpu" else "gpu"


def _with_rate(
    unknown: Hardware, planned: Planned, prompt: int, seconds: float, peak: float | None
) -> Hardware:
    """The hardware with the rate, at most the peak, for which the predicted prefill takes the measured seconds."""
    found = unknown
    for _ in range(4):  # a fixed point: the part hidden behind memory depends on the rate
        now = planned.predict(found, [(0, prompt)])
        left = seconds - (now.total - now.arithmetic)
        # A lower bound, for the rate is unknown if memory alone explains the time.
        rate = found.dot_top_s * now.arithmetic / max(left, seconds / 10)
        rate = min(rate, peak or rate)
        found = replace(unknown, matrix_tflop_s=rate, peak_top_s=peak or rate, dot_top_s=rate)
    return found


def _kept(file: Path, title: str) -> Hardware | None:
    try:
        data = json.loads(file.read_text())
        found = Hardware(**{**data, "calibration": Calibration(**data["calibration"])})
    except (OSError, ValueError, TypeError, KeyError, DeviceError):
        return None
    # The saved rates depend on it.
    same = found.title == title and found.calibration == calibration_of(found.kind)
    return found if same else None

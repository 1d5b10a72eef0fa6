"""The section `predictions` of a report: each kernel's measured time beside that of the RDNA3 cost model."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from tandem.bench.hardware import known_hardware, load_hardware
from tandem.bench.profile import value_name
from tandem.bench.step_cost import Step
from tandem.model.synthetic import SyntheticModel
from tandem.plan.predict import Planned
from tandem.plan.rdna3 import FITTED, RDNA3Gpu, gpu_of, launch_time
from tandem.plan.rdna3_step import launches

WORST = 5

Data = dict[str, Any]


def known_gpu(name: str) -> tuple[str, RDNA3Gpu] | None:
    """The entry of hardware.toml for a device of this name, such as "AMD Radeon 780M Graphics (RADV PHOENIX)"."""
    for known in known_hardware():
        gpu = gpu_of(load_hardware(known))
        if gpu and known.rpartition("-")[2] in name.lower().split():  # phoenix-780m: 780m
            return known, gpu
    return None


def predictions(report: Data) -> Data | None:
    """None: not an RDNA3 GPU that hardware.toml knows. The bandwidth is the one that this report measured."""
    found = known_gpu((report["device"].get("capabilities") or {}).get("name", ""))
    if found is None:
        return None
    name, gpu = found
    gpu = replace(gpu, gb_s=report["rates"]["read_bytes_per_s"] / 1e9 / FITTED.memory)
    kernels = [kernel for run in report["bench"] if "profiles" in run for kernel in _kernels(run, gpu)]
    ranked = sorted(
        kernels, key=lambda kernel: -abs(kernel["measured_us"] - kernel["predicted_us"]) * kernel["launches"]
    )
    return {
        "status": "predicted",
        "hardware": name,
        "fitted": asdict(FITTED),
        "kernels": kernels,
        "worst": ranked[:WORST],
    }


def _kernels(run: Data, gpu: RDNA3Gpu) -> list[Data]:
    """Every kernel of every profiled step of a model."""
    model, rows = SyntheticModel(run["model"]), {row["label"]: row for row in run["rows"]}
    planned = Planned(model, min(8192, model.config.trained_context), run["kv"])
    found = []
    for label, profile in run["profiles"].items():
        predicted = _predicted(planned, _first_step(rows[label]), gpu)
        for group in profile:
            if (key := (group["kernel"], group["name"])) in predicted:
                seconds, shader, bound = predicted[key]
                found.append({
                    "model": run["model"], "step": label, "kernel": group["kernel"], "value": group["name"],
                    "shader": shader, "launches": group["launches"], "bound": bound,
                    "measured_us": group["seconds"] / group["launches"] * 1e6, "predicted_us": seconds * 1e6,
                })  # fmt: skip
    return found


def _first_step(row: Data) -> Step:
    if row["kind"] == "decode":
        return [(row["depth"], 1)] * row["batch"]
    return [(row["depth"], min(row["tokens"], 512))]


def _predicted(planned: Planned, step: Step, gpu: RDNA3Gpu) -> dict[tuple[str, str], tuple[float, str, str]]:
    """Of a launch: seconds, shader, and what binds it."""
    found = {}
    for launch, shader, work in launches(planned.program, step):
        time = launch_time(work, gpu)
        found[launch.kernel.name, value_name(launch)] = time.total, shader, time.bound
    return found

"""`tandem report --npu`: tests of the NPU by itself, and prefill with and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.bench.rounds import Bench, Workload
from tandem.devices.backends import open_device
from tandem.devices.device import Device
from tandem.devices.npu import report
from tandem.devices.npu.attach import with_npu
from tandem.errors import TandemError
from tandem.model.model import Model
from tandem.model.synthetic import SyntheticModel

Data = dict[str, Any]
MODEL = "gemma-3-4b:q4_0"
PROMPT = 512
ROUNDS = 5


def collect(root: Path = Path("/"), model: Model | None = None, prompt: int = PROMPT, **how: Any) -> Data:
    """The data of `tandem.devices.npu.report` and, if there is an NPU, prefill rates."""
    data = report.collect(root, **how)
    if data["missing"]:
        return data
    model = model or SyntheticModel(MODEL)
    return {**data, "prefill": [_prefill(model, prompt, npu, root) for npu in ("off", "require")]}


def _prefill(model: Model, prompt: int, npu: str, root: Path) -> Data:
    workload = Workload("prefill", prompt)
    try:
        device: Device = with_npu(open_device("auto", alone=False), npu, root=root)
    except TandemError as error:
        return {"npu": npu, "error": str(error)}
    try:
        row = Bench(model, device, [workload]).measure(workload, ROUNDS)
        return {
            "npu": npu,
            "device": device.describe(),
            "seconds": row.seconds,
            "tokens_per_s": row.tokens_per_s,
        }
    except TandemError as error:
        return {"npu": npu, "error": str(error)}
    finally:
        device.close()

"""Known machines from hardware.toml: memory bandwidths, peak rates, and what share of them our kernels reach."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from tandem.errors import DeviceError

MAX_GIB = 1_000_000  # of memory
GTT_SHARE = 0.5  # share of an APU's memory that Linux lets its GPU map by default (docs/AMD.md)
HOST_SHARE = 0.9  # share of a CPU's memory that a model may use: the rest is the system's
NOT_RUN = "estimate; not yet run"
RAN = "estimate; calibrated by measurements on this hardware"
PARTS = ("dot_memory", "dot_ops", "matrix_memory", "matrix_ops", "attention_memory", "attention_ops")
MEASURED = "estimate; from rates measured on this machine"


@dataclass(frozen=True)
class Calibration:
    """Kernel efficiency: the shares of a machine's rates that our kernels reach, and us of a launch and a step."""

    step_us: float
    launch_us: dict[str, float]
    dot_memory: float
    dot_ops: float
    matrix_memory: float
    matrix_ops: float
    attention_memory: float
    attention_ops: float
    source: str

    def __post_init__(self) -> None:
        if not all(0 < part <= 1 for part in self.parts.values()):
            raise DeviceError(
                "a kernel's share of the hardware's rate must be above 0 and at most 1: correct the calibration"
            )

    @property
    def parts(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in PARTS}


@dataclass(frozen=True)
class Hardware:
    """The fields are explained at the top of hardware.toml."""

    name: str
    title: str
    kind: str
    ran: bool
    pin_gb_s: float
    read_gb_s: float
    usual_gb_s: float
    matrix_tflop_s: float
    peak_top_s: float
    dot_top_s: float
    matrix_from: int
    memory_gib: float
    carve_out_gib: float
    sources: dict[str, str]
    calibration: Calibration
    npu: dict[str, Any] | None = None
    rdna3: dict[str, Any] | None = None  # of an AMD GPU: cus, ghz, vgprs, l2_mib
    warning: str = ""  # of "this" machine: what disturbed its measurement

    def __post_init__(self) -> None:
        """Refuses rates with which a prediction could exceed the roofline."""
        if not 0 < self.usual_gb_s <= self.read_gb_s <= self.pin_gb_s:
            raise DeviceError(f"{self.name}: usual_gb_s must be at most read_gb_s, and that at most pin_gb_s")
        if not all(0 < rate <= self.peak_top_s for rate in (self.matrix_tflop_s, self.dot_top_s)):
            raise DeviceError(f"{self.name}: matrix_tflop_s and dot_top_s must be at most peak_top_s")

    @property
    def status(self) -> str:
        if self.name == "this":
            return MEASURED
        return RAN if self.ran else NOT_RUN

    @property
    def heaps(self) -> dict[str, float]:
        """Bytes that a model may take in each heap, in the order in which heaps are filled."""
        total, carved = self.memory_gib * 2**30, self.carve_out_gib * 2**30
        if self.name == "this":
            return {"free": total}
        if self.kind == "apu":
            return {"carved out": carved, "GTT": (total - carved) * GTT_SHARE}
        return {"device": total} if self.kind == "gpu" else {"memory": total * HOST_SHARE}


def load_hardware(name: str, memory_gib: float | None = None) -> Hardware:
    """`memory_gib`: replaces the usual memory size."""
    data = {known: figures for known, figures in _read().items() if known != "calibration"}
    if name not in data:
        raise DeviceError(f"unknown hardware {name!r}: use this, or one of {', '.join(data)}")
    found = Hardware(name, calibration=calibration_of(data[name]["kind"]), **data[name])
    return found if memory_gib is None else with_memory(found, memory_gib)


def with_memory(hardware: Hardware, gib: float) -> Hardware:
    if not 0 < gib <= MAX_GIB:
        raise DeviceError(f"a memory of {gib:g} GiB is not possible: give a size above 0, up to {MAX_GIB:,}")
    return replace(hardware, memory_gib=gib)


def calibration_of(kind: str) -> Calibration:
    return Calibration(**_read()["calibration"][kind])


def known_hardware() -> list[str]:
    return [name for name in _read() if name != "calibration"]


def _read() -> dict[str, Any]:
    return tomllib.loads(files("tandem.bench").joinpath("hardware.toml").read_text())

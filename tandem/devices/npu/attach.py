"""`--npu`: attaches the NPU as an accelerator to the device that runs the model. Emulated; not yet run on a Phoenix."""

from __future__ import annotations

import warnings
from pathlib import Path

from tandem.devices.device import Device
from tandem.devices.npu.detect import detect
from tandem.errors import DeviceError, RequestError

MODES = ("off", "auto", "require")


def npu_missing(mode: str, root: Path = Path("/")) -> str:
    """Returns why the NPU cannot be used, in one sentence; empty: it can, or `mode` is off. With `require`, raises an
    error. Takes milliseconds, so that it can run before a model is loaded."""
    if mode not in MODES:
        raise RequestError(f"npu={mode!r}: use {', '.join(MODES)}")
    if mode == "off":
        return ""
    found = detect(root)
    if not found.ready and mode == "require":
        raise DeviceError(found.missing)
    return "" if found.ready else f"going on without the NPU: {found.missing}"


def with_npu(device: Device, mode: str, shape: str | None = None, root: Path = Path("/")) -> Device:
    """The device with the NPU as an accelerator of its matmuls, if `mode` asks for it and there is one; otherwise the
    device itself. `shape`: the model, whose matmuls were measured (int8_matmuls.py); None: only its time matters."""
    try:
        if mode == "off":
            return device
        if said := npu_missing(mode, root):
            warnings.warn(said, stacklevel=2)
            return device
        from tandem.devices.npu.accelerator import attach_npu  # needs pyxrt

        return attach_npu(device, shape, required=mode == "require")
    except DeviceError as error:
        if mode == "require":
            device.close()
            raise
        warnings.warn(f"going on without the NPU: {error}", stacklevel=2)
        return device

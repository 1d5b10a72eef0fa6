"""`--placement`: combines several devices into one. The first is the main device, the others are its accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from tandem.devices.device import Device
from tandem.devices.tensor_parallel.accelerator import DeviceAccelerator
from tandem.devices.tensor_parallel.device import Mapped, TensorParallelDevice
from tandem.errors import DeviceError

PLACEMENTS = ("layers", "columns", "columns-overlapped", "npu-attention")


def open_tensor_parallel(
    devices: Sequence[Device], placement: str, split: Sequence[int] | None
) -> TensorParallelDevice:
    """Checks the placement, and opens a TensorParallelDevice."""
    if placement not in PLACEMENTS:
        raise DeviceError(f"no placement {placement!r}: use one of {', '.join(PLACEMENTS)}")
    main, *others = devices
    if placement == "npu-attention" and (len(others) != 1 or split is not None):
        raise DeviceError(
            "--placement npu-attention runs attention on the second of two devices: name two devices, and no split"
        )
    if not main.shares_memory:
        raise DeviceError(
            f"{main.name} has its own memory, and results are combined in host memory: use --placement layers"
        )
    return TensorParallelDevice(
        cast(Mapped, main), [DeviceAccelerator(device) for device in others], placement, split
    )

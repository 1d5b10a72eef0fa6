"""`--npu` of several commands."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.devices.device import Device


def settled(mode: str) -> str:
    """The mode to go on with: off where there is no NPU to use, which is said once; an error where it is required."""
    if mode == "off":
        return mode
    from tandem.devices.npu.opening import npu_missing

    said = npu_missing(mode)
    if said:
        print(f"tandem: {said}", file=sys.stderr, flush=True)
    return "off" if said else mode


def open_with_npu(mode: str, device: str, **how: Any) -> Device:
    """As `open_device`, with the NPU's help if that is wanted."""
    from tandem.devices.npu.opening import with_npu
    from tandem.devices.opening import open_device

    return with_npu(open_device(device, **how, alone=mode == "off"), mode)

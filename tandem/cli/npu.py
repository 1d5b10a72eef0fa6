"""`--npu` of several commands."""

from __future__ import annotations

import sys


def settled(mode: str) -> str:
    """The mode to go on with: off where there is no NPU to use, which is said once; an error where it is required."""
    if mode == "off":
        return mode
    from tandem.devices.npu.opening import npu_missing

    said = npu_missing(mode)
    if said:
        print(f"tandem: {said}", file=sys.stderr, flush=True)
    return "off" if said else mode

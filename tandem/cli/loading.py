"""How commands get their model and their device: the model's file, tuning at a GPU's first use, and the NPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli import interruptible
from tandem.cli.terminal import note, progress_bar
from tandem.errors import TandemError
from tandem.model import registry
from tandem.settings import read_settings

if TYPE_CHECKING:
    from tandem.devices.device import Device

TUNING_CONTEXT = 4096  # tokens of a sequence, at most


def model_file(model: str) -> Path:
    """The file of MODEL, fetched with a progress bar if it is not on this machine."""
    try:
        with interruptible(), progress_bar() as progress:
            return registry.resolve(model, pull=True, progress=progress)
    except KeyboardInterrupt:
        note("stopped; the next pull goes on from here")
        raise


def tune_at_first_use(device: str | None, model: Path, no_tune: bool) -> None:
    """A few seconds of tuning where a GPU has not had any with this driver and these kernels. It tries once: a failure
    is not the user's, and a folder that cannot be written would have it tuned at each start."""
    from tandem.devices import opening

    settings, name = read_settings(), device or "auto"
    if no_tune or not settings.tune or name.startswith("cpu") or "," in name:
        return
    if name == "auto" and not opening.has_gpu():
        return
    from tandem.devices.vulkan.pipelines import shader_sum

    if next(settings.pipelines.glob(f"vulkan-*-{shader_sum()}.tuned"), None):
        return
    try:
        _tune_quickly(name, model, settings.pipelines)
    except (TandemError, OSError) as error:
        note(f"not tuned: {error}")


def _tune_quickly(name: str, model: Path, folder: Path) -> None:
    from tandem.devices import opening
    from tandem.devices.vulkan.device import VulkanDevice
    from tandem.model.model import open_model
    from tandem.plan.predict import Planned
    from tandem.tune.search import QUICK_LIMIT, keep, tune

    device = opening.open_device(name)
    try:
        if not isinstance(device, VulkanDevice) or device.capabilities.kind == "software":
            return
        keep(device, [], folder)
        print(
            f"first use of {device.capabilities.name}: finding its fastest kernels takes {QUICK_LIMIT:.0f} s "
            "(once; --no-tune leaves it out, `tandem tune` does more)", file=sys.stderr, flush=True,
        )  # fmt: skip
        with open_model(model) as opened:
            context = min(TUNING_CONTEXT, opened.config.trained_context)
            program = Planned(opened, context).program
            keep(device, list(tune(device, program, context=context, quick=True)), folder)
    finally:
        device.close()


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

"""A quick tuning when a GPU is used for the first time with its driver and our kernels."""

from __future__ import annotations

import sys
from pathlib import Path

from tandem.cli.terminal import note
from tandem.devices import opening
from tandem.errors import TandemError
from tandem.settings import read_settings

CONTEXT = 4096  # of a sequence, at most


def tune_at_first_use(device: str | None, model: Path, no_tune: bool) -> None:
    """A few seconds of tuning where a GPU has not had any with this driver and these kernels. It tries once: a failure
    is not the user's, and a folder that cannot be written would have it tuned at each start."""
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
    from tandem.devices.vulkan.device import VulkanDevice
    from tandem.model.model import open_model
    from tandem.plan.predict import Planned
    from tandem.tune.tune import QUICK_LIMIT, keep, tune

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
            context = min(CONTEXT, opened.config.trained_context)
            program = Planned(opened, context).program
            keep(device, list(tune(device, program, context=context, quick=True)), folder)
    finally:
        device.close()

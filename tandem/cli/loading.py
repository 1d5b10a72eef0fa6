"""Loading for commands: the model's file (downloaded if needed), tuning at the first use of a GPU, and the NPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli import interruptible
from tandem.cli.terminal import note, progress_bar
from tandem.errors import TandemError
from tandem.model import locate
from tandem.settings import read_settings

if TYPE_CHECKING:
    from tandem.devices.device import Device

MAX_TUNING_CONTEXT = 4096  # tokens of a sequence


def draft_file(draft: str) -> str | Path:
    """The file of a draft model, or the name of another way to draft."""
    from tandem.engine.load_options import DRAFT_HEAD, NO_DRAFT

    return draft if draft in (DRAFT_HEAD, NO_DRAFT) else model_file(draft)


def model_file(model: str) -> Path:
    """The file of MODEL, downloaded with a progress bar if it is not on this machine."""
    try:
        with interruptible(), progress_bar() as progress:
            return locate.resolve(model, pull=True, progress=progress)
    except KeyboardInterrupt:
        note("stopped; the next pull resumes here")
        raise


def add_mmproj(model: str, path: Path) -> None:
    """Downloads the vision encoder of a model in the cache, if its repository has one. The model works without."""
    try:
        with interruptible(), progress_bar() as progress:
            locate.pull_mmproj(model, path, progress)
    except TandemError as error:
        print(f"tandem: the vision encoder was not fetched: {error}", file=sys.stderr, flush=True)


def tune_at_first_use(device: str | None, model: Path, no_tune: bool) -> None:
    """Tunes a GPU for a few seconds if it has not been tuned with this driver and these kernels.

    A failure is only noted, and not tried again: the command works without tuning.
    """
    from tandem.devices import backends

    settings, name = read_settings(), device or "auto"
    if no_tune or not settings.tune or name.startswith(("cpu", backends.EMULATED)) or "," in name:
        return
    if name == "auto" and not backends.has_gpu():
        return
    from tandem.devices.vulkan.shader_modules import shader_checksum

    if next(settings.pipelines.glob(f"vulkan-*-{shader_checksum()}.tuned"), None):
        return
    try:
        _tune_quickly(name, model, settings.pipelines)
    except (TandemError, OSError) as error:
        note(f"not tuned: {error}")


def _tune_quickly(name: str, model: Path, folder: Path) -> None:
    from tandem.devices import backends
    from tandem.devices.vulkan.device import VulkanDevice
    from tandem.model.model import open_model
    from tandem.plan.predict import Planned
    from tandem.tune.search import QUICK_LIMIT, keep, tune

    device = backends.open_device(name)
    try:
        if not isinstance(device, VulkanDevice) or device.capabilities.kind == "software":
            return
        keep(device, [], folder)
        print(
            f"first use of {device.capabilities.name}: tuning its kernels for {QUICK_LIMIT:.0f} s "
            "(once; --no-tune skips it, `tandem tune` does more)",
            file=sys.stderr,
            flush=True,
        )
        with open_model(model) as opened:
            context = min(MAX_TUNING_CONTEXT, opened.config.trained_context)
            program = Planned(opened, context).program
            keep(device, list(tune(device, program, context=context, quick=True)), folder)
    finally:
        device.close()


def resolve_npu(mode: str) -> str:
    """The mode of `--npu` to use: "off", with a message, if there is no usable NPU; an error if it is required."""
    if mode == "off":
        return mode
    from tandem.devices.npu.attach import npu_missing

    problem = npu_missing(mode)
    if problem:
        print(f"tandem: {problem}", file=sys.stderr, flush=True)
    return "off" if problem else mode


def open_with_npu(mode: str, device: str, **how: Any) -> Device:
    """`open_device`, with the NPU as an accelerator unless `mode` is "off"."""
    from tandem.devices.backends import open_device
    from tandem.devices.npu.attach import with_npu

    return with_npu(open_device(device, **how, alone=mode == "off"), mode)

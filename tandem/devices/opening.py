"""Opens a device by its name: cpu, vulkan, vulkan:<index>, vulkan:<part of a name>, auto, or several of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from glob import glob

from tandem.devices.cpu.device import CPUDevice
from tandem.devices.cpu.tuned import tuned_choices, tuned_threads
from tandem.devices.device import Device
from tandem.errors import DeviceError
from tandem.settings import read_settings

# Files that the kernel shows where there is a GPU; without one, `auto` is spared loading Vulkan.
GPU_NODES = ("/dev/dri/renderD*", "/dev/nvidiactl", "/dev/dxg")


def has_gpu() -> bool:
    return any(glob(pattern) for pattern in GPU_NODES)


class CPUInstead(CPUDevice):
    """The CPU where a GPU is there but does not work; it says so."""

    def __init__(self, threads: int, problem: DeviceError) -> None:
        super().__init__(threads)
        self.problem = problem

    def describe(self) -> str:
        return f"{super().describe()}; no GPU is used: {self.problem}"


def check_device(name: str, split: Sequence[int] | None = None, placement: str = "layers") -> None:
    """What `open_device` would refuse is refused, and nothing opened: before a model is fetched for it."""
    _check_names(name, split, placement)
    wanted = [each for each in name.split(",") if each.startswith("vulkan")]
    if wanted:
        from tandem.devices.vulkan.capabilities import choose
        from tandem.devices.vulkan.device import devices

        found = devices()
        for each in wanted:
            choose(found, each)


def _check_names(name: str, split: Sequence[int] | None, placement: str) -> None:
    names = name.split(",")
    for each in names:
        if each not in ("auto", "cpu") and each.partition(":")[0] != "vulkan":
            raise DeviceError(
                f"no device {each!r}: use cpu, vulkan, vulkan:<index>, vulkan:<part of its name> or auto"
            )
    if len(names) > 1:
        if "auto" in names:
            raise DeviceError("auto chooses one device: name each of several")
    elif placement != "layers":
        raise DeviceError(
            f"--placement {placement} divides a step between devices, and {name} is one: name several, as in vulkan,cpu"
        )
    elif split is not None:
        raise DeviceError(
            f"layers are split between devices, and {name} is one: name several, as in vulkan,cpu"
        )


def open_device(
    name: str,
    *,
    threads: int | None = None,
    gpu_memory: float | None = None,
    split: Sequence[int] | None = None,
    placement: str = "layers",
    alone: bool = True,
) -> Device:
    """`threads`: of the CPU. `gpu_memory`: bytes of a GPU's own memory to use at most. `placement`: what several
    devices divide (PLACEMENTS of hybrid/device.py). `split`: how many of a model's layers each has, or which share of
    a matmul's columns; None: by what it does in a second. `alone`: no other device reads its activations."""
    _check_names(name, split, placement)
    settings = read_settings()
    threads = threads or tuned_threads(settings)
    if "," in name:
        return _open_several(name.split(","), threads, gpu_memory, split, placement)
    if name == "cpu" or (name == "auto" and not has_gpu()):
        return CPUDevice(threads, tuned_choices(settings, threads))
    from tandem.devices.vulkan.device import VulkanDevice  # costs a tenth of a second

    try:
        wanted = "vulkan" if name == "auto" else name  # which is the best GPU, and never a software one
        device = VulkanDevice(wanted, gpu_memory=gpu_memory, cache=settings.pipelines)
        device.pipelines.q8_sums = not alone
        return device
    except DeviceError as error:
        if name != "auto":
            raise
        return CPUInstead(threads, error)


def _open_several(
    names: list[str], threads: int, gpu_memory: float | None, split: Sequence[int] | None, placement: str
) -> Device:
    from tandem.devices.hybrid.opening import open_hybrid
    from tandem.devices.split.device import SplitDevice

    share = max(1, threads // max(1, names.count("cpu")))
    with ExitStack() as undo:
        devices = []
        for name in names:
            devices.append(open_device(name, threads=share, gpu_memory=gpu_memory, alone=False))
            undo.callback(devices[-1].close)
        found = (
            SplitDevice(devices, split) if placement == "layers" else open_hybrid(devices, placement, split)
        )
        undo.pop_all()
    return found

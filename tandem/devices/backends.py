"""The registry of back ends: opens a device by its name.

A name is `cpu`, `vulkan`, `vulkan:<index>`, `vulkan:<part of a name>` or `auto`, or several names with commas between
them. Another back end adds itself with `register`; nothing else needs to know it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from glob import glob

from tandem.devices.cpu.device import CPUDevice
from tandem.devices.cpu.tuned import tuned_choices, tuned_threads
from tandem.devices.device import Device
from tandem.errors import DeviceError
from tandem.settings import Settings, read_settings

# A Radeon 780M that is not here, for tests: nothing but its name chooses it.
EMULATED = "vulkan:rdna3-emulated"
# Device files that the kernel creates for a GPU. Without one, `auto` does not load Vulkan.
GPU_NODES = ("/dev/dri/renderD*", "/dev/nvidiactl", "/dev/dxg")


@dataclass(frozen=True)
class OpenOptions:
    threads: int  # number of CPU threads
    gpu_memory: float | None = None  # maximum bytes of a GPU's own memory to use
    alone: bool = True  # no other device reads the device's activations
    settings: Settings = field(default_factory=read_settings)


@dataclass(frozen=True)
class Backend:
    """A kind of device. Its functions import the back end's modules: only the devices that are used get imported."""

    usage: str  # the names that it opens, for messages
    open: Callable[[str, OpenOptions], Device]  # by name
    # Refuses the names that `open` would refuse, but opens nothing.
    check: Callable[[Sequence[str]], None] = lambda names: None
    present: Callable[[], bool] = lambda: False  # whether `auto` should try it; must be quick


BACKENDS: dict[str, Backend] = {}  # by the part of a name before ":"


def register(name: str, backend: Backend) -> None:
    """Adds a back end: `name` and `name:<anything>` open its devices. `auto` tries back ends in this order."""
    BACKENDS[name] = backend


def has_gpu() -> bool:
    return any(glob(pattern) for pattern in GPU_NODES)


def _open_cpu(name: str, options: OpenOptions) -> Device:
    return CPUDevice(options.threads, tuned_choices(options.settings, options.threads))


def _open_vulkan(name: str, options: OpenOptions) -> Device:
    if name == EMULATED:
        from tandem.devices.rdna3.device import EmulatedDevice

        return EmulatedDevice()
    from tandem.devices.vulkan.device import VulkanDevice  # the import takes a tenth of a second
    from tandem.kernels.matmul_dispatch import reads_q8_sums

    device = VulkanDevice(name, gpu_memory=options.gpu_memory, cache=options.settings.pipelines)
    device.pipelines.q8_sums = not options.alone or reads_q8_sums(device.capabilities)
    return device


def _check_vulkan(names: Sequence[str]) -> None:
    from tandem.devices.vulkan.capabilities import choose
    from tandem.devices.vulkan.device import devices

    available = devices() if set(names) != {EMULATED} else []
    for name in set(names) - {EMULATED}:
        choose(available, name)


register("cpu", Backend("cpu", _open_cpu))
register(
    "vulkan",
    Backend("vulkan, vulkan:<index>, vulkan:<part of its name>", _open_vulkan, _check_vulkan, has_gpu),
)


class FallbackCPU(CPUDevice):
    """The CPU in place of a GPU that does not work; its description says why."""

    def __init__(self, threads: int, problem: DeviceError) -> None:
        super().__init__(threads)
        self.problem = problem

    def describe(self) -> str:
        return f"{super().describe()}; no GPU is used: {self.problem}"


def check_device(name: str, split: Sequence[int] | None = None, placement: str = "layers") -> None:
    """Refuses arguments that `open_device` would refuse, but opens nothing: called before a model is downloaded."""
    check_names(name)
    _check_placement(name, split, placement)
    names = name.split(",")
    for kind, backend in BACKENDS.items():
        wanted = [each for each in names if each.partition(":")[0] == kind]
        if wanted:
            backend.check(wanted)


def check_timed(name: str) -> None:
    """Refuses a device whose speed means nothing."""
    if EMULATED in name.split(","):
        raise DeviceError(f"{EMULATED} says nothing about speed: choose a device that is there")


def check_names(name: str) -> None:
    """Refuses names of unknown back ends."""
    for each in name.split(","):
        if each != "auto" and (each.partition(":")[0] not in BACKENDS or each.startswith("cpu:")):
            known = ", ".join(backend.usage for backend in BACKENDS.values())
            raise DeviceError(f"no device {each!r}: use {known} or auto")


def _check_placement(name: str, split: Sequence[int] | None, placement: str) -> None:
    names = name.split(",")
    if len(names) > 1:
        check_timed(name)  # which divides the work
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
    """Opens a device, or several as one. `threads`, `gpu_memory` and `alone`: see OpenOptions. `placement`: how several
    devices divide the work (PLACEMENTS in tensor_parallel/placement.py). `split`: the number of layers of each device,
    or its fraction of each matmul's columns; None: by measured speed."""
    check_names(name)
    _check_placement(name, split, placement)
    settings = read_settings()
    options = OpenOptions(threads or tuned_threads(settings), gpu_memory, alone, settings)
    if "," in name:
        return _open_several(name.split(","), options, split, placement)
    if name == "auto":
        return _open_best(options)
    return BACKENDS[name.partition(":")[0]].open(name, options)


def _open_best(options: OpenOptions) -> Device:
    """Opens the first back end besides the CPU that is present; the CPU if there is none or if it does not work."""
    for name, backend in BACKENDS.items():
        if backend.present():
            try:
                return backend.open(name, options)
            except DeviceError as error:
                return FallbackCPU(options.threads, error)
    return _open_cpu("cpu", options)


def _open_several(
    names: list[str], options: OpenOptions, split: Sequence[int] | None, placement: str
) -> Device:
    threads = max(1, options.threads // max(1, names.count("cpu")))
    with ExitStack() as undo:
        devices = []
        for name in names:
            devices.append(open_device(name, threads=threads, gpu_memory=options.gpu_memory, alone=False))
            undo.callback(devices[-1].close)
        device: Device
        if placement == "layers":
            from tandem.devices.split.device import SplitDevice

            device = SplitDevice(devices, split)
        else:
            from tandem.devices.tensor_parallel.placement import open_tensor_parallel

            device = open_tensor_parallel(devices, placement, split)
        undo.pop_all()
    return device

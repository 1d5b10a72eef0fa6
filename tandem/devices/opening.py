"""Opens a device by its name: cpu, vulkan, vulkan:<index>, vulkan:<part of a name>, or auto."""

from __future__ import annotations

from tandem.devices.cpu.device import CPUDevice
from tandem.devices.device import Device
from tandem.errors import DeviceError
from tandem.settings import read_settings


def open_device(name: str, *, threads: int | None = None, gpu_memory: float | None = None) -> Device:
    """`threads`: of the CPU. `gpu_memory`: bytes of a GPU's own memory to use at most."""
    settings = read_settings()
    if name in ("auto", "cpu"):
        return CPUDevice(threads or settings.threads)
    if name.partition(":")[0] == "vulkan":
        from tandem.devices.vulkan.device import VulkanDevice  # costs a tenth of a second

        return VulkanDevice(name, gpu_memory=gpu_memory, cache=settings.pipelines)
    raise DeviceError(
        f"no device {name!r}: use cpu, vulkan, vulkan:<index>, vulkan:<part of its name> or auto"
    )

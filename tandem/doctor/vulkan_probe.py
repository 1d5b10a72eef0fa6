"""Lists the Vulkan devices in a separate process, so that a driver that crashes or hangs does not stop the others."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from tandem.errors import DeviceError

if TYPE_CHECKING:
    from tandem.devices.vulkan.capabilities import Capabilities

TIMEOUT = 60.0  # seconds
UPDATE = "update your GPU's Vulkan driver, or uninstall the one you do not need"


@dataclass(frozen=True)
class VulkanProbe:
    """What the probe found."""

    loader: str = ""  # version of the loader; "": there is none
    devices: list[Capabilities] = field(default_factory=list)
    problem: str = ""  # why there are no devices


def probe_vulkan() -> VulkanProbe:
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_probe, args=(sender,), daemon=True)
    process.start()
    sender.close()  # leaves the child's end as the only one, so that its death is an EOFError here
    loader = ""
    try:
        while receiver.poll(TIMEOUT):
            message = receiver.recv()
            if isinstance(message, VulkanProbe):
                return message
            loader = message
        return VulkanProbe(loader, [], f"a Vulkan driver hangs when it lists its devices: {UPDATE}")
    except EOFError:
        return VulkanProbe(loader, [], f"a Vulkan driver crashes when it lists its devices: {UPDATE}")
    finally:
        process.kill()
        process.join()


def _probe(sender: Connection) -> None:
    """Runs in the child: sends the loader's version, then a VulkanProbe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # drivers print to stderr
    loader = ""
    try:
        from tandem.devices.vulkan.binding import Vulkan, ffi
        from tandem.devices.vulkan.capabilities import version
        from tandem.devices.vulkan.device import devices

        number = ffi.new("uint32_t *")
        Vulkan().EnumerateInstanceVersion(number)
        loader = ".".join(map(str, version(number[0])))
        sender.send(loader)
        sender.send(VulkanProbe(loader, devices()))
    except DeviceError as error:
        sender.send(VulkanProbe(loader, [], str(error)))
    except ImportError as error:
        sender.send(VulkanProbe(loader, [], f"{error}: install the missing package with pip"))

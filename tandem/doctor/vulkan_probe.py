"""Asks for the Vulkan devices in a process of its own: a driver that crashes or hangs takes only that one along."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from tandem.errors import DeviceError

if TYPE_CHECKING:
    from tandem.devices.vulkan.capabilities import Capabilities

SECONDS = 60.0
UPDATE = "update your GPU's Vulkan driver, or uninstall the one you do not need"


@dataclass(frozen=True)
class VulkanAnswer:
    loader: str = ""  # the loader's version; "": there is none
    devices: list[Capabilities] = field(default_factory=list)
    problem: str = ""  # why there are no devices


def ask_vulkan() -> VulkanAnswer:
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender,), daemon=True)
    process.start()
    sender.close()  # so that the child's end is the only one, and its death is seen
    loader = ""
    try:
        while receiver.poll(SECONDS):
            answer = receiver.recv()
            if isinstance(answer, VulkanAnswer):
                return answer
            loader = answer
        return VulkanAnswer(loader, [], f"a Vulkan driver hangs when it is asked for its devices: {UPDATE}")
    except EOFError:
        return VulkanAnswer(loader, [], f"a Vulkan driver crashes when it is asked for its devices: {UPDATE}")
    finally:
        process.kill()
        process.join()


def _answer(sender: Connection) -> None:
    """Sends the loader's version, then all there is to say."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # drivers talk
    loader = ""
    try:
        from tandem.devices.vulkan.binding import Vulkan, ffi
        from tandem.devices.vulkan.capabilities import version
        from tandem.devices.vulkan.device import devices

        number = ffi.new("uint32_t *")
        Vulkan().EnumerateInstanceVersion(number)
        loader = ".".join(map(str, version(number[0])))
        sender.send(loader)
        sender.send(VulkanAnswer(loader, devices()))
    except DeviceError as error:
        sender.send(VulkanAnswer(loader, [], str(error)))
    except ImportError as error:
        sender.send(VulkanAnswer(loader, [], f"{error}: install what is missing with pip"))

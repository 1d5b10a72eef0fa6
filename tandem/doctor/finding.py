"""What a check of `tandem doctor` says, and where it looks. Tests give it another root, with files of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tandem.devices.host_memory import host_memory
from tandem.doctor.vulkan_probe import VulkanAnswer, ask_vulkan
from tandem.settings import read_settings

Status = Literal["pass", "warn", "fail"]
READ_BYTES = 256 << 20  # more than caches hold, and little enough to be free


@dataclass(frozen=True)
class Finding:
    """`fail`: what is there does not work; `warn`: it works, but could do more. Fields: docs/DOCTOR.md."""

    name: str
    status: Status
    found: str
    fix: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    shown: tuple[str, ...] = ()  # for the screen alone: names and paths of the user's


def from_error(name: str, error: Exception, status: Status = "fail") -> Finding:
    """Our errors say what is wrong, a colon, and what to do."""
    found, _, fix = str(error).partition(": ")
    if isinstance(error, ImportError):
        fix = f"pip install {error.name}"
    return Finding(name, status, found, fix or "look at the lines above")


@dataclass
class Place:
    """A machine: where its files are, and how to ask it what is in no file."""

    root: Path = Path("/")
    ask: Callable[[], VulkanAnswer] = ask_vulkan
    may_open: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    read_rate: Callable[[], float] = lambda: host_read_rate()

    @cached_property
    def vulkan(self) -> VulkanAnswer:
        return self.ask()

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.root.glob(pattern))

    def text(self, path: str | Path) -> str:
        """Of a file under the root, without blanks around it; "" if it is not there or may not be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str | Path) -> int | None:
        try:
            return int(self.text(path), 0)
        except ValueError:
            return None


Check = Callable[[Place], Iterator[Finding]]


def host_read_rate() -> float:
    """Bytes that all threads together read in a second."""
    from tandem.bench.bandwidth import HostReads  # needs the C core, which may be what is missing

    return HostReads(read_settings().threads, int(min(READ_BYTES, host_memory() / 4))).best()

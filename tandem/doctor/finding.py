"""Finding, the result of a check of `tandem doctor`, and Place, the machine that is examined."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tandem.devices.host_memory import host_memory
from tandem.doctor.vulkan_probe import VulkanProbe, probe_vulkan
from tandem.settings import read_settings

Status = Literal["pass", "warn", "fail"]
READ_BYTES = 256 << 20  # larger than the caches, and small enough to be free


@dataclass(frozen=True)
class Finding:
    """`fail`: it does not work; `warn`: it works, but not as well as it could. Fields: docs/DOCTOR.md."""

    name: str
    status: Status
    found: str
    fix: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    shown: tuple[str, ...] = ()  # the user's names and paths, for the screen only


def from_error(name: str, error: Exception, status: Status = "fail") -> Finding:
    """A finding from an error message of the form "problem: fix"."""
    found, _, fix = str(error).partition(": ")
    if isinstance(error, ImportError):
        fix = f"pip install {error.name}"
    return Finding(name, status, found, fix or "see the lines above")


@dataclass
class Place:
    """A machine: the root of its files (tests use another one), and functions for what is in no file."""

    root: Path = Path("/")
    probe: Callable[[], VulkanProbe] = probe_vulkan
    may_open: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    read_rate: Callable[[], float] = lambda: host_read_rate()

    @cached_property
    def vulkan(self) -> VulkanProbe:
        return self.probe()

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.root.glob(pattern))

    def text(self, path: str | Path) -> str:
        """The stripped text of a file under the root; "" if it does not exist or is not readable."""
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
    """Bytes a second that all threads together read."""
    from tandem.bench.bandwidth import HostReads  # imported here: it needs the C core, which may be missing

    return HostReads(read_settings().threads, int(min(READ_BYTES, host_memory() / 4))).best()

"""How much memory this process may still take: what the machine has, and what its control groups (containers) allow."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

# Of the versions 2 and 1 of control groups: files with the limit and the use, and lines of memory.stat that count
# what is used for files only and would be given up.
VERSIONS = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def host_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes of memory that are free, or used for files only."""
    fields = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    page_cache_aware = fields.get("MemAvailable", fields["MemFree"])
    free = int(page_cache_aware.split()[0]) * 1024.0
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free, physical, *(_free_in(group) for group in _groups(proc, groups)))


def touched_memory(proc: Path = Path("/proc")) -> int:
    """Bytes of memory that this process has in use, but for files."""
    fields = dict(line.split(":", 1) for line in (proc / "self" / "status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def _groups(proc: Path, root: Path) -> Iterator[Path]:
    """The folders of the process's groups and of those above them, each of which may have a limit.

    A container often sees its own group as the root, whatever path its processes are told.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for mount in {"": (root, root / "unified"), "memory": (root / "memory",)}.get(controllers, ()):
            group = mount / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(mount))


def _free_in(group: Path) -> float:
    """Bytes a group leaves; infinite where it has no limit."""
    for limit, use, files in VERSIONS:
        try:
            most, used = (int((group / name).read_text()) for name in (limit, use))
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return max(0, most - used + sum(int(counts.get(name, 0)) for name in files))
    return math.inf

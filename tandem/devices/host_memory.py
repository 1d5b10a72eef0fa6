"""The memory that this process may still allocate: limited by the machine and by its control groups (containers)."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tandem.errors import OutOfMemoryError

# Free memory that a request must leave, at least and at most; between them, 16 times what it needs itself. Libraries
# written in Rust end the process when an allocation fails, so there must always be enough for their small ones.
MIN_RESERVE, MAX_RESERVE = 1 << 20, 24 << 20
MUCH = 64 << 20  # bytes of a request above which the free memory is read, which takes 0.1 ms
GIVE_BACK_SECONDS = 0.5  # between two times that free memory is given back
_given_back = -GIVE_BACK_SECONDS  # the last time
# Control groups of version 2 and 1: the files with the limit and the usage, and the lines of memory.stat that count the
# page cache, which the kernel frees on demand.
VERSIONS = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def host_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Returns the bytes of memory that are free or page cache."""
    fields = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    page_cache_aware = fields.get("MemAvailable", fields["MemFree"])
    free = int(page_cache_aware.split()[0]) * 1024.0
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free, physical, *(_free_in(group) for group in _groups(proc, groups)))


def require_memory(nbytes: int) -> None:
    """Raises an OutOfMemoryError if the process may not allocate `nbytes` and leave a reserve."""
    wanted = nbytes + min(max(16 * nbytes, MIN_RESERVE), MAX_RESERVE)
    if not _can_map(wanted):
        _give_back()
        if not _can_map(wanted):
            raise OutOfMemoryError
    if nbytes >= MUCH and host_memory() < wanted:
        raise OutOfMemoryError


def _can_map(nbytes: int) -> bool:
    try:
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError, OverflowError):
        return False
    return True


def _give_back() -> None:
    """Gives the kernel the memory that requests have left behind: cycles of objects, and free blocks of the heap."""
    global _given_back
    if time.monotonic() < _given_back + GIVE_BACK_SECONDS:  # it takes milliseconds
        return
    gc.collect()
    with suppress(AttributeError, OSError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
    _given_back = time.monotonic()


def touched_memory(proc: Path = Path("/proc")) -> int:
    """Returns the bytes of anonymous memory of this process that are resident."""
    fields = dict(line.split(":", 1) for line in (proc / "self" / "status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def _groups(proc: Path, root: Path) -> Iterator[Path]:
    """Yields the folders of the process's groups and of their parents, each of which may have a limit.

    A container often sees its own group as the root, although its processes have another path.
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
    """Returns the bytes that a group may still allocate; infinite if it has no limit."""
    for limit, use, files in VERSIONS:
        try:
            limited, used = (int((group / name).read_text()) for name in (limit, use))
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return max(0, limited - used + sum(int(counts.get(name, 0)) for name in files))
    return math.inf

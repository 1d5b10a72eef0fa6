"""Cores of their own for a server, for the clients that measure it, and for attackers: what they wait for is then the
server's doing, and not the machine's. A machine with too few cores has them all together."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

SERVER, ATTACKERS = 2, 2  # cores; the clients have one


@dataclass(frozen=True)
class Cores:
    server: frozenset[int]  # one hardware thread of each core: two would compute at half the speed
    clients: frozenset[int]
    attackers: frozenset[int]


@cache
def apart(server: int = SERVER) -> Cores | None:
    """Whole cores: no two parties have hardware threads of the same. None if there are too few for it."""
    cores = sorted({frozenset(_siblings(i)) for i in os.sched_getaffinity(0)}, key=min)
    if len(cores) < 1 + ATTACKERS + server:
        return None
    clients, *others = cores[: 1 + ATTACKERS]
    own = cores[1 + ATTACKERS : 1 + ATTACKERS + server]
    return Cores(frozenset(map(min, own)), clients, frozenset().union(*others))


def _siblings(core: int) -> set[int]:
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    found = {core}
    for part in path.read_text().strip().split(",") if path.exists() else ():
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found & os.sched_getaffinity(0)


def pinning(cores: frozenset[int] | None) -> Callable[[], None] | None:
    """What a new process calls to stay on these cores, before its program begins."""
    return partial(os.sched_setaffinity, 0, cores) if cores else None

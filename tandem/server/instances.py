"""The servers that run on this machine: each has a small file of its user's, which it keeps locked while it lives."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tandem.settings import read_settings

POLL = 0.05  # seconds


class Instance(NamedTuple):
    pid: int
    url: str
    models: list[str]
    started: float  # seconds since 1970
    api_keys: str | None  # the file with its keys: whoever may read it may use them


def _folder() -> Path:
    return read_settings().pipelines / "servers"


@contextmanager
def announced(url: str, models: list[str], api_keys: Path | None) -> Iterator[None]:
    """While the block runs, `tandem ps` shows this process as a server."""
    keys = str(api_keys.resolve()) if api_keys else None
    instance = Instance(os.getpid(), url, models, time.time(), keys)
    path = _folder() / f"{instance.pid}.json"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    with path.open("x") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(instance._asdict()))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def running() -> list[Instance]:
    """All that live, oldest first; files of those that were killed are tidied away."""
    found = []
    for path in _folder().glob("*.json"):
        with suppress(OSError, ValueError, TypeError), path.open() as file:
            if _locked(file.fileno()):
                found.append(Instance(**json.load(file)))
            else:
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda instance: instance.started)


def stop(instance: Instance, seconds: float) -> bool:
    """Asks a server to end its answers and go; False if it has not gone in the time."""
    with suppress(ProcessLookupError):
        os.kill(instance.pid, signal.SIGTERM)
    end = time.monotonic() + seconds
    while any(other.pid == instance.pid for other in running()):
        if time.monotonic() > end:
            return False
        time.sleep(POLL)
    return True


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False

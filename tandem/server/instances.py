"""The registry of running servers of this user, for `tandem ps`, `stop` and `run`: one locked file for each process."""

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

POLL_SECONDS = 0.05


class Instance(NamedTuple):
    pid: int
    url: str
    models: list[str]
    started: float  # seconds since 1970
    api_keys: str | None  # path of the file with its API keys


def _folder() -> Path:
    return read_settings().pipelines / "servers"


@contextmanager
def registered(url: str, models: list[str], api_keys: Path | None) -> Iterator[None]:
    """Registers this process as a server while the block runs."""
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
    """The running servers, oldest first. Files of killed servers are removed."""
    found = []
    for path in _folder().glob("*.json"):
        with suppress(OSError, ValueError, TypeError), path.open() as file:
            if _locked(file.fileno()):
                found.append(Instance(**json.load(file)))
            else:
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda instance: instance.started)


def stop(instance: Instance, seconds: float) -> bool:
    """Sends SIGTERM and waits; False if the server is still running after `seconds`."""
    with suppress(ProcessLookupError):
        os.kill(instance.pid, signal.SIGTERM)
    end = time.monotonic() + seconds
    while any(other.pid == instance.pid for other in running()):
        if time.monotonic() > end:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False

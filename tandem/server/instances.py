"""The registry of running servers of this user, for `tandem ps`, `stop` and `run`: one locked file for each process.

Others must not write to it: `tandem stop` kills the processes that it names, `tandem run` sends prompts and API keys to
their addresses.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import struct
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tandem.errors import RequestError
from tandem.files import NOT_OWN, private_folder
from tandem.settings import read_settings

POLL_SECONDS = 0.05
MAX_SIZE = 1 << 20  # bytes of a file
MAX_TIME = 1e11  # seconds since 1970
FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, process


class Instance(NamedTuple):
    pid: int
    url: str
    models: list[str]
    started: float  # seconds since 1970
    api_keys: str | None  # path of the file with its API keys


@contextmanager
def registered(url: str, models: list[str], api_keys: Path | None) -> Iterator[None]:
    """Registers this process as a server while the block runs. A full disk brings a warning: it is not listed then."""
    keys = str(api_keys.resolve()) if api_keys else None
    instance = Instance(os.getpid(), url, models, time.time(), keys)
    file, path = None, None
    try:
        path = _folder() / f"{instance.pid}.json"
        # Under another name until it is locked and whole: `running` removes a file that nobody has locked.
        unfinished = path.with_suffix(".new")
        unfinished.unlink(missing_ok=True)
        file = unfinished.open("x")
        fcntl.lockf(file, fcntl.LOCK_EX)
        file.write(json.dumps(instance._asdict()))
        file.flush()
        unfinished.rename(path)
    except (OSError, RequestError) as error:
        problem = f"{path or _path()}: {error.strerror}" if isinstance(error, OSError) else error
        warnings.warn(f"`tandem ps` will not show this server: {problem}", stacklevel=2)
    try:
        yield
    finally:
        if path:
            path.unlink(missing_ok=True)
            path.with_suffix(".new").unlink(missing_ok=True)
        if file:
            with suppress(OSError):  # what could not be written
                file.close()


def running() -> list[Instance]:
    """The running servers of this user, oldest first. Files of killed servers are removed."""
    found = []
    with suppress(OSError):
        for path in _folder().glob("*.json"):
            if instance := _read(path):
                found.append(instance)
    return sorted(found, key=lambda instance: instance.started)


def stop(instance: Instance, seconds: float) -> bool:
    """Sends SIGTERM and waits; False if the server is still running after `seconds`."""
    with suppress(ProcessLookupError):
        if instance in running():
            os.kill(instance.pid, signal.SIGTERM)
    end = time.monotonic() + seconds
    while any(other.pid == instance.pid for other in running()):
        if not time.monotonic() <= end:  # also if it is not a number
            return False
        time.sleep(POLL_SECONDS)
    return True


def _path() -> Path:
    return read_settings().pipelines / "servers"


def _folder() -> Path:
    """The folder of the registry. Only this user can write to it, also if it was there before."""
    try:
        return private_folder(_path())
    except OSError as error:
        if error.strerror != NOT_OWN:
            raise
        raise RequestError(f"{_path()} is {NOT_OWN}: remove it, or set XDG_CACHE_HOME") from None


def _read(path: Path) -> Instance | None:
    """The server of a file of this user, if the process that it names holds its lock. The kernel knows that process, so
    a forged file names nobody else's."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return None
            if (holder := _lock_holder(file)) is None:
                path.unlink(missing_ok=True)
                return None
            instance = Instance(**json.loads(os.read(file, MAX_SIZE)))
            return instance if instance.pid == holder and _is_sound(instance) else None
        finally:
            os.close(file)
    return None


def _is_sound(instance: Instance) -> bool:
    return (
        isinstance(instance.url, str)
        and isinstance(instance.models, list)
        and all(isinstance(model, str) for model in instance.models)
        and isinstance(instance.started, float)
        and 0 <= instance.started < MAX_TIME
        and isinstance(instance.api_keys, str | None)
    )


def _lock_holder(file: int) -> int | None:
    """The process that holds the lock of a file, None if none does. Of another machine or container: not above 0."""
    asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else int(pid)

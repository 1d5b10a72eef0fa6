"""Reads files that users name: a path may name a pipe, a device, a folder, a file of any size. Writes whole files."""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path
from threading import get_ident

NOT_REGULAR = "not a regular file"
LAST_DATE = (
    253_370_764_800.0  # seconds from 1970 to 9999: later dates, which file systems have, Python has not
)


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Opens a file. Raises OSError also for a folder, a pipe (which would wait for its writer) and a device (which may
    never end)."""
    file = FileIO(path, opener=lambda name, _: os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, NOT_REGULAR, os.fspath(path))
    return file


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Returns the bytes of a file. Raises OSError also for more than `max_bytes`, before it reads them."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", os.fspath(path))
        data = bytearray()
        while part := file.read(max_bytes + 1 - len(data)):  # it may grow meanwhile
            data += part
        if len(data) > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", os.fspath(path))
    return bytes(data)


def modified(*files: os.stat_result) -> float:
    """When the latest of the files was written, in seconds since 1970: a date that Python can show."""
    return min(max(0.0, *(file.st_mtime for file in files)), LAST_DATE)


def write_whole(path: str | os.PathLike[str], *parts: bytes) -> None:
    """Writes a file. Others see the former one or the new one, whole. If it cannot be written, the former one stays.

    A link stays, and the file it leads to is written. Raises OSError also for a folder, a pipe and a device.
    """
    path = os.path.realpath(path)
    if os.path.lexists(path) and not os.path.isfile(path):  # a link that is left leads back to itself
        raise OSError(errno.EINVAL, NOT_REGULAR, path)
    # A name of its own: two writers do not mix, and nothing that is there is opened.
    unfinished = Path(f"{path}.{os.getpid()}-{get_ident()}.part")
    with open(unfinished, "xb") as file:
        try:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink()
            raise

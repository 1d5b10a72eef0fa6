"""Reads files that users name: a path may name a pipe, a device, a folder, a file of any size. Writes whole files."""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path
from threading import get_ident

NOT_REGULAR = "not a regular file"
NOT_OWN = "not a folder of this user"
# Seconds from 1970 to 9999: later dates, which file systems have, Python has not.
LAST_DATE = 253_370_764_800.0


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, folder: int | None = None) -> FileIO:
    """Opens a file, in an open `folder` if one is given. Raises OSError also for a folder, a pipe (which would wait for
    its writer) and a device (which may never end). One that it creates is for this user only."""

    def opener(name: str, _: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)

    file = FileIO(path, "r" if flags & os.O_ACCMODE == os.O_RDONLY else "r+", opener=opener)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, NOT_REGULAR, os.fspath(path))
    return file


def private_folder(path: Path) -> Path:
    """Makes a folder, if need be. Only this user may look into it, also if it was there before. Raises OSError if it is
    another user's, or no folder."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(errno.EACCES, NOT_OWN, os.fspath(path))
    if status.st_mode & 0o077:
        path.chmod(0o700)
    return path


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

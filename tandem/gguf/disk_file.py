"""A model file on the disk, read with `pread`: a file that is cut short or written while it is open is an error.

Reading a mapped file beyond its end would kill the process (SIGBUS), and with it every other model and request.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from tandem.errors import ModelFileError, ModelNotFoundError, OutOfMemoryError
from tandem.files import NOT_REGULAR, open_regular


def allocate(nbytes: int) -> mmap.mmap:
    """Returns memory to read a file into. Not of the heap, which would keep it afterwards."""
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise OutOfMemoryError from None


class DiskFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_regular(path)
        except FileNotFoundError:
            raise ModelNotFoundError(f"{path}: no such file") from None
        except IsADirectoryError:
            raise ModelNotFoundError(f"{path} is a directory: name a .gguf file inside it") from None
        except (OSError, ValueError) as error:  # ValueError: a path with a zero byte in it
            problem = getattr(error, "strerror", None) or error
            if problem == NOT_REGULAR:
                raise ModelFileError(path, "magic", 0, f"this is {problem}: name a .gguf file") from None
            raise ModelNotFoundError(f"{path} cannot be opened: {problem}") from None
        self.version = self._version()  # when it was opened
        self.size = self.version[0]

    def read_into(self, out: memoryview, offset: int, field: str) -> None:
        """Fills `out` with the bytes from `offset`. `field`: what they are, for the error."""
        left = out.cast("B")
        while left:
            try:
                count = os.preadv(self._file.fileno(), [left], offset)
            except OSError as error:
                raise ModelFileError(
                    self.path, field, offset, f"the disk fails ({error.strerror}): fetch the file again"
                ) from None
            if count == 0:
                raise ModelFileError(
                    self.path, field, offset, "the file was cut short while it was read: fetch it again"
                )
            left, offset = left[count:], offset + count

    def check_unchanged(self) -> None:
        """Raises an error if the file was written since it was opened."""
        if self._version() != self.version:
            raise ModelFileError(
                self.path, "contents", 0, "the file was changed after it was opened: open the model again"
            )

    def _version(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def close(self) -> None:
        self._file.close()

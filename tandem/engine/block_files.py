"""KV blocks and recurrent states in files: what the prefix cache on disk keeps.

A file has one block of one KV group, or one state:

    magic, identity (16 bytes), key (17 bytes), checksum of all other bytes (16 bytes), the block

    FOLDER/IDENTITY/KEY   the identity stands for the model and the layout of its KV cache, the key for the block's
                          hash and its group, so the name says all that the content depends on
    FOLDER/used           the bytes of all files together

Several processes may share a folder. A file appears whole, under its final name, and is never changed; two that write
one name write the same bytes. Who adds or evicts files has `used` locked. Nothing is read that is not exactly as it was
written, and nothing but a file of this user is opened. Any failure of the disk is a miss.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from _blake2 import blake2b  # not from hashlib, which spends milliseconds on loading OpenSSL
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tandem.devices.device import Bytes
from tandem.files import open_regular, private_folder

MAGIC = b"tandem block 1\n"
IDENTITY, KEY, CHECKSUM = 16, 17, 16  # bytes
HEADER = len(MAGIC) + IDENTITY + KEY + CHECKSUM
NUMBER = 24  # bytes of `used`
PAGE = 4096  # files take whole pages of the disk
FOLDER_NAME = re.compile(rf"[0-9a-f]{{{2 * IDENTITY}}}")
PART = ".part"  # the end of an unfinished file's name
FILE_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY}}}(?:\{PART})?")
EVICT_TO = 0.9  # of the budget: listing all files takes long, so it makes room for many
LOCK_SECONDS = 5.0  # to wait for another process that evicts
RETRY_SECONDS = 10.0  # without writing, after the disk failed: it may be full


class BlockFiles:
    """The files of one model, in a folder that may have those of others. Threads of the disk cache call its methods."""

    def __init__(self, folder: Path, identity: bytes, budget: int) -> None:
        """`budget`: maximum bytes of the whole folder."""
        self.folder, self.identity, self.budget = private_folder(folder), identity, budget
        # Keys of files that are there, unless another process has evicted them.
        self.known: set[bytes] = set()
        self.used = 0  # bytes of the folder when it was last looked at
        self.read_bytes = self.written_bytes = self.evicted = self.damaged = self.failed = 0
        with suppress(OSError), open_regular(self.folder / "used", os.O_RDONLY | os.O_NOFOLLOW) as file:
            self.used = _number(file.read(NUMBER)) or 0
        self._unlisted = budget  # bytes written since the folder was listed; at first it must be
        self._failed_at = -RETRY_SECONDS

    # `when`: the time of use, in ns, of the first of some files. Those after it count as used a little earlier, so that
    # the end of a prefix is evicted first.

    # ---- reading

    def find(self, keys: Iterable[bytes]) -> Iterator[bool]:
        """Yields for each key whether it has a file."""
        with self._opened() as folder:
            for key in keys:
                yield folder is not None and self._size(key, folder) is not None

    def read(self, keys: Sequence[bytes], into: Bytes, when: int) -> int:
        """Reads blocks into the rows of `into` [blocks, bytes], up to the first that is missing or damaged; returns
        how many were read."""
        count = 0
        with self._opened() as folder:
            while folder is not None and count < len(keys) and self._read(keys[count], into[count], folder):
                self._touch(keys[count], when - 1000 * count, folder)
                count += 1
        self.known.update(keys[:count])
        self.known.difference_update(keys[count : count + 1])
        self.read_bytes += into[:count].nbytes
        return count

    def _read(self, key: bytes, into: Bytes, folder: int) -> bool:
        try:
            file = open_regular(key.hex(), os.O_RDONLY | os.O_NOFOLLOW, folder)
        except FileNotFoundError:
            return False
        except OSError:
            self.failed += 1
            return False
        header = bytearray(HEADER)
        with file, suppress(OSError):
            if os.fstat(file.fileno()).st_size == HEADER + into.nbytes:
                file.readinto(header)
                read = file.readinto(into.data)
                if read == into.nbytes and header == self._header(key, into):
                    return True
        self.damaged += 1
        with suppress(OSError):
            os.unlink(key.hex(), dir_fd=folder)  # so that it is written again
        return False

    def _header(self, key: bytes, block: Bytes) -> bytes:
        start = MAGIC + self.identity + key
        checksum = blake2b(start, digest_size=CHECKSUM)
        checksum.update(block.data)
        return start + checksum.digest()

    # ---- writing

    def write(self, keys: Sequence[bytes], blocks: Bytes, when: int) -> None:
        """Writes those of the `blocks` [blocks, bytes] that have no file yet. After the disk failed, which may be full,
        it writes nothing for a time."""
        done = 0
        if time.monotonic() >= self._failed_at + RETRY_SECONDS:
            try:
                private_folder(self.folder)  # again, for someone may have removed it
                done = self._write_all(keys, blocks, when)
            except OSError:
                self._failed_at = time.monotonic()
        self.known.update(keys[:done])
        self.failed += len(keys) - done

    def _write_all(self, keys: Sequence[bytes], blocks: Bytes, when: int) -> int:
        """Returns how many of the blocks are on the disk then, from the first on."""
        with _open_folder(self.folder) as root, _locked(root) as used:
            with suppress(FileExistsError):
                os.mkdir(self.identity.hex(), 0o700, dir_fd=root)
            with _open_folder(self.identity.hex(), root) as folder:
                for i, key in enumerate(keys):
                    if not self._touch(key, when - 1000 * i, folder):
                        if not self._make_room(_on_disk(HEADER + blocks.shape[1]), root, used):
                            return i
                        self._write(key, blocks[i], when - 1000 * i, folder)
        return len(keys)

    def touch(self, keys: Sequence[bytes], when: int) -> None:
        """Marks files as used."""
        with self._opened() as folder:
            for i, key in enumerate(keys):
                if folder is None or not self._touch(key, when - 1000 * i, folder):
                    self.known.discard(key)

    def _write(self, key: bytes, block: Bytes, when: int, folder: int) -> None:
        name, part = key.hex(), key.hex() + PART
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=folder)  # of a process that was killed
        try:
            with open_regular(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder) as file:
                for data in (self._header(key, block), block.data):
                    rest = memoryview(data)
                    while rest:
                        rest = rest[file.write(rest) :]
            os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(part, dir_fd=folder)
            raise
        os.utime(name, ns=(when, when), dir_fd=folder, follow_symlinks=False)
        self.written_bytes += HEADER + block.nbytes

    def _touch(self, key: bytes, when: int, folder: int) -> bool:
        """Marks a file as used at a time; returns False if there is none."""
        if self._size(key, folder) is None:
            return False
        with suppress(OSError):
            os.utime(key.hex(), ns=(when, when), dir_fd=folder, follow_symlinks=False)
        return True

    def _size(self, key: bytes, folder: int) -> int | None:
        try:
            status = os.stat(key.hex(), dir_fd=folder, follow_symlinks=False)
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    # ---- the budget

    def _make_room(self, nbytes: int, root: int, file: int) -> bool:
        """Adds bytes that will be written to the number in `used`, the open `file`. Evicts the files of any model that
        were not used for longest if need be; returns False if the budget is too small."""
        if nbytes > self.budget:
            return False
        used = _number(os.pread(file, NUMBER, 0))
        self._unlisted += nbytes
        # Also from time to time: someone may have removed files, or killed a process before it wrote one.
        if used is None or used + nbytes > self.budget or self._unlisted > self.budget // 10:
            used, self._unlisted = self._evict(root, self.budget - nbytes), nbytes
        self.used = used + nbytes
        os.pwrite(file, b"%*d\n" % (NUMBER - 1, self.used), 0)
        return True

    def _evict(self, root: int, limit: int) -> int:
        """Lists all files, and evicts some if they are more than `limit` bytes; returns the bytes that are left."""
        files = sorted(_all_files(root))
        used = sum(nbytes for _, nbytes, _, _ in files)
        goal = used if used <= limit else min(limit, EVICT_TO * self.budget)
        for _, nbytes, folder, name in files:
            if used <= goal and not name.endswith(PART):
                continue
            with suppress(OSError):
                with _open_folder(folder, root) as opened:
                    os.unlink(name, dir_fd=opened)
                used -= nbytes
                self.evicted += not name.endswith(PART)
                if folder == self.identity.hex() and not name.endswith(PART):
                    self.known.discard(bytes.fromhex(name))
        return used

    # ---- folders

    @contextmanager
    def _opened(self) -> Iterator[int | None]:
        """Opens the folder of this model; None if there is none."""
        with ExitStack() as opened:
            folder = None
            with suppress(OSError):
                root = opened.enter_context(_open_folder(self.folder))
                folder = opened.enter_context(_open_folder(self.identity.hex(), root))
            yield folder


def _all_files(root: int) -> Iterator[tuple[int, int, str, str]]:
    """Yields time of use, bytes on the disk, folder and name of each file of the cache; others have other names."""
    for name in os.listdir(root):
        if not FOLDER_NAME.fullmatch(name):
            continue
        with suppress(OSError), _open_folder(name, root) as folder, os.scandir(folder) as files:
            for file in files:
                with suppress(OSError):
                    status = file.stat(follow_symlinks=False)
                    if FILE_NAME.fullmatch(file.name) and stat.S_ISREG(status.st_mode):
                        yield status.st_mtime_ns, _on_disk(status.st_size), name, file.name


@contextmanager
def _locked(root: int) -> Iterator[int]:
    """Opens and locks `used`. Raises OSError if another process does not unlock it."""
    with open_regular("used", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, root) as opened:
        file, end = opened.fileno(), time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.002)
        try:
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open too


@contextmanager
def _open_folder(path: Path | str, within: int | None = None) -> Iterator[int]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        yield folder
    finally:
        os.close(folder)


def _on_disk(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _number(text: bytes) -> int | None:
    try:
        number = int(text)
    except ValueError:
        return None
    return number if number >= 0 else None

"""Reads the values of a GGUF file one after the other, each checked against the end of the file before use.

The file is read in growing parts, since only its values say where the header ends.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, overload

import numpy as np

from tandem.errors import ModelFileError
from tandem.gguf.disk_file import DiskFile, allocate
from tandem.kernels.kernel import Array
from tandem.native import ffi, load

# Metadata types: the numbers by their code, the same in `struct` and NumPy, and the two that are not numbers.
NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
BOOL, STRING, ARRAY = 7, 8, 9

MAX_HEADER = 1 << 27  # bytes before the tensors; a large vocabulary takes 20 MB. Bounds every count below
FIRST_READ = 1 << 20
MAX_NAME = 65535
MAX_NESTING = 4
MAX_ENTRIES = 1 << 17  # keys, tensors and nested arrays of a file; models have a few thousand

CUT_SHORT = "the file is cut short, fetch it again"
NEWER = "the file is damaged or newer than this engine, fetch it again or upgrade"


class StringArray(Sequence[str]):
    """An array of strings, decoded on access: string i is `lengths[i]` bytes of `blob` from `offsets[i]`."""

    def __init__(self, blob: Array, offsets: Array, lengths: Array) -> None:
        self.blob, self.offsets, self.lengths = blob, offsets, lengths  # uint8, int64, int64

    def __len__(self) -> int:
        return len(self.offsets)

    def bytes_at(self, index: int) -> bytes:
        start = int(self.offsets[index])
        return self.blob[start : start + int(self.lengths[index])].tobytes()

    def __contains__(self, text: object) -> bool:
        data = text.encode() if isinstance(text, str) else b""
        return any(self.bytes_at(i) == data for i in np.flatnonzero(self.lengths == len(data)).tolist())

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.bytes_at(index).decode(errors="replace")

    def __iter__(self) -> Iterator[str]:
        blob = self.blob.tobytes()
        for start, length in zip(self.offsets.tolist(), self.lengths.tolist(), strict=True):
            yield blob[start : start + length].decode(errors="replace")

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings)"


def label(name: str) -> str:
    """Returns a name for error messages: printable, with at most its first 80 characters."""
    return name if name.isprintable() and len(name) <= 80 else ascii(name[:80])


class Cursor:
    """Reads forward through the header of a file; `field`: the name in error messages."""

    def __init__(self, file: DiskFile) -> None:
        self.path, self._file, self.size = file.path, file, min(file.size, MAX_HEADER)
        self.at, self.field, self.entries = 0, "magic", 0
        if self.size == 0:
            self.fail("the file is empty", 0, "fetch it again")
        self.data, self.known = allocate(self.size), 0  # the header, of which `known` bytes have been read
        self.read_up_to(min(FIRST_READ, self.size))

    def fail(self, problem: str, at: int, advice: str = "the file is damaged, fetch it again") -> NoReturn:
        raise ModelFileError(self.path, self.field, at, f"{problem}: {advice}")

    def take(self, size: int) -> int:
        """Steps over `size` bytes and returns where they start."""
        start, left = self.at, self.size - self.at
        if size > left:
            self.fail(f"this needs {size} bytes where {left} are left", start, CUT_SHORT)
        self.at += size
        if self.at > self.known:
            self.read_up_to(self.at)
        return start

    def read_up_to(self, end: int) -> None:
        """Reads the file up to `end`, or beyond it."""
        end = min(max(end, 2 * self.known), self.size)
        with memoryview(self.data) as data:
            self._file.read_into(data[self.known : end], self.known, self.field)
        self.known = end

    def number(self, code: str) -> Any:
        return struct.unpack_from(code, self.data, self.take(struct.calcsize(code)))[0]

    def count(self, smallest: int) -> int:
        """Reads a count of items of at least `smallest` bytes each; they must fit in the rest of the file."""
        at, count = self.at, int(self.number("<Q"))
        if count * smallest > self.size - self.at:
            self.fail(f"a count of {count} is more than the file can hold", at)
        return count

    def entries_of(self, smallest: int) -> int:
        """Reads a count like `count`, of items that become Python objects; their total per file is limited."""
        at, count = self.at, self.count(smallest)
        self.entries += count
        if self.entries > MAX_ENTRIES:
            self.fail(f"{self.entries} entries where models have a few thousand", at)
        return count

    def text(self) -> bytes:
        start = self.take(self.count(1))
        return self.data[start : self.at]

    def name(self, field: str) -> str:
        """Reads a key or the name of a tensor. Later errors name it."""
        self.field, at = field, self.at
        raw = self.text()
        if not 0 < len(raw) <= MAX_NAME:
            self.fail(f"a name has 1 to {MAX_NAME} bytes, not {len(raw)}", at)
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            self.fail("the name is not UTF-8", at)
        self.field = label(name)
        return name

    def value(self, kind: int) -> Any:
        at = self.at
        if kind == STRING:
            return self.text().decode(errors="replace")
        if kind == ARRAY:
            return self.array(depth=1)
        self.check_number(kind, at - 4)
        if kind != BOOL:
            return self.number("<" + NUMBERS[kind])
        byte = self.number("<B")
        if byte > 1:
            self.fail("true or false is stored as 1 or 0", at)
        return byte == 1

    def check_number(self, kind: int, at: int) -> None:
        if kind not in NUMBERS:
            self.fail(f"unknown metadata type {kind}", at, NEWER)

    def array(self, depth: int) -> Any:
        kind_at, kind = self.at, self.number("<I")
        if kind == STRING:
            return self.strings(self.count(8))
        if kind == ARRAY:
            if depth == MAX_NESTING:
                self.fail(f"arrays nested more than {MAX_NESTING} deep", kind_at)
            return [self.array(depth + 1) for _ in range(self.entries_of(12))]
        self.check_number(kind, kind_at)
        dtype = np.dtype("<" + NUMBERS[kind])
        start = self.take(self.count(dtype.itemsize) * dtype.itemsize)
        raw = self.data[start : self.at]
        if kind == BOOL and raw.strip(b"\0\1"):
            self.fail("true or false is stored as 1 or 0", start)
        return np.frombuffer(raw, dtype)

    def strings(self, count: int) -> StringArray:
        offsets, lengths = np.empty(count, np.int64), np.empty(count, np.int64)
        pointers = [ffi.cast("int64_t *", array.ctypes.data) for array in (offsets, lengths)]
        while True:
            with ffi.from_buffer(self.data) as data:
                used = load().tandem_scan_strings(data + self.at, self.known - self.at, count, *pointers)
            if used >= 0:
                break
            at = self.at + int(offsets[-1 - used])
            end = at + 8
            if end <= self.known:
                end += int.from_bytes(self.data[at:end], "little")
            if end > self.size:
                self.fail(f"string {-1 - used} of {count} runs past the end", at, CUT_SHORT)
            self.read_up_to(end)
        start = self.take(used)
        return StringArray(np.frombuffer(self.data[start : self.at], np.uint8), offsets, lengths)

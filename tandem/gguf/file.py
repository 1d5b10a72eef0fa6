"""A GGUF model: its metadata and its tensors. Versions 2 and 3, whole or split.

Layout: magic, version, counts; metadata (key, type, value); tensor infos (name, dimensions, type, offset);
padding; tensor data. The file is not trusted: each count, length and offset is checked before it is
used, and a fault is a ModelFileError that names file, field and byte. So is a change of the file while it is
open: it is read with `pread`, not mapped, since reading a mapped file that was cut short kills the process.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self, TypeVar, overload

import numpy as np

from tandem.errors import ModelFileError, ModelNotFoundError
from tandem.gguf.cursor import CUT_SHORT, NEWER, Cursor, StringArray, label
from tandem.gguf.disk_file import DiskFile
from tandem.gguf.formats import FORMATS, Format
from tandem.kernels.kernel import Array

__all__ = ["GGUF", "StringArray", "TensorInfo"]

T = TypeVar("T")

HEADER_BYTES = 24  # magic, version, count of tensors, count of keys: where metadata begins
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
KINDS: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


class TensorInfo(NamedTuple):
    name: str
    format: Format
    shape: tuple[int, ...]  # rows first, as NumPy has it: the reverse of the file's order
    offset: int  # bytes from the start of `path`
    nbytes: int
    path: Path
    run: int = 0  # rows that follow each other in the file; 0: all
    period: int = 0  # rows from the first of a run to that of the next

    @property
    def row_bytes(self) -> int:
        return self.format.row_bytes(self.shape[-1])


class GGUF:
    """An open model: `metadata`, `tensors`, and the bytes of each tensor with `raw`."""

    def __init__(self, path: Path) -> None:
        """Reads one file; `open` reads a model with all its parts."""
        self.path = path
        file = DiskFile(path)
        self._files = {path: file}
        self.file_size = file.size
        self.metadata: dict[str, Any] = {}
        self._value_at: dict[str, int] = {}  # where in the file each value of `metadata` is
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_header(Cursor(file))
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Opens a model by its file, or by the first of its files (NAME-00001-of-00003.gguf)."""
        model = cls(Path(path))
        count = model.get("split.count", 0)
        if count > 1:
            for other in _other_parts(model, count):
                model._add(other)
            total = model.get("split.tensors.count", len(model.tensors))
            if total != len(model.tensors):
                model.fail(
                    "split.tensors.count",
                    f"this says {total}, but the files hold {len(model.tensors)}: fetch them again",
                )
        return model

    @property
    def version(self) -> list[tuple[int, int]]:
        """Bytes and time of the last change of each file, when it was opened."""
        return [file.version for file in self._files.values()]

    def _read_header(self, cursor: Cursor) -> None:
        _check_version(cursor)
        cursor.field = "tensor count"
        tensor_count = cursor.entries_of(33)
        cursor.field = "metadata count"
        self._read_metadata(cursor, cursor.entries_of(14))
        self._read_tensors(cursor, tensor_count)

    def _read_metadata(self, cursor: Cursor, count: int) -> None:
        for index in range(count):
            at = cursor.at
            key = cursor.name(f"key {index}")
            if key in self.metadata:
                cursor.fail("the key is there twice", at)
            kind = cursor.number("<I")
            self._value_at[key] = cursor.at
            self.metadata[key] = cursor.value(kind)

    def _read_tensors(self, cursor: Cursor, count: int) -> None:
        alignment = self.get("general.alignment", DEFAULT_ALIGNMENT)
        if alignment <= 0 or (alignment & (alignment - 1) and alignment % 8):
            self.fail(
                "general.alignment", f"{alignment} is no power of two nor multiple of 8: convert it again"
            )
        infos: dict[str, tuple[TensorInfo, int]] = {}
        for index in range(count):
            at = cursor.at
            info, offset_at = _read_tensor(cursor, index, alignment)
            if info.name in infos:
                cursor.field = label(info.name)
                cursor.fail("the tensor is there twice", at)
            infos[info.name] = info, offset_at
        data_start = -(-cursor.at // alignment) * alignment
        self.tensors = {name: i._replace(offset=data_start + i.offset) for name, (i, _) in infos.items()}
        end = 0
        for info in sorted(self.tensors.values(), key=lambda info: info.offset):
            cursor.field, at = f"{label(info.name)} offset", infos[info.name][1]
            if info.nbytes > self.file_size - info.offset:
                cursor.fail(f"{info.nbytes} bytes from {info.offset} run past the end", at, CUT_SHORT)
            if info.offset < end:
                cursor.fail("the tensor overlaps another", at)
            end = info.offset + info.nbytes

    def _add(self, part: GGUF) -> None:
        for name in part.tensors:
            if name in self.tensors:
                part.fail(name, f"the tensor is also in {self.tensors[name].path.name}: fetch both again")
        self.tensors |= part.tensors
        self._files |= part._files
        self.file_size += part.file_size

    def fail(self, field: str, problem: str) -> NoReturn:
        """Raises an error about a key or a tensor of this file."""
        if field in self.tensors:
            raise ModelFileError(self.tensors[field].path, label(field), self.tensors[field].offset, problem)
        raise ModelFileError(self.path, label(field), self._value_at.get(field, HEADER_BYTES), problem)

    def require(self, key: str, kind: type[T]) -> T:
        """Returns the value of `key`, of type `kind`: bool, int, float, str, np.ndarray, StringArray or list."""
        if key not in self.metadata:
            self.fail(key, "the key is missing: fetch or convert the file again")
        value = self.metadata[key]
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            wanted = KINDS.get(kind, f"an array ({kind.__name__})")
            self.fail(key, f"this must be {wanted}, not {type(value).__name__}: convert the model again")
        return value

    @overload
    def get(self, key: str, default: None = None) -> Any: ...
    @overload
    def get(self, key: str, default: T) -> T: ...
    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of `key`, or `default`; a value must be of the default's type (any, for None)."""
        if key not in self.metadata:
            return default
        return self.metadata[key] if default is None else self.require(key, type(default))

    def tensor(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            self.fail(name, "the tensor is missing: fetch or convert the file again")
        return self.tensors[name]

    def divide(self, name: str, parts: Mapping[str, int]) -> None:
        """Replaces a tensor by its parts: the rows of each, by name, in order."""
        whole, rows = self.tensor(name), sum(parts.values())
        if whole.shape[0] != rows:
            self.fail(name, f"shape is {whole.shape}, the metadata asks for {rows} rows: convert it again")
        del self.tensors[name]
        row_bytes, begin = whole.nbytes // rows, whole.offset
        for part, count in parts.items():
            shape, nbytes = (count, *whole.shape[1:]), count * row_bytes
            self.tensors[part] = TensorInfo(part, whole.format, shape, begin, nbytes, whole.path)
            begin += nbytes

    def divide_experts(self, name: str, parts: Sequence[str]) -> None:
        """Replaces a stack [experts, rows, columns] by one for each part: equal shares of each expert's rows."""
        whole, count = self.tensor(name), len(parts)
        if len(whole.shape) != 3 or whole.shape[1] % count or not whole.shape[1]:
            self.fail(name, f"shape is {whole.shape}, not {count} matrices of experts: convert it again")
        del self.tensors[name]
        experts, rows, columns = whole.shape
        run = rows // count
        for i, part in enumerate(parts):
            begin = whole.offset + i * run * whole.row_bytes
            shape, nbytes = (experts, run, columns), whole.nbytes // count
            self.tensors[part] = TensorInfo(part, whole.format, shape, begin, nbytes, whole.path, run, rows)

    def alias(self, name: str, source: str) -> None:
        """Gives a tensor a second name."""
        self.tensors[name] = self.tensor(source)._replace(name=name)

    def divide_runs(self, name: str, parts: Mapping[str, int]) -> None:
        """Replaces a tensor by parts whose rows take turns in it: as many rows of each, by name, at a time."""
        whole, period, begin = self.tensor(name), sum(parts.values()), 0
        if whole.shape[0] % period:
            self.fail(name, f"shape is {whole.shape}, no multiple of {period} rows: convert it again")
        del self.tensors[name]
        for part, run in parts.items():
            shape = (whole.shape[0] // period * run, *whole.shape[1:])
            offset, nbytes = whole.offset + begin * whole.row_bytes, whole.nbytes // period * run
            self.tensors[part] = TensorInfo(
                part, whole.format, shape, offset, nbytes, whole.path, run, period
            )
            begin += run

    def raw(self, name: str) -> Array:
        """Reads a tensor: uint8 [rows, row bytes]."""
        info = self.tensor(name)
        out = np.empty((info.nbytes // info.row_bytes, info.row_bytes), np.uint8)
        self.read_rows(name, 0, out)
        return out

    def read_rows(self, name: str, first: int, out: Array) -> None:
        """Fills `out`, uint8 [rows, row bytes], with the rows of a tensor from `first`."""
        info = self.tensor(name)
        file, rest, at = self._files[info.path], out.reshape(-1).view(np.uint8), first * info.row_bytes
        run = info.run * info.row_bytes or at + len(rest)
        while len(rest):
            size = min(len(rest), run - at % run)
            begin = info.offset + at // run * info.period * info.row_bytes + at % run
            file.read_into(rest[:size].data, begin, label(name))
            rest, at = rest[size:], at + size

    def check_unchanged(self) -> None:
        """Raises an error if a file was written since it was opened: what was read may be of two versions."""
        for file in self._files.values():
            file.check_unchanged()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_version(cursor: Cursor) -> None:
    magic = cursor.data[:4]
    if magic != b"GGUF":
        cursor.fail(f"the file starts with {magic!r}, not b'GGUF'", 0, "this is no GGUF file, name one")
    cursor.field, cursor.at = "version", 4
    version = cursor.number("<I")
    if version in (2, 3):
        return
    if 0 < int.from_bytes(version.to_bytes(4, "little"), "big") <= 3:
        cursor.fail("the file is for big-endian machines", 4, "fetch a little-endian one")
    cursor.fail(f"this engine reads versions 2 and 3, not {version}", 4, "fetch or convert it again")


def _read_tensor(cursor: Cursor, index: int, alignment: int) -> tuple[TensorInfo, int]:
    """Reads a tensor: its offset is relative to the start of the data. Also returns where the offset is stored."""
    name = cursor.name(f"tensor {index}")
    shown = cursor.field
    cursor.field, at = f"{shown} dimensions", cursor.at
    dimensions = cursor.number("<I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        cursor.fail(f"a tensor has 1 to {MAX_DIMENSIONS} dimensions, not {dimensions}", at)
    sizes = [int(cursor.number("<Q")) for _ in range(dimensions)]
    if 0 in sizes:
        cursor.fail(f"a tensor of shape {sizes} holds nothing", at)
    cursor.field, at = f"{shown} type", cursor.at
    kind = cursor.number("<I")
    if kind not in FORMATS:
        cursor.fail(f"unknown tensor type {kind}", at, NEWER)
    format = FORMATS[kind]
    if sizes[0] % format.block:
        cursor.fail(f"rows of {sizes[0]} are not whole blocks of {format.block} ({format.name})", at)
    cursor.field, at = f"{shown} offset", cursor.at
    offset = int(cursor.number("<Q"))
    if offset % alignment:
        cursor.fail(f"{offset} is not a multiple of the alignment, {alignment}", at)
    nbytes = format.row_bytes(math.prod(sizes))
    return TensorInfo(name, format, tuple(reversed(sizes)), offset, nbytes, cursor.path), at


def _other_parts(first: GGUF, count: int) -> Iterator[GGUF]:
    """Opens the second to the last file of a split model and checks that its part number agrees with its name."""
    name = SPLIT_NAME.fullmatch(first.path.name)
    number = first.get("split.no", 0)
    if number != 0:
        hint = f"{name[1]}-00001-of-{count:05d}.gguf" if name else "the first part"
        first.fail("split.no", f"this is part {number + 1} of {count}: open {hint}")
    if name is None or (int(name[2]), int(name[3])) != (1, count):
        ending = f"-00001-of-{count:05d}.gguf"
        first.fail(
            "split.count", f"the first of {count} files must have a name that ends in {ending}: rename it"
        )
    for index in range(1, count):
        path = first.path.with_name(f"{name[1]}-{index + 1:05d}-of-{count:05d}.gguf")
        if not path.exists():
            raise ModelNotFoundError(
                f"{path}: part {index + 1} of {count} is missing; put it beside the first"
            )
        part = GGUF(path)
        for key, expected in (("split.no", index), ("split.count", count)):
            if part.require(key, int) != expected:
                part.fail(key, f"{part.metadata[key]} should be {expected} by the name: fetch it again")
        yield part

"""Reads safetensors files: a length, a header in JSON, and the bytes of tensors. A model may have several (shards).

The files are not trusted: each length, shape and offset is checked before it is used.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from tandem.errors import ConversionError
from tandem.files import read_regular
from tandem.gguf.cursor import label
from tandem.gguf.disk_file import DiskFile
from tandem.gguf.formats import by_name, dequantise
from tandem.kernels.kernel import Array

MAX_HEADER = 100_000_000  # bytes; the limit of the format's own reader
MAX_JSON = 64 << 20  # bytes of other files; the largest tokenizer.json have 35 MB
MAX_TENSORS = 1 << 20
MAX_DIMENSIONS = 5
# The text of the header, and numbers that BERT's folders have among its weights: 0, 1, 2 ...
NO_TENSORS = {"__metadata__", "embeddings.position_ids", "bert.embeddings.position_ids"}
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class StoredTensor(NamedTuple):
    file: DiskFile
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        return self.shape[-1]


class Safetensors:
    """The tensors of a folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._files: list[DiskFile] = []
        try:
            for name in _shards(folder):
                self._add(folder / name)
        except BaseException:
            self.close()
            raise

    def _add(self, path: Path) -> None:
        if not path.is_file():
            raise ConversionError(f"{path} is missing: fetch all files of the model")
        file = DiskFile(path)
        self._files.append(file)
        for name, tensor in _header(file).items():
            if name in self.tensors:
                raise ConversionError(f"{path.name}: {label(name)} is in another file too: fetch both again")
            self.tensors[name] = tensor

    def rows(self, name: str, first: int, count: int) -> Array:
        """Reads rows of a tensor, whose dimensions but the last are one: float32 [count, columns]."""
        tensor = self.tensors[name]
        raw = self.raw_rows(name, first, count)
        return dequantise(by_name(tensor.dtype), raw)

    def raw_rows(self, name: str, first: int, count: int) -> Array:
        """Reads rows of a tensor: uint8 [count, bytes of a row]."""
        tensor = self.tensors[name]
        row_bytes = tensor.columns * ITEM_BYTES[tensor.dtype]
        raw = np.empty((count, row_bytes), np.uint8)
        tensor.file.read_into(raw.data, tensor.offset + first * row_bytes, label(name))
        return raw

    def check_unchanged(self) -> None:
        for file in self._files:
            file.check_unchanged()

    def close(self) -> None:
        for file in self._files:
            file.close()


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a file."""
    try:
        value = json.loads(read_regular(path, MAX_JSON))
    except FileNotFoundError:
        raise ConversionError(f"{path} is missing: name a folder with a whole Hugging Face model") from None
    except (OSError, ValueError, RecursionError) as error:
        problem = getattr(error, "strerror", None) or "this is not JSON"
        raise ConversionError(f"{path} cannot be read ({problem}): fetch it again") from None
    if not isinstance(value, dict):
        raise ConversionError(f"{path} is not a JSON object: fetch it again")
    return value


def _shards(folder: Path) -> list[str]:
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise ConversionError(f"{folder} has neither {SINGLE} nor {INDEX}: fetch the model's safetensors")
        return [SINGLE]
    files = read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ConversionError(f"{folder / INDEX} has no weight_map: fetch it again")
    names = sorted({name if isinstance(name, str) else "" for name in files.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConversionError(
                f"{folder / INDEX} names {label(name)!r}, no file beside it: fetch it again"
            )
    return names


def _header(file: DiskFile) -> dict[str, StoredTensor]:
    """Returns the tensors of a file, whose bytes are inside it."""

    def fail(problem: str) -> ConversionError:
        return ConversionError(f"{file.path}: {problem}: fetch it again")

    if file.size < 8:
        raise fail("this is no safetensors file")
    length_bytes = bytearray(8)
    file.read_into(memoryview(length_bytes), 0, "length of the header")
    length = int.from_bytes(length_bytes, "little")
    if length > min(MAX_HEADER, file.size - 8):
        raise fail(f"a header of {length} bytes is too long for a file of {file.size}")
    raw = bytearray(length)
    file.read_into(memoryview(raw), 8, "header")
    try:
        entries = json.loads(bytes(raw))
    except (ValueError, RecursionError):
        raise fail("the header is not JSON") from None
    if not isinstance(entries, dict) or len(entries) > MAX_TENSORS:
        raise fail("the header is not a list of tensors")
    entries = {name: entry for name, entry in entries.items() if name not in NO_TENSORS}
    begin = 8 + length
    return {name: _tensor(file, name, entry, begin, fail) for name, entry in entries.items()}


def _tensor(file: DiskFile, name: str, entry: Any, begin: int, fail: Any) -> StoredTensor:
    shown = label(name)
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2 and isinstance(dtype, str)):
        raise fail(f"{shown} has no dtype, shape and data_offsets")
    if dtype not in ITEM_BYTES:
        raise ConversionError(
            f"{file.path.name}: {shown} has the type {label(dtype)}, but only {', '.join(ITEM_BYTES)} are read: "
            "fetch an unquantised model"
        )
    if not shape or len(shape) > MAX_DIMENSIONS or 0 in shape:
        raise fail(f"{shown} has the shape {shape[:MAX_DIMENSIONS]}")
    start, end = offsets
    if end - start != math.prod(shape) * ITEM_BYTES[dtype] or begin + end > file.size or start > end:
        raise fail(f"{shown} is cut short, or its shape {tuple(shape)} is wrong")
    return StoredTensor(file, dtype, tuple(shape), begin + start)


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 48 for value in values)

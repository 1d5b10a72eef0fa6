"""The header of a GGUF file (version 3): metadata and tensor infos. The bytes of the tensors follow it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

from tandem.gguf.formats import Format

# A list has values of one type. Integers are unsigned ones of 32 bits, those of a list signed.
Value = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]

ALIGNMENT = 32  # of each tensor, in bytes
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9  # GGUF's types of values
CODES = {UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}
SCALARS: dict[type, int] = {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING}


class NewTensor(NamedTuple):
    name: str
    format: Format
    shape: tuple[int, ...]  # rows first, as NumPy has it

    @property
    def nbytes(self) -> int:
        elements = 1
        for size in self.shape:
            elements *= size
        return self.format.row_bytes(elements)


def padding(nbytes: int) -> bytes:
    """Returns the zero bytes after `nbytes` bytes, so that the next tensor is aligned."""
    return bytes(-nbytes % ALIGNMENT)


def fits(value: object) -> bool:
    """Whether a value can stand in a header."""
    try:
        _typed(value)  # type: ignore[arg-type]
    except (KeyError, struct.error, OverflowError, TypeError, AttributeError):
        return False
    return True


def header(metadata: Mapping[str, Value], tensors: Iterable[NewTensor] = ()) -> bytes:
    """Returns everything before the first tensor. The tensors follow in this order, each with its `padding`."""
    tensors = list(tensors)
    sizes = (tensor.nbytes + len(padding(tensor.nbytes)) for tensor in tensors)
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [part for key, value in metadata.items() for part in (_text(key), _typed(value))]
    for tensor, offset in zip(tensors, accumulate(sizes, initial=0), strict=False):
        sizes_ = tuple(reversed(tensor.shape))
        parts += [_text(tensor.name), struct.pack(f"<I{len(sizes_)}Q", len(sizes_), *sizes_)]
        parts.append(struct.pack("<IQ", tensor.format.ggml_type, offset))
    head = b"".join(parts)
    return head + padding(len(head))


def _text(text: str) -> bytes:
    raw = text.encode(errors="replace")  # a lone surrogate, which JSON may have
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Value) -> bytes:
    if not isinstance(value, list):
        kind = SCALARS[type(value)]
        return struct.pack("<I", kind) + (_text(value) if isinstance(value, str) else _number(kind, value))
    kind = SCALARS[type(value[0])] if value else INT32
    kind = INT32 if kind == UINT32 else kind
    items = (_text(item) if isinstance(item, str) else _number(kind, item) for item in value)
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(items)


def _number(kind: int, value: float) -> bytes:
    return struct.pack(CODES[kind], value)

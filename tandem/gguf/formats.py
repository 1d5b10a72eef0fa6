"""The tensor formats of GGUF files: sizes, and conversion from and to float32 in NumPy.

A row is a whole number of blocks. `dequantise` is the reference that every other reader of a format matches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from tandem.kernels.kernel import Array


class Format(NamedTuple):
    name: str
    ggml_type: int
    block: int  # elements
    block_bytes: int

    def row_bytes(self, elements: int) -> int:
        assert elements % self.block == 0, f"a row of {elements} is not a whole number of {self.name} blocks"
        return elements // self.block * self.block_bytes


# Types 4, 5, 31-33 and 36-38 were withdrawn; Q8_1 and Q8_K (9, 15) hold activations and are never in a file.
FORMATS: dict[int, Format] = {
    row[1]: Format(*row)
    for row in (
        ("F32", 0, 1, 4),
        ("F16", 1, 1, 2),
        ("Q4_0", 2, 32, 18),
        ("Q4_1", 3, 32, 20),
        ("Q5_0", 6, 32, 22),
        ("Q5_1", 7, 32, 24),
        ("Q8_0", 8, 32, 34),
        ("Q2_K", 10, 256, 84),
        ("Q3_K", 11, 256, 110),
        ("Q4_K", 12, 256, 144),
        ("Q5_K", 13, 256, 176),
        ("Q6_K", 14, 256, 210),
        ("IQ2_XXS", 16, 256, 66),
        ("IQ2_XS", 17, 256, 74),
        ("IQ3_XXS", 18, 256, 98),
        ("IQ1_S", 19, 256, 50),
        ("IQ4_NL", 20, 32, 18),
        ("IQ3_S", 21, 256, 110),
        ("IQ2_S", 22, 256, 82),
        ("IQ4_XS", 23, 256, 136),
        ("I8", 24, 1, 1),
        ("I16", 25, 1, 2),
        ("I32", 26, 1, 4),
        ("I64", 27, 1, 8),
        ("F64", 28, 1, 8),
        ("IQ1_M", 29, 256, 56),
        ("BF16", 30, 1, 2),
        ("TQ1_0", 34, 256, 54),
        ("TQ2_0", 35, 256, 66),
        ("MXFP4", 39, 32, 17),
        ("NVFP4", 40, 64, 36),
        ("Q1_0", 41, 128, 18),
        ("Q2_0", 42, 64, 18),
    )
}
_BY_NAME = {format.name: format for format in FORMATS.values()}

_NUMBERS = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_CHUNK = 1 << 17  # elements converted at a time: the temporaries stay in the cache


def by_name(name: str) -> Format:
    """Returns the format called `name`, as in `by_name("Q4_K")`."""
    return _BY_NAME[name]


@cache
def _decoders() -> dict[str, Callable[[Array], Array]]:
    from tandem.gguf import decode, decode_iq  # for few tensors: weights are repacked as they are

    return {**decode.DECODERS, **decode_iq.DECODERS}


def dequantise(format: Format, raw: Array) -> Array:
    """uint8 [..., row bytes] -> float32 [..., elements]."""
    if format.name in _NUMBERS:
        numbers = np.ascontiguousarray(raw).view(_NUMBERS[format.name])
        with np.errstate(all="ignore"):  # a float64 may be beyond float32
            return numbers.astype(np.float32)
    rows = _blocks(raw, format.block_bytes)
    values = np.empty((len(rows), format.block), np.float32)
    step, decode = _CHUNK // format.block, _decoders()[format.name]
    with np.errstate(all="ignore"):  # a scale may be infinite or no number; so are its values then
        for start in range(0, len(rows), step):
            values[start : start + step] = decode(rows[start : start + step])
    return values.reshape(*raw.shape[:-1], raw.shape[-1] // format.block_bytes * format.block)


def quantise(format: Format, values: Array) -> Array:
    """Quantises float32 [..., elements] to uint8 [..., row bytes], rounded to nearest (for synthetic models)."""
    from tandem.gguf import encode

    values = np.ascontiguousarray(values, np.float32)
    if format.name not in (*_NUMBERS, *encode.ENCODERS):
        raise NotImplementedError(f"nothing here writes {format.name}; use {', '.join(encode.ENCODERS)}")
    with np.errstate(all="ignore"):  # a damaged file has values that are infinite or no numbers
        if format.name in _NUMBERS:
            return values.astype(_NUMBERS[format.name]).view(np.uint8)
        raw = encode.ENCODERS[format.name](_blocks(values, format.block))
    return raw.reshape(*values.shape[:-1], format.row_bytes(values.shape[-1]))


def _blocks(rows: Array, size: int) -> Array:
    if rows.shape[-1] % size:
        raise ValueError(f"a row of {rows.shape[-1]} is not a whole number of blocks of {size}")
    return rows.reshape(rows.size // size, size)

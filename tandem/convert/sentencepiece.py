"""Reads tokenizer.model, a SentencePiece model: the fields of its protocol buffer that a GGUF file has too."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tandem.errors import ConversionError, UnsupportedModelError
from tandem.files import read_regular

MAX_BYTES = 64 << 20
BPE = 2  # of TrainerSpec.model_type; 1, which is meant where it is left out: unigrams
Field = tuple[int, int | bytes]  # number, and a varint or bytes


def read_sentencepiece(path: Path) -> tuple[list[tuple[str, float, int]], bool]:
    """Returns text, score and type of each piece (types are those of GGUF files), and whether a space is put before
    the text."""
    try:
        fields = list(_fields(read_regular(path, MAX_BYTES)))
        pieces = [_piece(value) for number, value in fields if number == 1 and isinstance(value, bytes)]
        trainer, normalizer = (
            dict(_fields(b"".join(v for n, v in fields if n == number and isinstance(v, bytes))))
            for number in (2, 3)
        )
    except (IndexError, struct.error, UnicodeDecodeError, ValueError):
        raise ConversionError(f"{path} is no SentencePiece model: fetch it again") from None
    if not pieces:
        raise ConversionError(f"{path} has no pieces: fetch it again")
    if trainer.get(3, 1) != BPE:
        raise UnsupportedModelError(
            f"{path}: the tokenizer is a unigram model; this version converts SentencePiece's BPE alone"
        )
    return pieces, bool(normalizer.get(3, 1))


def _piece(data: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(data))
    text, score, type = fields.get(1, b""), fields.get(2, bytes(4)), fields.get(3, 1)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or type not in range(1, 7):
        raise ValueError
    assert isinstance(type, int)
    return text.decode(), struct.unpack("<f", score)[0], type


def _fields(data: bytes) -> Iterator[Field]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        size = 8 if kind == 1 else 4
        if kind == 2:
            size, at = _varint(data, at)
        elif kind not in (1, 5):
            raise ValueError
        if size > len(data) - at:
            raise ValueError
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
    raise ValueError

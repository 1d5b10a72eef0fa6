"""GGUF files without weights, which name a synthetic model: `tandem serve --synthetic` serves one like any other file.

Such a model has every id of its vocabulary as a token, so that texts of any kind are encoded (a byte is a token), and
answers are streamed; but nothing that it says is worth reading.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from tandem.model.model import SYNTHETIC, SYNTHETIC_FILES
from tandem.model.synthetic import SyntheticModel

STRING, ARRAY, INT32, FLOAT32 = 8, 9, 5, 6  # GGUF's types of values
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # of tokens
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_synthetic_file(name: str, path: Path) -> None:
    """Writes the file of the synthetic model `name`, as SHAPE or SHAPE:FORMAT. Only this process can open it."""
    model = SyntheticModel(name)
    vocab = model.config.vocab
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *(f"▁{id:x}" for id in range(259, vocab))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (vocab - 259)]
    values = {
        "general.architecture": _string(model.config.architecture),
        SYNTHETIC: _string(name),
        "tokenizer.ggml.model": _string("llama"),
        "tokenizer.ggml.tokens": _array(STRING, vocab, b"".join(map(_text, tokens))),
        "tokenizer.ggml.scores": _array(FLOAT32, vocab, bytes(4 * vocab)),
        "tokenizer.ggml.token_type": _array(INT32, vocab, struct.pack(f"<{vocab}i", *types)),
        "tokenizer.chat_template": _string(TEMPLATE),
    }
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + _pairs(values.items()))
    SYNTHETIC_FILES.add(path.resolve())


def _pairs(values: Iterable[tuple[str, bytes]]) -> bytes:
    return b"".join(_text(key) + value for key, value in values)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _string(text: str) -> bytes:
    return struct.pack("<I", STRING) + _text(text)


def _array(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, count) + data

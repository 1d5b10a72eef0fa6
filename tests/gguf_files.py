"""Writes tiny GGUF files for tests and remembers where each field is, so that tests can break it."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tandem.gguf.formats import by_name, quantise

NUMBERS = {
    "u8": (0, "<B"),
    "i8": (1, "<b"),
    "u16": (2, "<H"),
    "i16": (3, "<h"),
    "u32": (4, "<I"),
    "i32": (5, "<i"),
}
NUMBERS |= {"f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q"), "i64": (11, "<q"), "f64": (12, "<d")}

# Key, kind, value; a kind is "u32", "str", "[u32]" (array), "[[str]]" (nested) ...
Key = tuple[str, str, Any]
# Name, format, float32 values in NumPy's order; or uint8, the bytes of each row as they are.
Tensor = tuple[str, str, np.ndarray]


def kind_id(kind: str) -> int:
    return 9 if kind.startswith("[") else 8 if kind == "str" else NUMBERS[kind][0]


def pack_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pack(kind: str, value: Any) -> bytes:
    if kind.startswith("["):
        inner = kind[1:-1]
        head = struct.pack("<IQ", kind_id(inner), len(value))
        return head + b"".join(pack(inner, item) for item in value)
    return pack_string(value) if kind == "str" else struct.pack(NUMBERS[kind][1], value)


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    marks: dict[str, int] = field(default_factory=dict)  # what starts at which byte

    def put(self, mark: str, raw: bytes) -> None:
        self.marks[mark] = len(self.data)
        self.data += raw

    def patched(self, mark: str, code: str, value: Any) -> bytes:
        """The file with the number at `mark` replaced."""
        broken = bytearray(self.data)
        struct.pack_into(code, broken, self.marks[mark], value)
        return bytes(broken)


def build(
    keys: Iterable[Key], tensors: Iterable[Tensor] = (), *, version: int = 3, alignment: int = 32
) -> File:
    """A whole file. An alignment other than 32 is for the caller to put among the keys."""
    file, keys, tensors = File(), list(keys), list(tensors)
    file.put("magic", b"GGUF")
    file.put("version", struct.pack("<I", version))
    file.put("tensor count", struct.pack("<Q", len(tensors)))
    file.put("key count", struct.pack("<Q", len(keys)))
    for key, kind, value in keys:
        file.put(f"{key} name", pack_string(key))
        file.put(f"{key} type", struct.pack("<I", kind_id(kind)))
        file.put(key, pack(kind, value))
    data = bytearray()
    for name, format, values in tensors:
        kind, shape = by_name(format), values.shape
        if is_raw := values.dtype == np.uint8:
            shape = (*shape[:-1], shape[-1] // kind.block_bytes * kind.block)
        file.put(f"{name} name", pack_string(name))
        file.put(f"{name} dimensions", struct.pack("<I", len(shape)))
        file.put(f"{name} shape", struct.pack(f"<{len(shape)}Q", *reversed(shape)))
        file.put(f"{name} type", struct.pack("<I", kind.ggml_type))
        file.put(f"{name} offset", struct.pack("<Q", len(data)))
        data += (values if is_raw else quantise(kind, values)).tobytes()
        data += bytes(-len(data) % alignment)
    file.put("padding", bytes(-len(file.data) % alignment))
    file.put("data", bytes(data))
    return file


def write(path: Path, keys: Iterable[Key], tensors: Iterable[Tensor] = (), **options: int) -> Path:
    path.write_bytes(build(keys, tensors, **options).data)
    return path


def tiny_keys(vocabulary: int = 40) -> list[Key]:
    """Metadata of every type, such as a small model has."""
    return [
        ("general.architecture", "str", "llama"),
        ("general.name", "str", "Tiny ✓"),
        ("llama.block_count", "u32", 2),
        ("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5),
        ("llama.rope.freq_base", "f64", 10000.0),
        ("tokenizer.ggml.model", "str", "gpt2"),
        ("tokenizer.ggml.tokens", "[str]", [f"token{i}" for i in range(vocabulary)]),
        ("tokenizer.ggml.scores", "[f32]", [-float(i) for i in range(vocabulary)]),
        ("tokenizer.ggml.token_type", "[i32]", [1] * vocabulary),
        ("tokenizer.ggml.add_bos_token", "bool", True),
        ("test.flags", "[bool]", [True, False, True]),
        ("test.nested", "[[i16]]", [[1, 2], [], [-3]]),
        ("test.small", "i8", -5),
        ("test.large", "u64", 2**63 + 1),
        ("test.negative", "i64", -(2**62)),
        ("test.byte", "u8", 255),
        ("test.short", "u16", 65535),
        ("test.signed", "i16", -32768),
        ("test.int", "i32", -7),
        ("test.empty", "[u64]", []),
        ("test.no_strings", "[str]", []),
    ]


def tiny_tensors() -> list[Tensor]:
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": ("Q4_0", (40, 32)),
        "blk.0.attn_q.weight": ("Q8_0", (8, 64)),
        "blk.0.ffn_up_exps.weight": ("F16", (2, 4, 16)),
        "blk.1.ffn_down.weight": ("Q6_K", (3, 256)),
        "output_norm.weight": ("F32", (33,)),
    }
    return [(n, f, rng.standard_normal(shape).astype(np.float32)) for n, (f, shape) in shapes.items()]

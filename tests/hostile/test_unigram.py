"""XLM-RoBERTa's tokenizer: damaged character maps, and texts that take long or become longer."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.errors import ModelFileError
from tandem.gguf.file import GGUF
from tandem.model import unigram
from tandem.model.tokenizer import Tokenizer
from tandem.model.unigram import MAX_REPLACEMENT, STEPS, CharacterMap
from tests.gguf_files import Key, write

pytestmark = pytest.mark.fast
CHILDREN, LEAVES = 256, 512  # where the nodes of single bytes and their values are
TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", "\u2581a", *"abcdefgh"]


def character_map(values: dict[int, int], texts: bytes) -> bytes:
    """A map of single bytes to places in `texts`, as SentencePiece compiles them."""
    units = np.zeros(1024, "<u4")
    units[0] = CHILDREN << 10
    for byte, value in values.items():
        units[CHILDREN ^ byte] = byte | 1 << 8 | LEAVES << 10
        units[CHILDREN ^ byte ^ LEAVES] = value
    return struct.pack("<I", units.nbytes) + units.tobytes() + texts


def tokenizer(path: Path, characters: bytes | None) -> Tokenizer:
    keys: list[Key] = [
        ("tokenizer.ggml.model", "str", "t5"),
        ("tokenizer.ggml.tokens", "[str]", TOKENS),
        ("tokenizer.ggml.scores", "[f32]", [-1.0 - i / 8 for i in range(len(TOKENS))]),
        ("tokenizer.ggml.token_type", "[i32]", [3, 3, 3, 2] + [1] * (len(TOKENS) - 4)),
        ("tokenizer.ggml.unknown_token_id", "u32", 3),
    ]
    if characters is not None:
        keys.append(("tokenizer.ggml.precompiled_charsmap", "[u8]", list(characters)))
    return Tokenizer.from_gguf(GGUF.open(write(path, keys)))


@pytest.mark.parametrize(
    ("data", "replaced"),
    [
        (character_map({0x61: 0}, b"b\0"), "b\u00e9"),
        (
            character_map({0xC3: 0}, b"b\0"),
            "ab",
        ),  # half of a character: it went on at the same place for ever
        (character_map({0xC3: 0}, b"\0"), "a"),
        (character_map({0x61: 1 << 30}, b"b\0"), "a\u00e9"),  # outside of the texts
        (character_map({0x61: 0}, b"b"), "b\u00e9"),  # a text without an end
        (character_map({}, b""), "a\u00e9"),
        (b"", "a\u00e9"),
        (b"\0\0", "a\u00e9"),
    ],
)
def test_an_odd_character_map_ends(data: bytes, replaced: str) -> None:
    assert CharacterMap(data).replaced("a\u00e9") == replaced


@pytest.mark.parametrize(
    "data",
    [
        character_map({0x61: 0}, b"x" * (MAX_REPLACEMENT + 1)),  # 4 MB would become 256 MB and more
        struct.pack("<I", 5) + bytes(8),
        struct.pack("<I", 1 << 31) + bytes(8),
        character_map({}, b"")[:100],
    ],
    ids=["long", "odd", "large", "short"],
)
def test_a_damaged_character_map_is_an_error(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="precompiled_charsmap"):
        tokenizer(tmp_path / "m.gguf", data)


def test_unknown_characters_let_other_threads_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They become one token, so no limit of tokens ends the text."""
    rests: list[Any] = []
    monkeypatch.setattr(unigram, "throttle", lambda: rests.append(None))
    ours = tokenizer(tmp_path / "m.gguf", character_map({0x61: 0}, b"a\0"))
    assert ours.encode("\ue000" * STEPS * 20, limit=8) == [4, 3]
    assert len(rests) >= 20
    assert len(ours.encode("a " * 10_000, limit=8)) < 100, "the rest of the words is left out"


def test_a_long_word_takes_little_memory(tmp_path: Path) -> None:
    """4 MB without a space took 570 MB."""
    ours, count = tokenizer(tmp_path / "m.gguf", None), 100_000
    tracemalloc.start()
    try:
        ids = ours.encode("ab" * (count // 2))
        assert tracemalloc.get_traced_memory()[1] < 80 * count
    finally:
        tracemalloc.stop()
    assert len(ids) > count - 2

"""Damaged files end in a ModelFileError that names file, field and offset: no crash, hang or blow-up."""

from __future__ import annotations

import mmap
import os
import random
import resource
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tandem.errors import ModelFileError, ModelNotFoundError
from tandem.gguf.file import GGUF, StringArray
from tests.gguf_files import Key, build, pack_string, tiny_keys, tiny_tensors, write

TINY = build(tiny_keys(), tiny_tensors())
HUGE = (2**60, 2**63 - 1, 2**63, 2**64 - 1, 10**9)


def address_space() -> int:
    """Returns the bytes of virtual memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@contextmanager
def little_memory(limit: int = 64 << 20) -> Iterator[None]:
    """A MemoryError for whoever asks for more than `limit` bytes in all."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def broken(tmp_path: Path, data: bytes) -> ModelFileError:
    """The error that opening a file with `data` ends in."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError) as caught:
        GGUF.open(path)
    error = caught.value
    assert (
        error.path == str(path) and error.field and 0 <= error.offset <= len(data) and "\n" not in str(error)
    )
    return error


@pytest.mark.fast
@pytest.mark.parametrize(
    "magic", [b"", b"G", b"GGU", b"GGML", b"FUGG", b"<!DOCTYPE html>", b"PK\3\4" + bytes(100)]
)
def test_wrong_magic(tmp_path: Path, magic: bytes) -> None:
    error = broken(tmp_path, magic)
    assert (error.field, error.offset) == ("magic", 0)


@pytest.mark.fast
@pytest.mark.parametrize(
    "version, words", [(0, "not 0"), (1, "not 1"), (4, "not 4"), (3 << 24, "big-endian")]
)
def test_wrong_version(tmp_path: Path, version: int, words: str) -> None:
    error = broken(tmp_path, TINY.patched("version", "<I", version))
    assert (error.field, error.offset) == ("version", 4) and words in str(error)


@pytest.mark.fast
def test_cut_short_anywhere(tmp_path: Path) -> None:
    path = write(tmp_path / "whole.gguf", tiny_keys(), tiny_tensors())
    with GGUF.open(path) as model:
        last = list(model.tensors.values())[-1]
    end = last.offset + last.nbytes  # the padding after the last tensor is not needed
    for length in [*range(1, TINY.marks["data"], 3), *range(TINY.marks["data"], end, 100), end - 1]:
        broken(tmp_path, bytes(TINY.data[:length]))
    path.write_bytes(TINY.data[:end])
    GGUF.open(path).close()


COUNTS = ["tensor count", "key count", "general.name", "general.architecture name", "token_embd.weight name"]
ARRAYS = [
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.scores",
    "test.flags",
    "test.nested",
    "test.empty",
    "test.no_strings",
]


@pytest.mark.fast
@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("mark", COUNTS + ARRAYS)
def test_counts_beyond_the_file(tmp_path: Path, mark: str, count: int) -> None:
    data = bytearray(TINY.data)
    # After an array's type.
    struct.pack_into("<Q", data, TINY.marks[mark] + (4 if mark in ARRAYS else 0), count)
    with little_memory():
        error = broken(tmp_path, bytes(data))
    assert error.offset == TINY.marks[mark] + (4 if mark in ARRAYS else 0)


@pytest.mark.fast
def test_a_string_of_an_array_beyond_the_file(tmp_path: Path) -> None:
    place = TINY.marks["tokenizer.ggml.tokens"] + 12 + 8 + len("token0")
    for length in HUGE:
        data = bytearray(TINY.data)
        struct.pack_into("<Q", data, place, length)
        error = broken(tmp_path, bytes(data))
        assert (error.field, error.offset) == ("tokenizer.ggml.tokens", place) and "string 1 of 40" in str(
            error
        )


NAME = "token_embd.weight"
BAD_TENSORS = [
    (f"{NAME} dimensions", "<I", 0, "1 to 4 dimensions"),
    (f"{NAME} dimensions", "<I", 5, "1 to 4 dimensions"),
    (f"{NAME} dimensions", "<I", 2**32 - 1, "1 to 4 dimensions"),
    (f"{NAME} shape", "<Q", 0, "holds nothing"),
    (f"{NAME} shape", "<Q", 33, "whole blocks"),
    (f"{NAME} shape", "<Q", 2**60, "past the end"),
    (f"{NAME} shape", "<QQ", (2**63, 2**63), "past the end"),
    (f"{NAME} type", "<I", 4, "unknown tensor type 4"),
    (f"{NAME} type", "<I", 9999, "unknown tensor type 9999"),
    (f"{NAME} offset", "<Q", 1, "multiple of the alignment"),
    (f"{NAME} offset", "<Q", 2**60, "past the end"),
    (f"{NAME} offset", "<Q", 2**64 - 32, "past the end"),
    ("blk.0.attn_q.weight offset", "<Q", 0, "overlaps"),
    ("blk.0.attn_q.weight offset", "<Q", 32, "overlaps"),
]


@pytest.mark.fast
@pytest.mark.parametrize("mark, code, value, words", BAD_TENSORS)
def test_bad_tensors(tmp_path: Path, mark: str, code: str, value: int | tuple[int, ...], words: str) -> None:
    data = bytearray(TINY.data)
    struct.pack_into(code, data, TINY.marks[mark], *(value if isinstance(value, tuple) else (value,)))
    error = broken(tmp_path, bytes(data))
    assert words in str(error)
    assert error.field.startswith(mark.split()[0]) or words == "overlaps"


def in_array(depth: int) -> bytes:
    """An array in an array ... `depth` deep."""
    return struct.pack("<IQ", 9, 1) * (depth - 1) + struct.pack("<IQ", 0, 0)


def with_key(raw: bytes, name: bytes = b"k") -> bytes:
    """A file with one key: its name, then `raw` (type and value)."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pack_string(name) + raw


BAD_KEYS = {
    "unknown type": (with_key(struct.pack("<IQ", 13, 0)), "unknown metadata type 13"),
    "unknown type of array": (with_key(struct.pack("<IIQ", 9, 77, 0)), "unknown metadata type 77"),
    "bool": (with_key(struct.pack("<IBQ", 7, 2, 0)), "stored as 1 or 0"),
    "array of bool": (with_key(struct.pack("<IIQBB", 9, 7, 2, 1, 9)), "stored as 1 or 0"),
    "empty name": (with_key(bytes(16), b""), "1 to 65535 bytes"),
    "long name": (with_key(bytes(16), b"x" * 65536), "1 to 65535 bytes"),
    "name not UTF-8": (with_key(bytes(16), b"\xff"), "not UTF-8"),
    "nested too deep": (with_key(struct.pack("<I", 9) + in_array(5)), "nested more than 4 deep"),
    "nested without end": (with_key(struct.pack("<I", 9) + in_array(10_000)), "nested more than 4 deep"),
}


@pytest.mark.fast
@pytest.mark.parametrize("data, words", BAD_KEYS.values(), ids=BAD_KEYS)
def test_bad_keys(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in str(broken(tmp_path, data))


@pytest.mark.fast
def test_nesting_as_deep_as_allowed(tmp_path: Path) -> None:
    path = tmp_path / "nested.gguf"
    path.write_bytes(with_key(struct.pack("<I", 9) + in_array(4)))
    with GGUF.open(path) as model:
        assert len(model.metadata["k"]) == 1


@pytest.mark.fast
def test_more_entries_than_any_model(tmp_path: Path) -> None:
    """A file of small arrays would grow twentyfold in memory."""
    data = with_key(struct.pack("<IIQ", 9, 9, 1 << 20) + struct.pack("<IQ", 0, 0) * (1 << 20))
    assert "entries" in str(broken(tmp_path, data))


@pytest.mark.fast
def test_duplicates(tmp_path: Path) -> None:
    error = broken(tmp_path, bytes(build([("a", "u8", 1), ("a", "u8", 2)]).data))
    assert error.field == "a" and "twice" in str(error)
    error = broken(tmp_path, bytes(build([], [("t", "F32", np.zeros(4)), ("t", "F32", np.zeros(4))]).data))
    assert error.field == "t" and "twice" in str(error)


@pytest.mark.fast
@pytest.mark.parametrize("kind, value", [("u32", 0), ("i32", -32), ("u32", 12), ("str", "32"), ("f32", 32.0)])
def test_bad_alignment(tmp_path: Path, kind: str, value: object) -> None:
    keys: list[Key] = [("general.alignment", kind, value)]
    assert broken(tmp_path, bytes(build(keys, tiny_tensors()).data)).field == "general.alignment"


@pytest.mark.fast
def test_alignment_beyond_the_file(tmp_path: Path) -> None:
    keys: list[Key] = [("general.alignment", "u32", 2**31)]
    assert "past the end" in str(broken(tmp_path, bytes(build(keys, tiny_tensors()[:1]).data)))


@pytest.mark.fast
def test_names_that_would_spoil_a_terminal(tmp_path: Path) -> None:
    error = broken(tmp_path, with_key(struct.pack("<IQ", 99, 0), b"\x1b[2J\n" + b"x" * 1000))
    assert error.field.isprintable() and len(error.field) < 200


@pytest.mark.fast
def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        GGUF.open(tmp_path / "none.gguf")
    with pytest.raises(ModelNotFoundError, match=r"is a directory: name a .gguf file inside"):
        GGUF.open(tmp_path)
    with pytest.raises(ModelNotFoundError, match="cannot be opened"):
        GGUF.open("a\0b.gguf")
    with pytest.raises(ModelNotFoundError, match="cannot be opened"):
        GGUF.open(tmp_path / ("x" * 300))
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GGUF.open(tmp_path / "pipe.gguf")


def mutations(seed: int, count: int) -> Iterator[bytes]:
    """Headers with bytes flipped, cut, repeated or removed, or with a number replaced by an unlikely one."""
    rng = random.Random(seed)
    header, data = bytes(TINY.data[: TINY.marks["data"]]), bytes(TINY.data[TINY.marks["data"] :])
    places = list(TINY.marks.values())
    unlikely = [0, 1, 2, 255, 2**16, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1]
    for _ in range(count):
        mutated = bytearray(header)
        for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
            at = min(
                len(mutated) - 1, rng.choice(places) if rng.random() < 0.5 else rng.randrange(len(header))
            )
            kind = rng.randrange(5)
            if kind == 0:
                mutated[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                mutated[at] = rng.randrange(256)
            elif kind == 2:
                number = struct.pack("<Q", rng.choice(unlikely))[: rng.choice((4, 8))]
                mutated[at : at + len(number)] = number
            elif kind == 3:
                mutated[at:at] = rng.randbytes(rng.randrange(1, 9))
            else:
                del mutated[at : at + rng.randrange(1, 9)]
        whole = bytes(mutated) + data
        yield whole[: rng.randrange(1, len(whole))] if rng.random() < 0.1 else whole


def read_everything(model: GGUF) -> None:
    for value in model.metadata.values():
        if isinstance(value, StringArray):
            assert len(list(value)) == len(value)
    for name in model.tensors:
        model.raw(name).max()


def open_mutated(tmp_path: Path, seed: int, count: int) -> None:
    path = tmp_path / "mutated.gguf"
    opened, slowest = 0, 0.0
    with little_memory():
        for data in mutations(seed, count):
            path.write_bytes(data)
            start = time.thread_time()  # others may use this core
            try:
                with GGUF.open(path) as model:
                    read_everything(model)
                    opened += 1
            except ModelFileError as error:
                assert error.path == str(path) and error.field and 0 <= error.offset <= len(data)
            slowest = max(slowest, time.thread_time() - start)
    assert 0.01 * count < opened < 0.9 * count  # the mutations neither always nor never matter
    assert slowest < 2


def test_mutated_headers(tmp_path: Path) -> None:
    open_mutated(tmp_path, 1, 10_000)


@pytest.mark.soak
def test_many_mutated_headers(tmp_path: Path) -> None:
    open_mutated(tmp_path, 2, 100_000)


@pytest.mark.fast
def test_a_sparse_file_of_8_gb_costs_nothing(tmp_path: Path) -> None:
    """Counts are bounded by what a header may take, not only by the size of the file."""
    for mark in ARRAYS:
        data = bytearray(TINY.data)
        struct.pack_into("<Q", data, TINY.marks[mark] + 4, 2**29)
        path = tmp_path / "sparse.gguf"
        path.write_bytes(data)
        os.truncate(path, 8 << 30)
        with pytest.raises(ModelFileError, match="more than the file can hold"):
            GGUF.open(path)


@pytest.mark.fast
def test_the_tiny_file_is_sound(tmp_path: Path) -> None:
    with GGUF.open(write(tmp_path / "tiny.gguf", tiny_keys(), tiny_tensors())) as model:
        read_everything(model)

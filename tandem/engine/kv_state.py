"""Saves the KV blocks of a prompt to a file, and restores them in another run of the same model.

    magic, length of the header (4 bytes), JSON header, KV blocks, checksum of all bytes before it (32 bytes)

Restored blocks are published to the prefix cache, as if a request had just computed them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.engine.kv_cache import NO_BLOCK, BlockTable, extend_block_hashes
from tandem.errors import ContextError, StateFileError
from tandem.kernels.abi import KV_BLOCK, TOKEN_SLOT
from tandem.program.program import Tensor

if TYPE_CHECKING:
    from tandem.engine.engine import Engine
    from tandem.model.model import Model

MAGIC, CHECKSUM = b"tandem kv 1\n", 32
SAMPLE = 256  # bytes of each tensor in a model's fingerprint


def save(engine: Engine, tokens: list[int], path: str | os.PathLike[str]) -> int:
    """Writes the longest prefix of `tokens` that is in the prefix cache; returns its length in tokens."""
    engine.wait()
    hashes = block_hashes(tokens)
    count = engine.cache.find_prefix(hashes)
    tables = engine.cache.new_tables()
    engine.cache.attach_prefix(tables, hashes[:count])
    try:
        header = json.dumps({**_kind(engine), "tokens": tokens[: count * KV_BLOCK]}).encode()
        parts = [MAGIC, len(header).to_bytes(4, "little"), header]
        parts += [engine.device.read(block).tobytes() for block in _blocks(engine, tables)]
    finally:
        engine.cache.free(tables)
    data = b"".join(parts)
    unfinished = Path(f"{os.fspath(path)}.part")
    try:
        with open(unfinished, "wb") as file:
            file.write(data)
            file.write(blake2b(data, digest_size=CHECKSUM).digest())
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise StateFileError(f"{path} cannot be written: {error.strerror}") from None
    return count * KV_BLOCK


def restore(engine: Engine, path: str | os.PathLike[str]) -> list[int]:
    """Loads the blocks of a file into the prefix cache; returns their tokens."""
    engine.wait()
    header, data = _read(Path(path))
    tokens = header.pop("tokens")
    if header != _kind(engine):
        raise StateFileError(
            f"{path} was saved with another model, or other settings for keys and values: open that one"
        )
    hashes, cache = block_hashes(tokens), engine.cache
    tables = cache.new_tables()
    if len(tokens) > engine.context or not cache.allocate(tables, len(hashes)):
        raise ContextError(
            f"{path} holds {len(tokens)} tokens, for which there is no room: use a larger context or KV memory"
        )
    try:
        blocks = list(_blocks(engine, tables))
        if sum(block.nbytes for block in blocks) != len(data):
            raise StateFileError(f"{path} does not hold what its header says: save it again")
        at = 0
        for block in blocks:
            engine.device.write(block, data[at : at + block.nbytes])
            at += block.nbytes
        cache.publish(tables, hashes)
    finally:
        cache.free(tables)
    return list(tokens)


def check_path(path: object) -> None:
    """Refuses a value that is not a file name."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise StateFileError(f"{path!r} is no path of a file: give a text")
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        raise StateFileError(f"{path!r} cannot be the name of a file: give Unicode text") from None
    if b"\0" in name:
        raise StateFileError(f"{path!r} cannot be the name of a file: leave the NUL out")


def block_hashes(tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, tokens)
    return hashes


def fingerprint(model: Model) -> str:
    """Returns a hash of a model's shape and of a sample of each tensor."""
    hashed = blake2b(repr(model.config).encode(), digest_size=16)
    for name, tensor in sorted(model.gguf.tensors.items()):
        hashed.update(f"{name} {tensor.shape} {tensor.format.name}".encode())
        hashed.update(model.gguf.raw(name).reshape(-1)[:SAMPLE].tobytes())
    return hashed.hexdigest()


def _kind(engine: Engine) -> dict[str, Any]:
    """Returns the model's fingerprint and the layout of its KV cache. Saved blocks are valid only if both are equal."""
    layers = [[cache.dtype, nbytes] for cache, _, nbytes in _caches(engine)]
    return {"model": fingerprint(engine.model), "block": KV_BLOCK, "layers": layers}


def _caches(engine: Engine) -> Iterator[tuple[Tensor, int, int]]:
    """Yields the KV cache of each layer, its group, and the bytes of a block."""
    for launch in engine.program.launches:
        cache = launch.buffers.get("cache")
        if launch.kernel.name == "rope" and cache is not None:
            group = int(launch.scalars["slot_field"]) - TOKEN_SLOT
            yield cache, group, cache.nbytes // engine.cache.blocks[group]


def _blocks(engine: Engine, tables: list[BlockTable]) -> Iterator[Tensor]:
    """Yields the memory of all blocks in the tables, layer by layer."""
    for cache, group, nbytes in _caches(engine):
        for block in tables[group].blocks:
            if block != NO_BLOCK:
                yield Tensor("block", cache.arena, cache.dtype, nbytes, offset=block * nbytes, base=cache)


def _read(path: Path) -> tuple[dict[str, Any], np.ndarray[Any, np.dtype[np.uint8]]]:
    try:
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:  # nothing more is read of another kind of file
                raise StateFileError(f"{path} is no saved state of this version: save it again")
            data = MAGIC + file.read()
    except OSError as error:
        raise StateFileError(f"{path} cannot be read: {error.strerror}") from None
    if blake2b(data[:-CHECKSUM], digest_size=CHECKSUM).digest() != data[-CHECKSUM:]:
        raise StateFileError(f"{path} is damaged or was cut off: save it again")
    begin = len(MAGIC) + 4
    end = begin + int.from_bytes(data[len(MAGIC) : begin], "little")
    try:
        header = json.loads(data[begin:end])
    except (ValueError, RecursionError):
        header = None
    tokens = header.get("tokens") if isinstance(header, dict) else None
    if not isinstance(tokens, list) or not all(
        type(token) is int and 0 <= token < 1 << 31 for token in tokens
    ):
        raise StateFileError(f"{path} does not hold what its header says: save it again")
    return header, np.frombuffer(data[end:-CHECKSUM], np.uint8)

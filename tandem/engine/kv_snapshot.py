"""Saves the KV blocks of a prompt to a file, and restores them in another run of the same model.

A model with recurrent layers also has their state after the last block. (Checkpoints of states in memory are those of
StatePool, kv_cache.py.)

    magic, length of the header (4 bytes), JSON header, KV blocks and states, checksum of all bytes before it (32 bytes)

The header has the tokens, and the place and digest of each image among them; the image itself is not saved.
Restored blocks are published to the prefix cache, as if a request had just computed them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from errno import EFBIG
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tandem.devices.device import Bytes
from tandem.engine.images import ImagePlace, images_in
from tandem.engine.kv_cache import NO_BLOCK, RESTORED, BlockTable, SequenceStates, extend_block_hashes
from tandem.engine.kv_memory import kv_layers, state_layers
from tandem.errors import ContextError, StateFileError
from tandem.files import read_regular, write_whole
from tandem.kernels.abi import KV_BLOCK, MAX_EXPERTS
from tandem.kernels.states import NO_STATE
from tandem.program.program import Tensor

if TYPE_CHECKING:
    from tandem.engine.engine import Engine
    from tandem.model.model import Model

MAGIC, CHECKSUM = b"tandem kv 1\n", 32
MAX_HEADER = 16 << 20  # a token takes about 6 bytes
NOTHING = np.empty(0, np.uint8)
SAMPLE = 256  # bytes of each matrix in a model's fingerprint


class SavedImage(NamedTuple):
    """An image among saved tokens."""

    begin: int
    end: int
    digest: bytes


class State(NamedTuple):
    """The KV blocks of some tokens. `kind`: what must be equal for them to be valid."""

    kind: dict[str, Any]
    tokens: list[int]
    images: list[SavedImage]
    blocks: Bytes

    def write(self, path: str | os.PathLike[str]) -> None:
        images = [[image.begin, image.end, image.digest.hex()] for image in self.images]
        header = json.dumps(
            {**self.kind, "tokens": self.tokens} | ({"images": images} if images else {})
        ).encode()
        data = b"".join((MAGIC, len(header).to_bytes(4, "little"), header, self.blocks.data))
        try:
            write_whole(path, data, blake2b(data, digest_size=CHECKSUM).digest())
        except OSError as error:
            raise StateFileError(f"{path} cannot be written: {error.strerror}") from None


def save(engine: Engine, tokens: list[int]) -> State:
    """Copies the blocks of the longest prefix of `tokens` that is in the prefix cache."""
    engine.wait()
    images = [SavedImage(span.begin, span.end, span.digest) for span in images_in(tokens)]
    hashes = block_hashes(tokens, images)
    count = engine.cache.find_prefix(hashes)
    tables = engine.cache.new_tables()
    engine.cache.attach_prefix(tables, hashes[:count])
    states = SequenceStates()
    if count:
        engine.cache.attach_state(states, hashes[count - 1])
    try:
        memory = (*_blocks(engine, tables), *_states(engine, states.source))
        blocks = [engine.device.read(block).copy() for block in memory]
    finally:
        engine.cache.free(tables)
        engine.cache.free_states(states)
    saved = tokens[: count * KV_BLOCK]
    images = [image for image in images if image.begin < len(saved)]
    return State(kv_kind(engine), saved, images, np.concatenate([NOTHING, *blocks]))


def read(path: str | os.PathLike[str], engine: Engine) -> State:
    """Reads a file that `State.write` wrote. `engine`: limits its size."""
    max_bytes = MAX_HEADER + sum(layer.tensor.nbytes for layer in kv_layers(engine.program))
    max_bytes += sum(layer.nbytes for layer in state_layers(engine.program))
    try:
        data = read_regular(path, max_bytes)
    except OSError as error:
        if error.errno == EFBIG:
            raise ContextError(
                f"{path} is larger than the KV cache: use a larger context or KV memory"
            ) from None
        raise StateFileError(f"{path} cannot be read: {error.strerror}") from None
    if not data.startswith(MAGIC):
        raise StateFileError(f"{path} is no saved state of this version: save it again")
    if blake2b(data[:-CHECKSUM], digest_size=CHECKSUM).digest() != data[-CHECKSUM:]:
        raise StateFileError(f"{path} is damaged or was cut off: save it again")
    begin = len(MAGIC) + 4
    end = begin + int.from_bytes(data[len(MAGIC) : begin], "little")
    try:
        kind = json.loads(data[begin:end])
    except (ValueError, RecursionError):
        kind = None
    tokens = kind.pop("tokens", None) if isinstance(kind, dict) else None
    images = _images(kind.pop("images", [])) if isinstance(kind, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens) or images is None:
        raise StateFileError(f"{path} does not hold what its header says: save it again")
    return State(kind, tokens, images, np.frombuffer(data[end:-CHECKSUM], np.uint8))


def _images(value: object) -> list[SavedImage] | None:
    """Returns the images of a header; None if these are not such."""
    try:
        images = [SavedImage(begin, end, bytes.fromhex(digest)) for begin, end, digest in value]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return None
    ends = [0, *(image.end for image in images)]
    in_order = all(
        type(begin) is type(end) is int and last <= begin < end < 2**31
        for last, (begin, end, _) in zip(ends, images, strict=False)
    )
    return images if in_order else None


def restore(engine: Engine, state: State, path: str | os.PathLike[str]) -> None:
    """Loads the blocks of a state into the prefix cache. `path`: its file, for errors."""
    engine.wait()
    if state.kind != kv_kind(engine):
        raise StateFileError(
            f"{path} was saved with another model, or other settings for keys and values: open that one"
        )
    tokens, vocab = state.tokens, engine.model.config.vocab
    if len(tokens) % KV_BLOCK or not all(0 <= token < vocab for token in tokens):
        raise StateFileError(f"{path} does not hold what its header says: save it again")
    hashes, cache = block_hashes(tokens, state.images), engine.cache
    tables, states = cache.new_tables(), SequenceStates()
    if (
        len(tokens) > engine.context
        or not cache.reserve_state(states)
        or not cache.allocate(tables, len(hashes))
    ):
        cache.free_states(states)
        raise ContextError(
            f"{path} holds {len(tokens)} tokens, for which there is no room: use a larger context or KV memory"
        )
    try:
        blocks = [*_blocks(engine, tables), *_states(engine, states.own if hashes else NO_STATE)]
        if sum(block.nbytes for block in blocks) != len(state.blocks):
            raise StateFileError(f"{path} does not hold what its header says: save it again")
        at = 0
        for block in blocks:
            engine.device.write(block, state.blocks[at : at + block.nbytes])
            at += block.nbytes
        cache.publish(tables, hashes)
        if hashes and cache.states:
            cache.states.keep(states.own, hashes, RESTORED)
    finally:
        cache.free(tables)
        cache.free_states(states)


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


def block_hashes(tokens: list[int], images: Sequence[ImagePlace] = ()) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, tokens, images)
    return hashes


def fingerprint(model: Model) -> str:
    """Returns a hash of a model's shape and of a sample of each matrix: a fine-tune may change some experts only."""
    hashed = blake2b(repr(model.config).encode(), digest_size=16)
    for name, tensor in sorted(model.gguf.tensors.items()):
        hashed.update(f"{name} {tensor.shape} {tensor.format.name}".encode())
        matrices = math.prod(tensor.shape[:-2])  # of experts, stacked
        sample = np.empty(min(SAMPLE, tensor.nbytes // matrices), np.uint8)
        for matrix in range(min(matrices, MAX_EXPERTS)):
            model.gguf.read_rows(name, matrix * tensor.shape[-2] if matrix else 0, sample)
            hashed.update(sample.data)
    model.gguf.check_unchanged()
    return hashed.hexdigest()


def kv_kind(engine: Engine) -> dict[str, Any]:
    """Returns the model's fingerprint and the layout of its KV cache. KV blocks of others are valid only if both are
    equal."""
    layers = [[layer.tensor.dtype, layer.nbytes] for layer in kv_layers(engine.program)]
    states = [layer.nbytes for layer in state_layers(engine.program)]
    kind = {"model": fingerprint(engine.model), "block": KV_BLOCK, "layers": layers}
    # Angles of RoPE may depend on the context (Phi 3).
    long = [bool(r.long_factors) and engine.context > r.long_from for r in engine.model.config.ropes]
    return kind | ({"states": states} if states else {}) | ({"long": long} if any(long) else {})


def _states(engine: Engine, slot: int) -> Iterator[Tensor]:
    """Yields the memory of a state slot, layer by layer; none for NO_STATE."""
    for layer in state_layers(engine.program):
        if slot != NO_STATE:
            yield layer.blocks(slot)


def _blocks(engine: Engine, tables: list[BlockTable]) -> Iterator[Tensor]:
    """Yields the memory of all blocks in the tables, layer by layer."""
    for layer in kv_layers(engine.program):
        for block in tables[layer.group].blocks:
            if block != NO_BLOCK:
                yield layer.blocks(block)

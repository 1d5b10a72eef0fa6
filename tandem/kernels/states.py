"""Recurrent states in NumPy: what the chunks of a step read from state slots and write to them.

`chunks` is a flat array as in StepInputs (kernels/abi.py): a row for each chunk, then a state slot for each token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tandem.kernels.abi import CHUNK_INTS, CHUNK_SOURCE, CHUNK_TOKEN, CHUNK_TOKENS
from tandem.kernels.kernel import Array, Counts, Scalars

NO_STATE = -1  # in place of a state slot: the zero state, or no target


class StateChunk(NamedTuple):
    tokens: range
    source: int  # state slot, or NO_STATE
    targets: list[int]  # the slot that gets the state after each token, or NO_STATE


def read_chunks(chunks: Array, scalars: Scalars, counts: Counts) -> Iterator[StateChunk]:
    sequences = int(scalars["sequences"])
    rows, targets = np.split(chunks.ravel(), [CHUNK_INTS * sequences])
    for row in rows.reshape(-1, CHUNK_INTS)[: counts["work"]].tolist():
        if count := row[CHUNK_TOKENS]:
            tokens = range(row[CHUNK_TOKEN], row[CHUNK_TOKEN] + count)
            yield StateChunk(tokens, row[CHUNK_SOURCE], targets[tokens.start : tokens.stop].tolist())


def chunks_bytes(scalars: Scalars, counts: Counts) -> int:
    return 4 * (CHUNK_INTS * int(scalars["sequences"]) + counts["tokens"])


def make_chunks(rng: np.random.Generator, lengths: list[int], slots: int, sequences: int) -> Array:
    """Random chunks for test cases: sources are among the first slots, targets among the others. Some chunks begin with
    the zero state, some store states on the way, one continues in place."""
    sources = rng.permutation(slots // 2)[: len(lengths)]
    free = iter(range(slots // 2, slots))
    rows, targets, first = np.zeros((sequences, CHUNK_INTS), np.int32), [NO_STATE] * sum(lengths), 0
    for i, length in enumerate(lengths):
        source = NO_STATE if i % 3 == 1 else int(sources[i])
        rows[i, [CHUNK_TOKEN, CHUNK_TOKENS, CHUNK_SOURCE]] = first, length, source
        targets[first + length - 1] = source if i % 3 == 0 else next(free)
        if length > 2:
            targets[first + length // 2] = next(free)
        first += length
    return np.concatenate([rows.ravel(), np.array(targets, np.int32)])

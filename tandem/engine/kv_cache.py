"""Which KV blocks belong to which sequence, for each KV group.

A group is the layers that look back on the same number of positions. Blocks of a sliding group are given back as
soon as no query can see them; block tables keep -1 in their place.

Full blocks are shared by their content: a key stands for the tokens of a block and of all before it. A shared block is
never written to. A sequence that goes on from the middle of one computes that part of it again, in a block of its own.
"""

from __future__ import annotations

from _blake2 import blake2b  # as hashlib has it, without the milliseconds that its OpenSSL takes to load
from array import array
from collections.abc import Sequence

from tandem.engine.block_pool import BlockPool
from tandem.kernels.abi import KV_BLOCK
from tandem.program.program import MAX_STEP_SLOTS

NO_BLOCK = -1


def extend_block_hashes(keys: list[bytes], tokens: list[int]) -> None:
    """Appends the keys of the full blocks of `tokens` that have none yet."""
    for begin in range(len(keys) * KV_BLOCK, len(tokens) - KV_BLOCK + 1, KV_BLOCK):
        content = array("i", tokens[begin : begin + KV_BLOCK]).tobytes()
        keys.append(blake2b((keys[-1] if keys else b"") + content, digest_size=16).digest())


class BlockTable:
    """One sequence's blocks in one group: entry i holds positions i * KV_BLOCK onwards."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.clear()

    def clear(self) -> None:
        self.freed = 0  # entries before this one have been given back
        self.cached = 0  # entries before this one can be shared
        self.written = [0] * MAX_STEP_SLOTS  # entries that the StepInputs of each step_slot have


class KVCache:
    def __init__(self, windows: tuple[int, ...], blocks: tuple[int, ...]) -> None:
        self.windows = windows  # per group; 0: every position is kept
        self.blocks = blocks  # per group: how many there are
        self.pools = [BlockPool(count) for count in blocks]
        self.slides = any(windows)

    def new_tables(self) -> list[BlockTable]:
        return [BlockTable() for _ in self.windows]

    def reserve(self, tables: list[BlockTable], tokens: int) -> bool:
        """Makes room for positions up to `tokens`; takes nothing and returns False if some group has too few."""
        blocks = -(-tokens // KV_BLOCK)
        if len(tables[0].blocks) >= blocks:  # the others' are as many
            return True
        needed = [blocks - len(table.blocks) for table in tables]
        if any(n > pool.num_free for n, pool in zip(needed, self.pools, strict=True)):
            return False
        for table, pool, n in zip(tables, self.pools, needed, strict=True):
            for _ in range(n):
                table.blocks.append(pool.allocate())
        return True

    def allocate(self, tables: list[BlockTable], blocks: int) -> bool:
        """Blocks for empty tables, in sliding groups only those that the first query after them sees."""
        firsts = [_first_seen(blocks * KV_BLOCK, window) for window in self.windows]
        if any(blocks - first > pool.num_free for first, pool in zip(firsts, self.pools, strict=True)):
            return False
        for table, pool, first in zip(tables, self.pools, firsts, strict=True):
            table.blocks = [NO_BLOCK] * first
            table.freed = first
            for _ in range(first, blocks):
                table.blocks.append(pool.allocate())
        return True

    def free_outside_window(self, tables: list[BlockTable], position: int) -> None:
        """Gives back what no query at `position` or later can see."""
        for table, pool, window in zip(tables, self.pools, self.windows, strict=True):
            for i in range(table.freed, min(_first_seen(position, window), len(table.blocks))):
                # Out of the table first: an interrupt between the two must not leave a block with two owners.
                block, table.blocks[i] = table.blocks[i], NO_BLOCK
                table.freed = i + 1
                pool.free(block)

    def free(self, tables: list[BlockTable]) -> None:
        for table, pool in zip(tables, self.pools, strict=True):
            blocks, table.blocks = table.blocks, []
            table.clear()
            for block in reversed(blocks):  # the end of a text is forgotten before its beginning
                if block != NO_BLOCK:
                    pool.free(block)

    # ---- sharing

    def find_prefix(self, keys: Sequence[bytes]) -> int:
        """How many blocks of a text can be shared: all of them in global groups, in sliding ones those that the first
        query after them sees."""
        best, runs = 0, [0] * len(self.pools)  # blocks in a row up to here that are there
        for i, key in enumerate(keys):
            for group, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
                runs[group] = runs[group] + 1 if key in pool.cached else 0
                if not window and not runs[group]:
                    return best
            seen = [i + 1 - _first_seen((i + 1) * KV_BLOCK, window) for window in self.windows]
            if all(run >= n for run, n in zip(runs, seen, strict=True)):
                best = i + 1
        return best

    def attach_prefix(self, tables: list[BlockTable], keys: Sequence[bytes]) -> None:
        """Begins empty tables with blocks that `find` has found."""
        for table, pool, window in zip(tables, self.pools, self.windows, strict=True):
            first = _first_seen(len(keys) * KV_BLOCK, window)
            table.blocks = [NO_BLOCK] * first
            table.blocks += [pool.acquire(key) for key in keys[first:]]
            table.freed, table.cached = first, len(keys)

    def publish(self, tables: list[BlockTable], keys: Sequence[bytes]) -> None:
        """Offers the first blocks, which are full and computed, to others."""
        for table, pool in zip(tables, self.pools, strict=True):
            for i in range(table.cached, len(keys)):
                if table.blocks[i] != NO_BLOCK:
                    pool.publish(table.blocks[i], keys[i])
            table.cached = max(table.cached, len(keys))

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Of each group: those that nobody uses, also where they hold something that may be shared."""
        return tuple(pool.num_free for pool in self.pools)


def _first_seen(position: int, window: int) -> int:
    """The first block that a query at `position` sees."""
    return max(0, position - window + 1) // KV_BLOCK if window else 0

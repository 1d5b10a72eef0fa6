"""The paged KV cache assigns KV blocks to sequences, and shares them in the prefix cache.

A KV block holds the keys and values of KV_BLOCK positions in each layer of a KV group. A group is the layers with the
same attention window. A sliding-window group frees a block when no later query can see it; -1 takes its place in the
block table.

The prefix cache shares full blocks between sequences. The hash of a block stands for its tokens and all tokens before
it. A cached block is never written to: a sequence that diverges in the middle of one recomputes that part in its own
block.
"""

from __future__ import annotations

from _blake2 import blake2b  # not from hashlib, which spends milliseconds on loading OpenSSL
from array import array
from collections.abc import Sequence

from tandem.kernels.abi import KV_BLOCK
from tandem.program.program import MAX_STEP_SLOTS

NO_BLOCK = -1


def extend_block_hashes(hashes: list[bytes], tokens: list[int]) -> None:
    """Appends the hashes of the full blocks of `tokens` that are missing in `hashes`."""
    for begin in range(len(hashes) * KV_BLOCK, len(tokens) - KV_BLOCK + 1, KV_BLOCK):
        content = array("i", tokens[begin : begin + KV_BLOCK]).tobytes()
        hashes.append(blake2b((hashes[-1] if hashes else b"") + content, digest_size=16).digest())


class BlockTable:
    """The blocks of one sequence in one group: entry i holds positions i * KV_BLOCK onwards."""

    __slots__ = ("blocks", "cached", "freed", "written")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.clear()

    def clear(self) -> None:
        self.freed = 0  # entries before this one were freed: they are outside the window
        self.cached = 0  # entries before this one are in the prefix cache
        self.written = [0] * MAX_STEP_SLOTS  # entries that each step slot's StepInputs have; changed by Batch


class SequenceKV:
    """The KV blocks of one sequence."""

    __slots__ = ("block_boundary", "block_hashes", "tables")

    def __init__(self, tables: list[BlockTable]) -> None:
        self.tables = tables  # one per group
        self.block_hashes: list[bytes] = []  # hashes of its full blocks
        # Computed tokens at which the next block is needed; 0: check at the next step. Full blocks are then published
        # to the prefix cache, and blocks outside the window freed.
        self.block_boundary = 0


class BlockPool:
    """The blocks of one group: reference counts, free blocks, and blocks in the prefix cache.

    A block has one reference for each sequence that has it in its table. A cached block without references stays in the
    prefix cache until its memory is needed: the least recently used is evicted first.
    """

    def __init__(self, count: int) -> None:
        self.references = [0] * count
        self.hashes: list[bytes | None] = [None] * count  # hash of each cached block
        self.cached: dict[bytes, int] = {}  # hash -> block
        # Low numbers are allocated first: memory that is never needed stays untouched.
        self._free = list(range(count - 1, -1, -1))
        self._evictable: dict[int, None] = {}  # cached and without references, least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._evictable)

    def allocate(self) -> int:
        """Returns a block to write to. The caller has checked that one is free."""
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._evictable))
            del self._evictable[block]
            self._evict(block)
        self.references[block] = 1
        return block

    def acquire(self, hash: bytes) -> int:
        """Adds a reference to a cached block."""
        block = self.cached[hash]
        self._evictable.pop(block, None)
        self.references[block] += 1
        return block

    def free(self, block: int) -> None:
        """Drops a reference; the last one frees the block, or makes it evictable if it is cached."""
        self.references[block] -= 1
        if not self.references[block]:
            if self.hashes[block] is None:
                self._free.append(block)
            else:
                self._evictable[block] = None

    def publish(self, block: int, hash: bytes) -> None:
        """Adds a full block to the prefix cache, unless a block with this content is there."""
        if self.hashes[block] is None and hash not in self.cached:
            self.hashes[block], self.cached[hash] = hash, block

    def _evict(self, block: int) -> None:
        hash, self.hashes[block] = self.hashes[block], None
        if hash is not None:
            del self.cached[hash]


class KVCache:
    def __init__(self, windows: tuple[int, ...], blocks: tuple[int, ...]) -> None:
        self.windows = windows  # attention window of each group; 0: global
        self.blocks = blocks  # number of blocks of each group
        self.pools = [BlockPool(count) for count in blocks]
        self.slides = any(windows)

    def new_tables(self) -> list[BlockTable]:
        return [BlockTable() for _ in self.windows]

    def reserve(self, tables: list[BlockTable], tokens: int) -> bool:
        """Allocates blocks for positions below `tokens`; allocates none and returns False if a group has too few."""
        blocks = -(-tokens // KV_BLOCK)
        if len(tables[0].blocks) >= blocks:  # all tables have the same length
            return True
        needed = [blocks - len(table.blocks) for table in tables]
        if any(n > pool.num_free for n, pool in zip(needed, self.pools, strict=True)):
            return False
        for table, pool, n in zip(tables, self.pools, needed, strict=True):
            for _ in range(n):
                table.blocks.append(pool.allocate())
        return True

    def allocate(self, tables: list[BlockTable], blocks: int) -> bool:
        """Fills empty tables with `blocks` blocks; in a sliding-window group only blocks that the next query sees."""
        firsts = [_first_visible(blocks * KV_BLOCK, window) for window in self.windows]
        if any(blocks - first > pool.num_free for first, pool in zip(firsts, self.pools, strict=True)):
            return False
        for table, pool, first in zip(tables, self.pools, firsts, strict=True):
            table.blocks = [NO_BLOCK] * first
            table.freed = first
            for _ in range(first, blocks):
                table.blocks.append(pool.allocate())
        return True

    def free_outside_window(self, tables: list[BlockTable], position: int) -> None:
        """Frees the blocks that no query at `position` or later can see."""
        for table, pool, window in zip(tables, self.pools, self.windows, strict=True):
            for i in range(table.freed, min(_first_visible(position, window), len(table.blocks))):
                # Out of the table first: an interrupt between the two must not leave a block with two owners.
                block, table.blocks[i] = table.blocks[i], NO_BLOCK
                table.freed = i + 1
                pool.free(block)

    def free(self, tables: list[BlockTable]) -> None:
        """Frees all blocks of a sequence, the last first, so that the blocks of a prefix are evicted last."""
        for table, pool in zip(tables, self.pools, strict=True):
            blocks, table.blocks = table.blocks, []
            table.clear()
            for block in reversed(blocks):
                if block != NO_BLOCK:
                    pool.free(block)

    # ---- prefix cache

    def find_prefix(self, hashes: Sequence[bytes]) -> int:
        """Returns the length, in blocks, of the longest cached prefix. A global group must have all of its blocks, a
        sliding-window group only the blocks that the first query after it sees."""
        best, runs = 0, [0] * len(self.pools)  # consecutive cached blocks up to here, of each group
        for i, hash in enumerate(hashes):
            for group, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
                runs[group] = runs[group] + 1 if hash in pool.cached else 0
                if not window and not runs[group]:
                    return best
            visible = [i + 1 - _first_visible((i + 1) * KV_BLOCK, window) for window in self.windows]
            if all(run >= n for run, n in zip(runs, visible, strict=True)):
                best = i + 1
        return best

    def attach_prefix(self, tables: list[BlockTable], hashes: Sequence[bytes]) -> None:
        """Fills empty tables with the cached blocks of a prefix that `find_prefix` found."""
        for table, pool, window in zip(tables, self.pools, self.windows, strict=True):
            first = _first_visible(len(hashes) * KV_BLOCK, window)
            table.blocks = [NO_BLOCK] * first
            table.blocks += [pool.acquire(hash) for hash in hashes[first:]]
            table.freed, table.cached = first, len(hashes)

    def publish(self, tables: list[BlockTable], hashes: Sequence[bytes]) -> None:
        """Adds the first blocks, which are full and computed, to the prefix cache."""
        for table, pool in zip(tables, self.pools, strict=True):
            for i in range(table.cached, len(hashes)):
                if table.blocks[i] != NO_BLOCK:
                    pool.publish(table.blocks[i], hashes[i])
            table.cached = max(table.cached, len(hashes))

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """The number of blocks of each group without references, evictable ones included."""
        return tuple(pool.num_free for pool in self.pools)


def _first_visible(position: int, window: int) -> int:
    """Returns the first block that a query at `position` sees."""
    return max(0, position - window + 1) // KV_BLOCK if window else 0

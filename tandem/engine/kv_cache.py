"""Which KV blocks belong to which sequence, for each KV group.

A group is the layers that look back on the same number of positions. Blocks of a sliding group are given back as
soon as no query can see them; block tables keep -1 in their place.
"""

from __future__ import annotations

from tandem.program.program import TURNS
from tandem.program.step_inputs import KV_BLOCK

NO_BLOCK = -1


class BlockTable:
    """One sequence's blocks in one group: entry i holds positions i * KV_BLOCK onwards."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.freed = 0  # entries before this one have been given back
        self.written = [0] * TURNS  # entries that the StepInputs of each turn have


class KVCache:
    def __init__(self, windows: tuple[int, ...], blocks: tuple[int, ...]) -> None:
        self.windows = windows  # per group; 0: every position is kept
        self.blocks = blocks  # per group: how many there are
        # Low numbers are taken first, so that memory that was never needed is never touched.
        self._free = [list(range(count - 1, -1, -1)) for count in blocks]

    def new_tables(self) -> list[BlockTable]:
        return [BlockTable() for _ in self.windows]

    def reserve(self, tables: list[BlockTable], tokens: int) -> bool:
        """Makes room for positions up to `tokens`; takes nothing and returns False if some group has too few."""
        needed = [-(-tokens // KV_BLOCK) - len(table.blocks) for table in tables]
        if any(n > len(free) for n, free in zip(needed, self._free, strict=True)):
            return False
        for table, free, n in zip(tables, self._free, needed, strict=True):
            for _ in range(n):
                table.blocks.append(free.pop())
        return True

    def slide(self, tables: list[BlockTable], position: int) -> None:
        """Gives back what no query at `position` or later can see."""
        for table, free, window in zip(tables, self._free, self.windows, strict=True):
            if window:
                keep = max(0, position - window + 1) // KV_BLOCK
                for i in range(table.freed, min(keep, len(table.blocks))):
                    # Out of the table first: an interrupt between the two must not leave a block with two owners.
                    block, table.blocks[i] = table.blocks[i], NO_BLOCK
                    table.freed = i + 1
                    free.append(block)

    def release(self, tables: list[BlockTable]) -> None:
        for table, free in zip(tables, self._free, strict=True):
            blocks, table.blocks = table.blocks, []
            table.freed, table.written = 0, [0] * TURNS
            free.extend(block for block in reversed(blocks) if block != NO_BLOCK)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        return tuple(len(free) for free in self._free)

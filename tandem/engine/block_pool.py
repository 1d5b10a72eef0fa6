"""The blocks of one KV group: who uses them, and which hold tokens that another request may want.

A block in use has one reference for each sequence that has it in its table. One without any keeps what it holds, under
the key of its content, until it is needed for something else: least recently used first.
"""

from __future__ import annotations


class BlockPool:
    def __init__(self, count: int) -> None:
        self.references = [0] * count
        self.keys: list[bytes | None] = [
            None
        ] * count  # of blocks that are full: what they and all before them hold
        self.cached: dict[bytes, int] = {}  # key -> block
        # Low numbers are taken first, so that memory that was never needed is never touched.
        self._free = list(range(count - 1, -1, -1))
        self._evictable: dict[int, None] = {}  # named, without references; least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._evictable)

    def allocate(self) -> int:
        """A block to write to; the caller has seen that one is free."""
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._evictable))
            del self._evictable[block]
            self._evict(block)
        self.references[block] = 1
        return block

    def acquire(self, key: bytes) -> int:
        """One more reference to the block that holds this."""
        block = self.cached[key]
        self._evictable.pop(block, None)
        self.references[block] += 1
        return block

    def free(self, block: int) -> None:
        """One reference less."""
        self.references[block] -= 1
        if not self.references[block]:
            if self.keys[block] is None:
                self._free.append(block)
            else:
                self._evictable[block] = None

    def publish(self, block: int, key: bytes) -> None:
        """Says what a block holds. Of two that hold the same, the first is the one to be shared."""
        if self.keys[block] is None and key not in self.cached:
            self.keys[block], self.cached[key] = key, block

    def _evict(self, block: int) -> None:
        key, self.keys[block] = self.keys[block], None
        if key is not None:
            del self.cached[key]

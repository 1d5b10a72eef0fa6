"""The paged KV cache assigns KV blocks to sequences, and shares them in the prefix cache.

A KV block holds the keys and values of KV_BLOCK positions in each layer of a KV group. A group is the layers with the
same attention window. A sliding-window group frees a block when no later query can see it; -1 takes its place in the
block table.

The prefix cache shares full blocks between sequences. The hash of a block stands for its tokens and all tokens before
it. A cached block is never written to: a sequence that diverges in the middle of one recomputes that part in its own
block.

Recurrent layers have state slots beside KV blocks. A slot holds the state of all such layers after one token of one
sequence. A step reads the state before a chunk from one slot, and writes that after any of its tokens to others. So a
checkpoint is no copy: a sequence leaves a slot behind and goes on in another one. Checkpoints are at ends of blocks,
and the prefix cache knows them by the hash of the last block: a prefix is cached if its KV blocks and a checkpoint at
its end are. A checkpoint is never written to.
"""

from __future__ import annotations

from _blake2 import blake2b  # not from hashlib, which spends milliseconds on loading OpenSSL
from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from tandem.engine.images import ImagePlace
from tandem.kernels.abi import KV_BLOCK
from tandem.kernels.states import NO_STATE
from tandem.program.program import MAX_STEP_SLOTS

if TYPE_CHECKING:
    from tandem.engine.disk_cache import Restore

NO_BLOCK = -1

# Why there is a checkpoint: what the policy chose.
PROMPT_END = "prompt_end"  # at the last full block of a prompt
EARLIER = "earlier"  # some blocks before it
BRANCH = "branch"  # where a prompt leaves the text of an earlier one
ANSWER_END = "answer_end"
RESTORED = "restored"  # from a file
REASONS = (PROMPT_END, EARLIER, BRANCH, ANSWER_END, RESTORED)
FEW = 4  # slots for checkpoints, with which there are no EARLIER ones
PAST = 32  # what a checkpoint saves counts this much less after its conversation has gone on


def extend_block_hashes(hashes: list[bytes], tokens: list[int], images: Sequence[ImagePlace] = ()) -> None:
    """Appends the hashes of the full blocks of `tokens` that are missing in `hashes`. The hash of a
    block with tokens of an image includes the image's content and place."""
    for begin in range(len(hashes) * KV_BLOCK, len(tokens) - KV_BLOCK + 1, KV_BLOCK):
        content = array("i", tokens[begin : begin + KV_BLOCK]).tobytes()
        for span in images:
            if span.begin < begin + KV_BLOCK and begin < span.end:
                content += span.digest + (span.begin - begin).to_bytes(4, "little", signed=True)
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


class SequenceStates:
    """The state slots of one sequence."""

    __slots__ = ("checkpoints", "drafted", "last", "own", "source", "unpublished", "unread")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.own = NO_STATE  # the slot that its next chunk writes; only this sequence uses it
        self.source = NO_STATE  # the slot that its next chunk reads; NO_STATE: it begins with the zero state
        # The checkpoints that its prompt shall leave: after how many blocks, and why. The most useful first.
        self.checkpoints: dict[int, str] = {}
        # (blocks, slot) that the step just scheduled writes, and slots that it is the last to read.
        self.unpublished: list[tuple[int, int]] = []
        self.unread: list[int] = []
        # (blocks, slot) of the last block that it filled while decoding: kept when it ends.
        self.last: tuple[int, int] | None = None
        # Slots that get the state after each draft token of the step in flight: the sequence goes on from the last
        # accepted one. The other way is to replay accepted tokens from the state before them. On two cores, writing a
        # state takes 1.1 ms for Qwen 3.5 0.8B, and a token more in a step 1.2 (benchmarks/draft_heads.py); of larger
        # models, states grow less than weights.
        self.drafted: list[int] = []

    def slots(self) -> list[int]:
        """The slots to which it has a reference; one is listed for each reference."""
        last = self.last[1] if self.last else NO_STATE
        slots = [self.own, last, *self.unread, *self.drafted, *(slot for _, slot in self.unpublished)]
        if self.source not in (self.own, last):  # a checkpoint that other sequences may read too
            slots.append(self.source)
        return [slot for slot in slots if slot != NO_STATE]


class SequenceKV:
    """The KV blocks and state slots of one sequence."""

    __slots__ = ("block_boundary", "block_hashes", "restore", "states", "tables")

    def __init__(self, tables: list[BlockTable]) -> None:
        self.tables = tables  # one per group
        self.states = SequenceStates()
        self.block_hashes: list[bytes] = []  # hashes of its full blocks
        # Computed tokens at which the next block is needed; 0: check at the next step. Full blocks are then published
        # to the prefix cache, and blocks outside the window freed.
        self.block_boundary = 0
        self.restore: Restore | None = None  # what it gets from the prefix cache on disk


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
        # Called with the blocks and hashes that are about to be evicted: the prefix cache on disk saves them.
        self.on_evict: Callable[[list[int], list[bytes]], None] | None = None
        self.evicted_at_once = 1
        self.evictions = 0  # so far

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._evictable)

    def allocate(self) -> int:
        """Returns a block to write to. The caller has checked that one is free."""
        if not self._free:
            self._evict_oldest()
        block = self._free.pop()
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
        """Adds a full block to the prefix cache, unless a block with this content is there and in use. One that is not
        makes room: a prompt without a checkpoint is computed again into other blocks, and would need twice as many."""
        if self.hashes[block] is not None:
            return
        if (other := self.cached.get(hash)) is not None:
            if self.references[other]:
                return
            del self._evictable[other]
            self.hashes[other] = None
            self._free.append(other)
        self.hashes[block], self.cached[hash] = hash, block

    def by_use(self) -> Iterator[tuple[int, bytes]]:
        """Yields each cached block and its hash, the most recently used first."""
        for hash, block in self.cached.items():
            if self.references[block]:
                yield block, hash
        for block in reversed(self._evictable):
            if (evictable := self.hashes[block]) is not None:
                yield block, evictable

    def _next_evicted(self) -> list[int]:
        return list(islice(self._evictable, self.evicted_at_once))

    def _evict_oldest(self) -> None:
        blocks = self._next_evicted()
        if self.on_evict:
            self.on_evict(blocks, [hash for block in blocks if (hash := self.hashes[block]) is not None])
        for block in reversed(blocks):
            del self._evictable[block]
            self._evict(block)
            self._free.append(block)

    def _evict(self, block: int) -> None:
        hash, self.hashes[block] = self.hashes[block], None
        if hash is not None:
            self.evictions += 1
            del self.cached[hash]


class StatePool(BlockPool):
    """State slots. Checkpoints are evicted by last use and by what they save (GreedyDual): the blocks that a request
    would compute again from the checkpoint before. So a short request does not evict those of a long conversation.

    A conversation goes on from its last checkpoints. What an earlier one saves counts little (PAST), unless another
    request has begun with it."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.kept = dict.fromkeys(REASONS, 0)  # checkpoints so far, by reason
        self.hits = dict.fromkeys(REASONS, 0)  # requests that began with one
        self.reasons = [RESTORED] * count  # of the checkpoint in each slot
        self._saves = [0] * count  # blocks
        self._before = [b""] * count  # the hash of the checkpoint before it; empty: none
        self._is_past = [False] * count  # a later prompt of this conversation has a checkpoint
        self._rank = [0] * count  # of checkpoints without references: the lowest is evicted first
        self._clock = 0  # the rank of the last evicted one: those used since are above it

    def keep(self, slot: int, hashes: Sequence[bytes], reason: str) -> None:
        """Publishes the state after these blocks."""
        if not hashes or hashes[-1] in self.cached:
            return
        self.publish(slot, hashes[-1])
        self.kept[reason] += 1
        before = next((i for i in range(len(hashes) - 1, 0, -1) if self._is_base(hashes[i - 1])), 0)
        self.reasons[slot], self._before[slot] = reason, hashes[before - 1] if before else b""
        self._saves[slot] = 0 if reason == EARLIER else len(hashes) - before
        if reason == PROMPT_END:
            self._mark_past(self._before[slot])

    def _is_base(self, hash: bytes) -> bool:
        """Whether there is a checkpoint from which a later one counts what it saves: not an EARLIER one, which is
        seldom used."""
        return hash in self.cached and self.reasons[self.cached[hash]] != EARLIER

    def _mark_past(self, hash: bytes) -> None:
        """Marks a checkpoint and those before it: a later prompt of their conversation has one."""
        while (slot := self.cached.get(hash)) is not None and not self._is_past[slot]:
            if self.reasons[slot] != BRANCH:
                self._is_past[slot] = True
                self._rank[slot] = self._clock + self._weight(slot)
            hash = self._before[slot]

    def _weight(self, slot: int) -> int:
        return self._saves[slot] // PAST if self._is_past[slot] else self._saves[slot]

    def count_hit(self, slot: int) -> None:
        """Notes that a request has begun with the checkpoint in a slot."""
        self.hits[self.reasons[slot]] += 1
        if self._is_past[slot]:
            self._is_past[slot], self.reasons[slot] = False, BRANCH

    def free(self, block: int) -> None:
        super().free(block)
        self._rank[block] = self._clock + self._weight(block)

    def _next_evicted(self) -> list[int]:
        slots = sorted(self._evictable, key=self._rank.__getitem__)[: self.evicted_at_once]
        self._clock = self._rank[slots[-1]]
        return slots

    def _evict(self, block: int) -> None:
        hash = self.hashes[block]
        super()._evict(block)
        for slot, before in enumerate(self._before):
            if before == hash:  # it saves more now
                weight = self._weight(slot)
                self._before[slot] = self._before[block]
                self._saves[slot] += self._saves[block]
                self._rank[slot] += self._weight(slot) - weight
        self._saves[block], self._before[block], self._is_past[block] = 0, b"", False


class KVCache:
    def __init__(self, windows: tuple[int, ...], blocks: tuple[int, ...], states: int = 0) -> None:
        """`states`: number of state slots; 0: the model has no recurrent layers."""
        self.windows = windows  # attention window of each group; 0: global
        self.blocks = blocks  # number of blocks of each group
        self.pools = [BlockPool(count) for count in blocks]
        self.slides = any(windows)
        self.states = StatePool(states) if states else None
        self.all_pools = [*self.pools, *([self.states] if self.states else [])]

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

    def find_prefix(
        self, hashes: Sequence[bytes], *, any_state: bool = False, also: Sequence[Container[bytes]] = ()
    ) -> int:
        """Returns the length, in blocks, of the longest cached prefix. A global group must have all of its blocks, a
        sliding-window group only the blocks that the first query after it sees. Recurrent layers must have a checkpoint
        at its end, unless `any_state`. `also`: hashes of each group, and of states, that count as cached."""
        checkpoints = self.states.cached if self.states and not any_state else None
        others = also or ((),) * len(self.all_pools)
        best, runs = 0, [0] * len(self.pools)  # consecutive cached blocks up to here, of each group
        for i, hash in enumerate(hashes):
            for group, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
                runs[group] = runs[group] + 1 if hash in pool.cached or hash in others[group] else 0
                if not window and not runs[group]:
                    return best
            visible = [i + 1 - _first_visible((i + 1) * KV_BLOCK, window) for window in self.windows]
            if (checkpoints is None or hash in checkpoints or hash in others[-1]) and all(
                run >= n for run, n in zip(runs, visible, strict=True)
            ):
                best = i + 1
        return best

    def attach_prefix(self, tables: list[BlockTable], hashes: Sequence[bytes]) -> None:
        """Fills empty tables with the cached blocks of a prefix that `find_prefix` found."""
        for table, pool, window in zip(tables, self.pools, self.windows, strict=True):
            first = _first_visible(len(hashes) * KV_BLOCK, window)
            table.blocks = [NO_BLOCK] * first
            table.blocks += [pool.acquire(hash) for hash in hashes[first:]]
            table.freed, table.cached = first, len(hashes)

    def allocate_missing(self, hashes: Sequence[bytes]) -> list[BlockTable] | None:
        """Returns tables with the blocks of a prefix that the next query sees, and its state in the last one: those
        that are cached, and free ones for the others. None if a group has too few."""
        count = len(hashes)
        firsts = [_first_visible(count * KV_BLOCK, window) for window in self.windows]
        firsts += [count - 1] if self.states else []
        for pool, first in zip(self.all_pools, firsts, strict=True):
            blocks = [pool.cached.get(hash, NO_BLOCK) for hash in hashes[first:]]
            if sum(block == NO_BLOCK or not pool.references[block] for block in blocks) > pool.num_free:
                return None
        tables = []
        for pool, first in zip(self.all_pools, firsts, strict=True):
            tables.append(table := BlockTable())
            table.freed = first
            table.blocks = [NO_BLOCK] * count
            for i in range(first, count):  # first, or a block that is allocated may take the place of one
                if hashes[i] in pool.cached:
                    table.blocks[i] = pool.acquire(hashes[i])
            for i in range(first, count):
                if table.blocks[i] == NO_BLOCK:
                    table.blocks[i] = pool.allocate()
        return tables

    def free_all(self, tables: list[BlockTable]) -> None:
        """Frees tables of `allocate_missing`."""
        for table, pool in zip(tables, self.all_pools, strict=True):
            for block in reversed(table.blocks):
                if block != NO_BLOCK:
                    pool.free(block)

    def publish(self, tables: list[BlockTable], hashes: Sequence[bytes]) -> None:
        """Adds the first blocks, which are full and computed, to the prefix cache."""
        for table, pool in zip(tables, self.pools, strict=True):
            for i in range(table.cached, len(hashes)):
                if table.blocks[i] != NO_BLOCK:
                    pool.publish(table.blocks[i], hashes[i])
            table.cached = max(table.cached, len(hashes))

    # ---- recurrent states

    def reserve_state(self, states: SequenceStates) -> bool:
        """Gives a sequence a slot of its own; returns False if there is none."""
        if self.states and states.own == NO_STATE:
            if not self.states.num_free:
                return False
            states.own = self.states.allocate()
        return True

    def reserve_drafts(self, states: SequenceStates, count: int) -> bool:
        """Gives a sequence a slot for the state after each draft token; returns False if there are too few."""
        if self.states:
            if self.states.num_free < count:
                return False
            states.drafted = [self.states.allocate() for _ in range(count)]
        return True

    def accept_states(self, states: SequenceStates, end: int, accepted: int, keeps_last: bool) -> None:
        """Moves a sequence on by accepted draft tokens, which follow its first `end` tokens; frees the other slots.
        `keeps_last`: whether the state at the end of a block is kept, in place of the one before."""
        if not self.states:
            return
        drafted, states.drafted = states.drafted, []
        if accepted:
            before, states.source = states.own, drafted[accepted - 1]
            filled = next((n for n in range(accepted, 0, -1) if (end + n) % KV_BLOCK == 0), 0)
            if filled and (states.last or keeps_last):
                drafted += [states.last[1]] if states.last else []
                states.last = (end + filled) // KV_BLOCK, drafted[filled - 1]
            if states.last and states.last[1] == states.source:  # it goes on in another slot
                states.own = before
            else:
                states.own = states.source
                drafted.append(before)
            used = states.slots()
            drafted = [slot for slot in drafted if slot not in used]
        for slot in drafted:
            self.states.free(slot)

    def attach_state(self, states: SequenceStates, hash: bytes) -> None:
        """Starts a sequence with the checkpoint at the end of a prefix that `find_prefix` found."""
        if self.states:
            states.source = self.states.acquire(hash)

    def advance_state(
        self, states: SequenceStates, begin: int, count: int, spare: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """Moves a sequence on by a chunk. Returns the slot that the chunk reads, and (token, slot) of each state that
        it writes. `spare`: slots that may be taken for checkpoints."""
        if not self.states:
            return NO_STATE, []
        source, end = states.source, begin + count
        targets = []
        if source not in (NO_STATE, states.own, states.last[1] if states.last else NO_STATE):
            states.unread.append(source)
        ends_block = end % KV_BLOCK == 0
        keeps_end = ends_block and _keeps(states, end // KV_BLOCK, spare)
        spare -= keeps_end
        for blocks in states.checkpoints:
            if begin < blocks * KV_BLOCK < end and _keeps(states, blocks, spare):
                slot, spare = self.states.allocate(), spare - 1
                states.unpublished.append((blocks, slot))
                targets.append((blocks * KV_BLOCK - begin - 1, slot))
        targets.append((count - 1, states.own))
        targets += enumerate(states.drafted, count)
        states.source = states.own
        if keeps_end:
            states.unpublished.insert(0, (end // KV_BLOCK, states.own))
            self.states.references[states.own] += 1  # the next chunk reads it
            states.own = self.states.allocate()
        elif ends_block and count == 1 and (states.last or spare > 0):
            # Two slots in turn: the block before the last is of no use any more.
            free = states.last[1] if states.last else self.states.allocate()
            states.last, states.own = (end // KV_BLOCK, states.own), free
        return source, targets

    def publish_states(self, states: SequenceStates, hashes: Sequence[bytes]) -> None:
        """Publishes checkpoints, which are written by now, to the prefix cache. `hashes`: of the sequence's blocks."""
        if not self.states:
            return
        while states.unpublished:  # the most useful last: it is evicted last
            blocks, slot = states.unpublished.pop()
            self._publish_state(blocks, slot, hashes, states.checkpoints[blocks])
        while states.unread:
            self.states.free(states.unread.pop())

    def publish_last_state(self, states: SequenceStates, hashes: Sequence[bytes]) -> None:
        """Publishes the checkpoint at the end of a sequence that ends."""
        if states.last:
            (blocks, slot), states.last = states.last, None
            if states.source == slot:
                states.source = NO_STATE
            self._publish_state(blocks, slot, hashes, ANSWER_END)

    def _publish_state(self, blocks: int, slot: int, hashes: Sequence[bytes], reason: str) -> None:
        assert self.states
        if blocks <= len(hashes):
            self.states.keep(slot, hashes[:blocks], reason)
        self.states.free(slot)

    def free_states(self, states: SequenceStates) -> None:
        """Frees the slots of a sequence; publishes none."""
        slots = states.slots()
        states.clear()
        for slot in slots:
            assert self.states
            self.states.free(slot)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """The number of blocks of each group without references, evictable ones included."""
        return tuple(pool.num_free for pool in self.pools)


def _keeps(states: SequenceStates, blocks: int, spare: int) -> bool:
    """Whether a prompt leaves a checkpoint after so many blocks. `spare`: slots for checkpoints."""
    reason = states.checkpoints.get(blocks)
    return reason is not None and spare > (FEW if reason == EARLIER else 0)


def _first_visible(position: int, window: int) -> int:
    """Returns the first block that a query at `position` sees."""
    return max(0, position - window + 1) // KV_BLOCK if window else 0

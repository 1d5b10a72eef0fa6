"""The prefix cache on disk: KV blocks and recurrent states that leave memory go to files, and come back from there.

Saving: blocks that are about to be evicted from memory are copied, and a thread writes them (`block_files.py`). While a
server is idle, and when a model is closed, the blocks that memory still has are saved too.

Restoring: if memory does not have all of a prompt, a thread looks for the rest on the disk. The request waits in the
queue while another thread reads it; steps of others go on. Between two steps, blocks that were read are written to free
blocks of the device and published, as if a request had just computed them. Then the request finds its prefix in memory.

What fails on the way is a miss: the request computes what it did not find. A disk that does not answer is left alone.
"""

from __future__ import annotations

import json
import time
from _blake2 import blake2b  # not from hashlib, which spends milliseconds on loading OpenSSL
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress, groupby
from pathlib import Path
from threading import Condition, Event, Thread
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self
from weakref import finalize

import numpy as np

from tandem import __version__
from tandem.devices.device import Bytes
from tandem.engine.block_files import IDENTITY, BlockFiles
from tandem.engine.kv_cache import RESTORED, BlockTable, KVCache, SequenceKV
from tandem.engine.kv_memory import KVMemory
from tandem.engine.kv_snapshot import kv_kind
from tandem.engine.stats import DiskCacheStats
from tandem.errors import DeviceError, OutOfMemoryError, RequestError
from tandem.kernels.abi import KV_BLOCK
from tandem.native import best_isa

if TYPE_CHECKING:
    from tandem.engine.engine import Engine
    from tandem.model.vision import VisionModel

BATCH_BYTES, MAX_BATCH = 4 << 20, 32  # about as many bytes, or blocks, are read, evicted or saved at once
MAX_RESTORES = 4  # prompts that are read at the same time, in turn
MAX_READ = 64 << 20  # bytes that were read and are not on the device yet
MAX_QUEUED = 128 << 20  # bytes that wait to be written: if the disk is slower, blocks are dropped
FIND_SECONDS = 0.001  # for which a new request waits to hear that the disk has nothing
IDLE_SECONDS = 0.01  # for which a step with nothing to compute waits for the disk
HANG_SECONDS = 2.0  # for which the disk may not answer, before requests compute instead
CLOSE_SECONDS = 10.0  # in which a model that is closed saves what memory has


class BlockMemory(Protocol):
    """KVMemory, or what simulates it."""

    nbytes: list[int]  # of a block of each group

    def read(self, group: int, blocks: Sequence[int]) -> Bytes: ...

    def write(self, group: int, blocks: Sequence[int], data: Bytes) -> None: ...


class Restore:
    """What a request gets from the disk. At first, a thread looks for files; then their blocks are read, maybe in
    several attempts."""

    __slots__ = (
        "attempt",
        "before",
        "done",
        "failed",
        "found",
        "hashes",
        "left",
        "needs_room",
        "tables",
        "wanted",
    )

    def __init__(self, hashes: Sequence[bytes]) -> None:
        self.hashes = hashes  # of the blocks that it could use
        # Hashes of each group that have files; None: not known yet.
        self.found: list[set[bytes]] | None = None
        self.before: int | None = None  # blocks of its prefix that memory had
        # The prefix that is being restored, in each group: all of these blocks have a reference meanwhile.
        self.tables: list[BlockTable] = []
        self.wanted: set[bytes] = set()  # hashes of those that are being read
        self.left = 0  # blocks that are still to be read
        self.attempt = 0  # what was read in an earlier one is dropped
        self.needs_room = False  # it waits for free blocks
        self.failed = False  # the reader had no memory
        self.done = False


class _Batch(NamedTuple):
    """Blocks of one group."""

    group: int
    blocks: list[int]
    hashes: list[bytes]
    when: int  # the time of use of the first, in ns

    @property
    def keys(self) -> list[bytes]:
        """The keys of its files."""
        return [hash + bytes([self.group]) for hash in self.hashes]


class _Read(NamedTuple):
    restore: Restore
    attempt: int
    batch: _Batch
    data: Bytes  # [blocks, bytes]; less than the batch if the next one is missing or damaged


class _Worker:
    """A thread that runs tasks. A task that returns True runs again, after the others."""

    def __init__(self, name: str) -> None:
        self._tasks: deque[Callable[[], object]] = deque()
        self._changed, self._stopping = Condition(), False
        # The time when the disk was asked for something that it has not answered; 0: for nothing.
        self.began = 0.0
        self._thread = Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # "can't start new thread"
            raise OutOfMemoryError from None

    def add(self, task: Callable[[], object], *, first: bool = False) -> None:
        with self._changed:
            (self._tasks.appendleft if first else self._tasks.append)(task)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._tasks:
                    if self._stopping:
                        return
                    self._changed.wait()
                task = self._tasks.popleft()
                self.began = time.monotonic()
            try:
                again = task()
            except MemoryError:  # the blocks are not saved
                again = False
            self.began = 0.0
            if again:
                self.add(task)
            del task  # it may refer to the engine

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks) or self.began > 0

    @property
    def hangs(self) -> bool:
        return 0 < self.began < time.monotonic() - HANG_SECONDS

    def stop(self) -> None:
        """Ends the thread after its last task."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, seconds: float) -> None:
        """Waits for the thread to end; not for ever, for the disk may hang."""
        self._thread.join(max(0.0, seconds))


class DiskCache:
    """All methods but those that workers run are called by who has the engine's lock."""

    def __init__(
        self, files: BlockFiles, cache: KVCache, memory: BlockMemory, wait: Callable[[], None]
    ) -> None:
        """`wait`: waits until no step is in flight."""
        self.files, self.cache, self.memory, self._wait = files, cache, memory, wait
        self.hits = self.restored_tokens = self.dropped = 0
        self.saves = True  # False after the device failed: what memory has may be wrong
        self._reader, self._writer = _Worker("tandem-disk-reader"), _Worker("tandem-disk-writer")
        for worker in (self._reader, self._writer):
            finalize(self, worker.stop)
        self._reading: list[Restore] = []
        self._read: deque[_Read] = deque()  # what was read and is not on the device yet
        self._answered = Event()  # the reader found or read something
        self._changed = Condition()  # of the next two
        self._unwritten = 0  # bytes of `_read`
        self._queued = 0  # bytes that the writer has not written yet
        self._batch = [max(1, min(MAX_BATCH, BATCH_BYTES // max(1, nbytes))) for nbytes in memory.nbytes]
        for group, pool in enumerate(cache.all_pools):
            pool.on_evict, pool.evicted_at_once = partial(self._evicted, group), self._batch[group]

    @classmethod
    def open(cls, engine: Engine, folder: Path, budget: int, vision: VisionModel | None) -> Self:
        """Gives a loaded model a prefix cache on disk. `vision`: the encoder of its images."""
        kind = {
            **kv_kind(engine),
            "version": __version__,
            "device": [engine.device.name, best_isa()],
            "files": [engine.model.gguf.version, vision.version if vision else None],
        }
        identity = blake2b(json.dumps(kind).encode(), digest_size=IDENTITY).digest()
        try:
            files = BlockFiles(folder, identity, budget)
        except OSError as error:
            raise RequestError(
                f"the disk cache cannot use {folder}: {error.strerror}: set XDG_CACHE_HOME to another folder"
            ) from None
        memory = KVMemory(engine.program, engine.device)
        engine.disk = engine.scheduler.disk = disk = cls(files, engine.cache, memory, engine.wait)
        return disk

    # ---- restoring: what the scheduler asks

    def must_wait(self, kv: SequenceKV, usable: int, make_room: Callable[[], bool]) -> bool:
        """Whether a request that could use the first `usable` blocks waits for some of them. `make_room`: preempts
        another request; returns False if none is less urgent."""
        if (restore := kv.restore) is None:
            restore = kv.restore = Restore(kv.block_hashes[:usable])
            is_idle, restore.done = not self._reader.is_busy, self._reader.hangs
            if not restore.done:
                self._answered.clear()
                self._ask_reader(restore, partial(self._find, restore), first=True)
            if is_idle:
                self._answered.wait(FIND_SECONDS)
        return self.is_busy(restore) or not (restore.done or self._begin(restore, make_room))

    def is_busy(self, restore: Restore) -> bool:
        """Whether the disk was asked for something that it has not answered yet."""
        if (restore.found is None or restore.left) and not restore.done:
            if not (self._reader.hangs or restore.failed):
                return True
            self._release(restore)
            restore.done = True
        return False

    def cancel(self, kv: SequenceKV) -> None:
        """Ends the restore of a request. It may begin another one."""
        if kv.restore:
            self._release(kv.restore)
            kv.restore = None

    def give_way(self) -> bool:
        """Frees the blocks of the latest restore, which begins again later: running requests need them. Returns False
        if there is none."""
        if self._reading:
            self._release(self._reading[-1])
            return True
        return False

    def _begin(self, restore: Restore, make_room: Callable[[], bool]) -> bool:
        """Begins to read what memory does not have. Returns True if the disk has no more than memory, and False if the
        request has to wait."""
        cache, found, hashes = self.cache, restore.found, restore.hashes
        assert found is not None
        cached, count = cache.find_prefix(hashes), cache.find_prefix(hashes, also=found)
        if restore.before is None:
            restore.before = cached
        if count <= cached:
            self._finish(restore)
            return True
        hashes = hashes[:count]
        if len(self._reading) >= MAX_RESTORES or any(
            not other.wanted.isdisjoint(hashes) for other in self._reading
        ):
            return False  # others read, maybe the same prefix
        while (tables := cache.allocate_missing(hashes)) is None:
            restore.needs_room = not make_room()
            if restore.needs_room:
                return False
        restore.tables, restore.needs_room = tables, False
        batches = list(self._missing(restore, hashes))
        restore.left = sum(len(batch.blocks) for batch in batches)
        restore.wanted.update(hash for batch in batches for hash in batch.hashes)
        self._reading.append(restore)
        self._ask_reader(restore, partial(self._read_next, restore, restore.attempt, iter(batches)))
        return False

    def _missing(self, restore: Restore, hashes: Sequence[bytes]) -> Iterator[_Batch]:
        """Yields the blocks that are to be read."""
        now = time.time_ns()
        for group, (table, pool) in enumerate(zip(restore.tables, self.cache.all_pools, strict=True)):
            missing = [i for i in range(table.freed, len(hashes)) if pool.hashes[table.blocks[i]] is None]
            for begin in range(0, len(missing), self._batch[group]):
                some = missing[begin : begin + self._batch[group]]
                blocks = [table.blocks[i] for i in some]
                yield _Batch(group, blocks, [hashes[i] for i in some], now - 1000 * some[0])

    def _finish(self, restore: Restore) -> None:
        gained = self.cache.find_prefix(restore.hashes) - (restore.before or 0)
        self.hits += gained > 0
        self.restored_tokens += max(0, gained) * KV_BLOCK
        restore.done, restore.hashes, restore.found = True, (), None

    def _release(self, restore: Restore) -> None:
        """Frees the blocks of a restore; those that were read stay in the prefix cache."""
        restore.attempt += 1
        restore.left = 0
        restore.wanted.clear()
        tables, restore.tables = restore.tables, []
        if restore in self._reading:
            self._reading.remove(restore)
        if tables:
            self.cache.free_all(tables)

    # ---- restoring: what the engine does between steps

    def write_to_device(self, seconds: float) -> None:
        """Writes what was read to the device, for about `seconds`."""
        if not self._read:
            return
        end = time.perf_counter() + seconds
        self._wait()  # steps in flight may still use blocks that were freed
        while self._read:
            read = self._read.popleft()
            with self._changed:
                self._unwritten -= len(read.batch.blocks) * self.memory.nbytes[read.batch.group]
                self._changed.notify_all()
            if read.attempt == read.restore.attempt:
                self._publish(*read)
            if time.perf_counter() > end:
                return

    def _publish(self, restore: Restore, _: int, batch: _Batch, data: Bytes) -> None:
        count, pool = len(data), self.cache.all_pools[batch.group]
        try:
            self.memory.write(batch.group, batch.blocks[:count], data)
        except MemoryError:
            count = 0
        for block, hash in zip(batch.blocks[:count], batch.hashes, strict=False):
            if pool is self.cache.states:
                self.cache.states.keep(block, restore.hashes[: restore.hashes.index(hash) + 1], RESTORED)
            else:
                pool.publish(block, hash)
        restore.left -= len(batch.blocks)
        if count < len(batch.blocks):  # so the prefix is shorter
            assert restore.found is not None
            restore.found[batch.group].discard(batch.hashes[count])
            self._release(restore)
        elif not restore.left:
            self._release(restore)
            self._finish(restore)

    def wait_while_idle(self) -> None:
        """Waits a moment for the disk, if it was asked for something: there is nothing to compute."""
        self._answered.clear()
        if not self._read and self._reader.is_busy:
            self._answered.wait(IDLE_SECONDS)

    # ---- restoring: what the reader does

    def _ask_reader(self, restore: Restore, task: Callable[[], object], *, first: bool = False) -> None:
        """Has the reader run a task. Without memory for it, the restore ends: nobody waits for it."""

        def run() -> object:
            try:
                return task()
            except MemoryError:
                restore.failed = True
                self._answered.set()
                return False

        self._reader.add(run, first=first)

    def _find(self, restore: Restore) -> None:
        """Looks for the files of the blocks that memory does not have."""
        hashes, found, windows = restore.hashes, [], self.cache.windows
        for group, pool in enumerate(self.cache.all_pools):
            missing = [hash for hash in hashes if hash not in pool.cached]
            there = self.files.find(hash + bytes([group]) for hash in missing)
            if group < len(windows) and not windows[group]:  # a global group needs all up to the end
                count = next((i for i, yes in enumerate(there) if not yes), len(missing))
                if count < len(missing):
                    hashes = hashes[: hashes.index(missing[count])]
                found.append(set(missing[:count]))
            else:
                found.append(set(compress(missing, there)))
        restore.found = found
        self._answered.set()

    def _read_next(self, restore: Restore, attempt: int, batches: Iterator[_Batch]) -> bool:
        """Reads a batch; returns whether there are more."""
        with self._changed:
            self._reader.began = 0.0  # this is no fault of the disk
            while self._unwritten >= MAX_READ and restore.attempt == attempt:
                self._changed.wait(IDLE_SECONDS)
            self._reader.began = time.monotonic()
        if restore.attempt != attempt or (batch := next(batches, None)) is None:
            return False
        data = np.empty((len(batch.blocks), self.memory.nbytes[batch.group]), np.uint8)
        count = self.files.read(batch.keys, data, batch.when)
        with self._changed:
            self._unwritten += data.nbytes
        self._read.append(_Read(restore, attempt, batch, data[:count]))
        self._answered.set()
        return count == len(batch.blocks)

    # ---- saving

    def _evicted(self, group: int, blocks: list[int], hashes: list[bytes]) -> None:
        """Saves blocks that are about to be evicted, the least recently used first."""
        batch, known = _Batch(group, blocks[::-1], hashes[::-1], time.time_ns()), self.files.known
        new = [key not in known for key in batch.keys]
        if not all(new):
            there = [key for key in batch.keys if key in known]
            self._writer.add(partial(self.files.touch, there, batch.when))
        if any(new):
            blocks, hashes = list(compress(batch.blocks, new)), list(compress(batch.hashes, new))
            self._save(batch._replace(blocks=blocks, hashes=hashes))

    def _save(self, batch: _Batch) -> None:
        """Copies blocks for the writer."""
        nbytes = len(batch.blocks) * self.memory.nbytes[batch.group]
        if not self.saves or (self._queued and self._queued + nbytes > MAX_QUEUED):
            self.dropped += len(batch.blocks)
            return
        self._wait()  # a step in flight may still write them
        try:
            data = self.memory.read(batch.group, batch.blocks)
        except MemoryError:
            self.dropped += len(batch.blocks)
            return
        with self._changed:
            self._queued += nbytes
        self._writer.add(partial(self._write, batch, data))

    def _write(self, batch: _Batch, data: Bytes) -> None:
        try:
            self.files.write(batch.keys, data, batch.when)
        finally:
            with self._changed:
                self._queued -= data.nbytes

    def save_in_parts(self) -> Iterator[None]:
        """Saves the cached blocks that have no file, as many as the budget has room for, the most recently used first.
        Steps may run between two parts."""
        known, left, found = self.files.known, self.files.budget, []
        for group, pool in enumerate(self.cache.all_pools):
            unsaved = [pair for pair in pool.by_use() if pair[1] + bytes([group]) not in known]
            # Of all groups equally much at any time.
            found += [(i / len(unsaved), group, *pair) for i, pair in enumerate(unsaved)]
        found.sort()
        now, step = time.time_ns(), min(self._batch)
        for begin in range(0, len(found), step):
            if not self.saves or self._writer.hangs:
                return
            some = sorted(found[begin : begin + step], key=lambda each: each[1])
            for group, members in groupby(some, key=lambda each: each[1]):
                pool = self.cache.all_pools[group]
                pairs = [(block, hash) for *_, block, hash in members if pool.hashes[block] == hash]
                left -= len(pairs) * self.memory.nbytes[group]
                if left < 0:
                    return
                if pairs:
                    blocks, hashes = map(list, zip(*pairs, strict=True))
                    self._save(_Batch(group, blocks, hashes, now - 1000 * begin))
            yield
            while self._queued > MAX_QUEUED // 2 and not self._writer.hangs:
                yield

    def close(self) -> None:
        """Saves what memory has, within some seconds, and ends the threads."""
        end = time.monotonic() + CLOSE_SECONDS
        with suppress(DeviceError):
            for _ in self.save_in_parts():
                if self._queued > MAX_QUEUED // 2:
                    time.sleep(0.001)
                if time.monotonic() > end:
                    break
        for restore in list(self._reading):
            self._release(restore)
        for worker in (self._reader, self._writer):
            worker.stop()
            worker.join(end - time.monotonic())
        self._read.clear()

    def stats(self) -> DiskCacheStats:
        files = self.files
        return DiskCacheStats(
            budget=files.budget,
            used=files.used,
            hits=self.hits,
            restored_tokens=self.restored_tokens,
            read_bytes=files.read_bytes,
            written_bytes=files.written_bytes,
            evicted=files.evicted,
            damaged=files.damaged,
            dropped=self.dropped + files.failed,
        )

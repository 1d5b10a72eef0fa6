"""Random histories of a prefix cache on disk, without kernels: reading and writing happen at any time, files are
damaged, and the process restarts. Each request has the tokens that it would get alone, and the books of blocks agree.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.devices.device import Bytes
from tandem.engine import disk_cache
from tandem.engine.block_files import BlockFiles
from tandem.engine.disk_cache import DiskCache
from tandem.engine.params import SamplingParams
from tandem.engine.sequence import Sequence as Request
from tandem.kernels.abi import KV_BLOCK
from tests.engine.simulation import SimulatedEngine, expected
from tests.engine.test_kv_blocks import CONTEXT, WINDOWS, check_pools

pytestmark = pytest.mark.fast


class WorkerByHand:
    """Runs tasks when it is told to."""

    hangs = False
    began = 0.0

    def __init__(self, _: str) -> None:
        self.tasks: deque[Callable[[], object]] = deque()

    def add(self, task: Callable[[], object], *, first: bool = False) -> None:
        (self.tasks.appendleft if first else self.tasks.append)(task)

    @property
    def is_busy(self) -> bool:
        return bool(self.tasks)

    def work(self) -> None:
        if self.tasks:
            task = self.tasks.popleft()
            if task():
                self.tasks.append(task)

    def stop(self) -> None:
        while self.tasks:
            self.work()

    def join(self, _: float) -> None:
        pass


class SimulatedMemory:
    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.nbytes = [KV_BLOCK * 2 * 8] * len(engine.windows) + [8 * (CONTEXT + 1)] * bool(
            engine.state_slots
        )

    def read(self, group: int, blocks: Sequence[int]) -> Bytes:
        if group < len(self.engine.windows):
            rows = self.engine.cells[group].reshape(-1, 2 * KV_BLOCK)[blocks]
        else:
            rows = np.full((len(blocks), CONTEXT + 1), -1)
            for row, slot in zip(rows, blocks, strict=True):
                tokens = self.engine.state_slots[slot]
                assert tokens is not None, "a checkpoint that was never written"
                row[: 1 + len(tokens)] = [len(tokens), *tokens]
        return np.ascontiguousarray(rows).view(np.uint8).copy()

    def write(self, group: int, blocks: Sequence[int], data: Bytes) -> None:
        rows = data.copy().view(np.int64)
        if group < len(self.engine.windows):
            self.engine.cells[group].reshape(-1, 2 * KV_BLOCK)[blocks] = rows
        else:
            for slot, (count, *tokens) in zip(blocks, rows.tolist(), strict=True):
                self.engine.state_slots[slot] = tokens[:count]


class DiskEngine(SimulatedEngine):
    disk: Any

    def run(self, *sequences: Request) -> None:
        idle = 0
        while any(sequence.finish_reason is None for sequence in sequences):
            before = self.steps
            self.step()
            idle = 0 if self.steps > before or self.disk._reader.is_busy or self.disk._read else idle + 1
            assert idle < 4, "requests wait for nothing"
            self.disk._reader.work()


class History:
    """A random history of one folder: requests with common prefixes, restarts and damage. `rng` decides."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.folder, self.totals = random.Random(seed), folder, Counter[str]()
        self.prompts: list[list[int]] = []
        self.alive: list[Request] = []
        rng = self.rng
        self.windows, states = rng.choice(WINDOWS), rng.choice([0, 0, 4, 6, 30])
        self.options: dict[str, Any] = {
            "spare": rng.choice([0, 2, 12]),
            "tokens": rng.randint(1, 60),
            "step_slots": rng.randint(1, 2),
            "draft_tokens": 0 if states else rng.choice([0, 2]),
            "states": states,
        }
        self.budget = rng.choice([60_000, 1_000_000])
        self.open()

    def open(self) -> None:
        options = dict(self.options)
        spare, tokens, full = options.pop("spare"), options["tokens"], CONTEXT // KV_BLOCK
        one = [min(full, (w + tokens) // KV_BLOCK + 2) if w else full for w in self.windows]
        blocks = tuple(n + spare for n in one)
        engine = DiskEngine(windows=self.windows, blocks=blocks, context=CONTEXT, batch=3, **options)
        files, memory = BlockFiles(self.folder, bytes(16), self.budget), SimulatedMemory(engine)
        self.engine, self.alive = engine, []
        engine.disk = engine.scheduler.disk = DiskCache(files, engine.cache, memory, engine.wait)

    def act(self) -> None:
        actions = {
            self.submit: 5,
            self.work: 12,
            self.cancel: 2,
            self.read: 4,
            self.save_ahead: 1,
            self.restart: 2,
            self.damage: 0.3,
        }
        self.rng.choices([*actions], [*actions.values()])[0]()
        check_pools(self.engine)

    def submit(self) -> None:
        rng = self.rng
        if rng.random() < 0.4:
            parts = [rng.randrange(2) for _ in range(rng.randint(1, 5))]
            prompt = [part + 1 for part in parts for _ in range(KV_BLOCK)] + [9] * rng.randint(1, 20)
            self.prompts.append(prompt)
        prompt = rng.choice(self.prompts[-6:] or [[1] * 50])
        params = SamplingParams(max_tokens=rng.randint(1, 20), priority=rng.randrange(2))
        self.alive.append(self.engine.submit(prompt, params))

    def work(self) -> None:
        """The disk is faster or slower than steps."""
        reads, writes = self.rng.randrange(3), self.rng.randrange(3)
        for _ in range(self.rng.randint(1, 8)):
            for worker in [self.engine.disk._reader] * reads + [self.engine.disk._writer] * writes:
                worker.work()
            self.engine.step()
            check_pools(self.engine)

    def read(self) -> None:
        """What was read may be of no use before it is on the device."""
        for _ in range(self.rng.randint(1, 4)):
            self.engine.disk._reader.work()
        if self.rng.random() < 0.5:
            self.cancel()

    def cancel(self) -> None:
        if self.alive:
            self.engine.cancel(self.alive.pop(self.rng.randrange(len(self.alive))))

    def save_ahead(self) -> None:
        next(self.engine.disk.save_in_parts(), None)

    def damage(self) -> None:
        for file in sorted(self.folder.glob("*/*")):
            if self.rng.random() < 0.2 and (data := bytearray(file.read_bytes())):
                data[self.rng.randrange(len(data))] ^= 1
                file.write_bytes(data[: self.rng.randrange(len(data))] if self.rng.random() < 0.3 else data)

    def restart(self) -> None:
        if self.rng.random() < 0.5:
            self.finish()
        self.end()
        if self.rng.random() < 0.3:
            self.damage()
        self.open()

    def finish(self) -> None:
        """Each request has the tokens that it would get alone."""
        self.engine.run(*self.alive)
        for sequence in self.alive:
            ids, prompt = [sampled.id for sampled in sequence.generated], sequence.request.prompt
            states = self.engine.cache.states is not None
            assert ids == expected(prompt, len(ids), self.windows, self.engine.repeats, states)
            assert len(ids) == sequence.request.max_tokens
        check_pools(self.engine)
        self.engine.check_idle()

    def end(self) -> None:
        disk = self.engine.disk
        disk.close()
        used = sum(-(-file.stat().st_size // 4096) * 4096 for file in self.folder.glob("*/*"))
        assert used <= self.budget and not list(self.folder.rglob("*.part"))
        files = disk.files
        self.totals.update(
            hits=disk.hits, tokens=disk.restored_tokens, damaged=files.damaged, evicted=files.evicted
        )


@pytest.mark.parametrize("histories", [60, pytest.param(3000, marks=pytest.mark.soak)])
def test_random_histories(histories: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_Worker", WorkerByHand)
    monkeypatch.setattr(disk_cache, "FIND_SECONDS", 0)
    monkeypatch.setattr(disk_cache, "IDLE_SECONDS", 0)
    totals = Counter[str]()
    for seed in range(histories):
        monkeypatch.setattr(disk_cache, "BATCH_BYTES", random.Random(seed).choice([1, 700, 100_000]))
        history = History(seed, tmp_path / str(seed))
        try:
            for _ in range(110):
                history.act()
            history.finish()
            history.end()
        except Exception as error:
            error.add_note(f"history {seed}")
            raise
        totals += history.totals
    print(dict(totals))
    assert (
        totals["hits"] > 2 * histories
        and totals["damaged"] > histories / 10
        and totals["evicted"] > histories
    )

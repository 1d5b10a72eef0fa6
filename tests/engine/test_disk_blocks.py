"""The state machine of test_kv_blocks with a prefix cache on disk: reading and writing happen at any time, files are
damaged, and the process restarts. Each request has the tokens that it would get alone.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tandem.devices.device import Bytes
from tandem.engine import disk_cache
from tandem.engine.block_files import BlockFiles
from tandem.engine.disk_cache import DiskCache
from tandem.engine.params import SamplingParams
from tandem.engine.sequence import Sequence as Request
from tandem.kernels.abi import KV_BLOCK
from tests.engine.simulation import SimulatedEngine
from tests.engine.test_kv_blocks import CONTEXT, WINDOWS, Blocks

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


class DiskBlocks(Blocks):
    engine_class = DiskEngine

    @initialize(
        windows=st.sampled_from(WINDOWS),
        spare=st.integers(0, 12),
        tokens=st.integers(1, 60),
        step_slots=st.integers(1, 2),
        draft_tokens=st.sampled_from([0, 2]),
        states=st.sampled_from([0, 4, 6, 30]),
        budget=st.sampled_from([100_000, 1_000_000]),
        batch=st.sampled_from([1, 700, 100_000]),
    )
    def start(self, budget: int, batch: int, **options: Any) -> None:  # type: ignore[override]
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(disk_cache, "_Worker", WorkerByHand)
        self.patch.setattr(disk_cache, "BATCH_BYTES", batch)
        for name in ("FIND_SECONDS", "IDLE_SECONDS"):
            self.patch.setattr(disk_cache, name, 0)
        self.folder, self.budget, self.options = Path(tempfile.mkdtemp()), budget, options
        self.open()

    def open(self) -> None:
        super().start(**self.options)
        engine = self.engine
        files = BlockFiles(self.folder, bytes(16), self.budget)
        engine.disk = engine.scheduler.disk = DiskCache(
            files, engine.cache, SimulatedMemory(engine), engine.wait
        )

    @rule(parts=st.lists(st.integers(0, 1), min_size=2, max_size=5), rest=st.integers(1, 20))
    def submit_long(self, parts: list[int], rest: int) -> None:
        self.submit(parts, rest, 5, 0, 1)

    @rule(steps=st.integers(1, 8), reads=st.integers(0, 2), writes=st.integers(0, 2))
    def work(self, steps: int, reads: int, writes: int) -> None:
        """The disk is faster or slower than steps."""
        for _ in range(steps):
            for _ in range(reads):
                self.engine.disk._reader.work()
            for _ in range(writes):
                self.engine.disk._writer.work()
            self.engine.step()
            self.books_agree()

    @rule()
    def save_ahead(self) -> None:
        next(self.engine.disk.save_in_parts(), None)

    @rule(seed=st.integers(0, 1000), byte=st.integers(0, 400), cut=st.booleans())
    def damage(self, seed: int, byte: int, cut: bool) -> None:
        rng = random.Random(seed)
        for file in sorted(self.folder.glob("*/*")):
            if rng.random() < 0.3:
                data = bytearray(file.read_bytes())
                if data:
                    data[byte % len(data)] ^= 1
                file.write_bytes(data[:byte] if cut else data)

    @rule(asks_again=st.booleans(), damage=st.booleans(), seed=st.integers(0, 1000))
    def restart(self, asks_again: bool, damage: bool, seed: int) -> None:
        """Requests of before come again: some alike, some that go on."""
        if asks_again:
            self.engine.run(*self.alive)
        before = self.alive[-4:] * asks_again
        self.engine.disk.close()
        if damage:
            self.damage(seed, seed, seed % 3 == 0)
        self.open()
        for request in before:
            prompt = [*request.tokens, *request.request.prompt][: CONTEXT - 30]
            self.alive.append(self.engine.submit(prompt, SamplingParams(max_tokens=5)))

    def teardown(self) -> None:
        if not hasattr(self, "patch"):
            return
        try:
            super().teardown()
            self.engine.disk.close()
            assert not list(self.folder.rglob("*.part"))
        finally:
            self.patch.undo()
            shutil.rmtree(self.folder)


DiskBlocks.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_disk_blocks = DiskBlocks.TestCase

"""Submits, runs and cancels requests with common prefixes in any order. After every step, reference counts, free lists,
hashes and tables agree. At the end all blocks are free, and each request has the tokens that it would get alone.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tandem.engine.kv_cache import NO_BLOCK, BlockTable, KVCache, extend_block_hashes
from tandem.engine.params import SamplingParams
from tandem.engine.sequence import Sequence
from tandem.kernels.abi import KV_BLOCK
from tests.engine.simulation import SimulatedEngine, expected

pytestmark = pytest.mark.fast

CONTEXT = 8 * KV_BLOCK
WINDOWS = [(0,), (7,), (0, 20), (16, 33), (0, 5, 40)]


def check_pools(engine: SimulatedEngine) -> None:
    for group, pool in enumerate(engine.cache.pools):
        tables = [s.kv.tables[group] for s in (*engine.scheduler.running, *engine.scheduler.waiting)]
        tables += restored(engine, group)
        used = Counter(block for table in tables for block in table.blocks if block != NO_BLOCK)
        assert pool.references == [used[block] for block in range(len(pool.references))]
        blocks = [*used, *pool._free, *pool._evictable]
        assert sorted(blocks) == list(range(len(pool.references))), "a block is lost, or in two places"
        assert pool.cached == {hash: block for block, hash in enumerate(pool.hashes) if hash is not None}
        assert all(pool.hashes[block] is None for block in pool._free)
        assert all(pool.hashes[block] is not None for block in pool._evictable)
    check_states(engine)
    for sequence in engine.scheduler.running:
        for table, window in zip(sequence.kv.tables, engine.windows, strict=True):
            first = max(0, sequence.state.computed - window + 1) if window else 0
            assert all(table.blocks[p // KV_BLOCK] != NO_BLOCK for p in range(first, sequence.state.computed))
            assert all(block == NO_BLOCK for block in table.blocks[: table.freed])
    for sequence in engine.scheduler.waiting:
        assert not any(table.blocks for table in sequence.kv.tables)


def restored(engine: SimulatedEngine, group: int) -> list[BlockTable]:
    """The tables of prefixes that are being read from the disk."""
    return [restore.tables[group] for restore in engine.disk._reading] if engine.disk else []


def check_states(engine: SimulatedEngine) -> None:
    if (pool := engine.cache.states) is None:
        return
    held = Counter(s for sequence in engine.scheduler.running for s in sequence.kv.states.slots())
    held.update(slot for table in restored(engine, -1) for slot in table.blocks if slot != NO_BLOCK)
    assert pool.references == [held[slot] for slot in range(len(pool.references))]
    assert sorted([*held, *pool._free, *pool._evictable]) == list(range(len(pool.references)))
    assert pool.cached == {hash: slot for slot, hash in enumerate(pool.hashes) if hash is not None}
    for sequence in engine.scheduler.running:
        assert pool.hashes[sequence.kv.states.own] is None, "a checkpoint would be written"
    for sequence in engine.scheduler.waiting:
        assert not sequence.kv.states.slots()


class Blocks(RuleBasedStateMachine):
    """Prompts are made of a few blocks of tokens, so that they often begin alike."""

    @initialize(
        windows=st.sampled_from(WINDOWS),
        spare=st.integers(0, 12),
        tokens=st.integers(1, 60),
        step_slots=st.integers(1, 2),
        draft_tokens=st.sampled_from([0, 2, 9]),
        states=st.sampled_from([0, 4, 6, 30]),
    )
    def start(
        self,
        windows: tuple[int, ...],
        spare: int,
        tokens: int,
        step_slots: int,
        draft_tokens: int,
        states: int,
    ) -> None:
        full = CONTEXT // KV_BLOCK
        one = [min(full, (window + tokens) // KV_BLOCK + 2) if window else full for window in windows]
        self.engine = SimulatedEngine(
            windows=windows,
            blocks=tuple(n + spare for n in one),
            context=CONTEXT,
            batch=3,
            tokens=tokens,
            step_slots=step_slots,
            draft_tokens=draft_tokens,
            states=states,
        )
        self.alive: list[Sequence] = []

    @rule(
        parts=st.lists(st.integers(0, 2), max_size=5),
        rest=st.integers(1, 20),
        count=st.integers(1, 20),
        priority=st.integers(0, 1),
        copies=st.integers(1, 3),
    )
    def submit(self, parts: list[int], rest: int, count: int, priority: int, copies: int) -> None:
        prompt = [part + 1 for part in parts for _ in range(KV_BLOCK)] + [9] * rest
        params = SamplingParams(max_tokens=count, priority=priority)
        for _ in range(copies):
            self.alive.append(self.engine.submit(prompt, params))

    @rule()
    def step(self) -> None:
        self.engine.step()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.alive:
            self.engine.cancel(self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1))))

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "engine"):
            check_pools(self.engine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run(*self.alive)
        for sequence in self.alive:
            ids = [sampled.id for sampled in sequence.generated]
            states = self.engine.cache.states is not None
            assert ids == expected(
                sequence.request.prompt, len(ids), self.engine.windows, self.engine.repeats, states
            )
            assert len(ids) == sequence.request.max_tokens
        check_pools(self.engine)
        self.engine.check_idle()


Blocks.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_blocks = Blocks.TestCase


@pytest.mark.soak
class TestManyBlocks(Blocks.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(Blocks.TestCase.settings, max_examples=4000)


def block_hashes(tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, tokens)
    return hashes


def filled(cache: KVCache, tokens: list[int]) -> None:
    """A request that came and went."""
    tables = cache.new_tables()
    assert cache.reserve(tables, len(tokens))
    cache.publish(tables, block_hashes(tokens))
    cache.free_outside_window(tables, len(tokens))
    cache.free(tables)


def test_a_block_hash_covers_all_tokens_up_to_its_block() -> None:
    one = block_hashes(list(range(3 * KV_BLOCK + 5)))
    assert len(one) == 3 and one == block_hashes(list(range(3 * KV_BLOCK)))
    other = block_hashes([7, *range(1, 3 * KV_BLOCK)])
    assert not set(one) & set(other)


def test_a_prefix_is_found_until_it_is_evicted() -> None:
    cache = KVCache((0,), (6,))
    first, second = list(range(4 * KV_BLOCK)), [5] * (4 * KV_BLOCK)
    filled(cache, first)
    assert cache.find_prefix(block_hashes(first)) == 4
    assert cache.find_prefix(block_hashes(first[: 2 * KV_BLOCK + 8] + [9] * (2 * KV_BLOCK - 8))) == 2
    assert cache.free_blocks == (6,)
    filled(cache, second)  # two empty blocks, and the two that the end of the first text had
    assert cache.find_prefix(block_hashes(first)) == 2 and cache.find_prefix(block_hashes(second)) == 4


def test_a_sliding_group_needs_only_its_last_window() -> None:
    window = 2 * KV_BLOCK
    tokens = list(range(8 * KV_BLOCK))
    hashes = block_hashes(tokens)
    cache = KVCache((0, window), (20, 20))
    filled(cache, tokens)
    sliding = cache.pools[1]
    assert cache.find_prefix(hashes) == 8
    for i in (0, 1, 2):
        sliding._evict(sliding.cached[hashes[i]])
    # The last window of five blocks begins in block 3.
    assert cache.find_prefix(hashes) == 8 and cache.find_prefix(hashes[:5]) == 5
    assert cache.find_prefix(hashes[:4]) == 0
    cache.pools[0]._evict(cache.pools[0].cached[hashes[6]])
    assert cache.find_prefix(hashes) == 6


def test_copies_of_a_request_compute_their_prompt_once() -> None:
    for windows in ((0,), (0, 20)):
        engine = SimulatedEngine(
            windows=windows, blocks=(99,) * len(windows), context=CONTEXT, batch=8, tokens=512
        )
        prompt = list(range(100))
        copies = [engine.submit(prompt, SamplingParams(max_tokens=4)) for _ in range(5)]
        other = engine.submit([3] * 20, SamplingParams(max_tokens=4))
        engine.step()
        assert len(other.generated) == 1, "a request waits behind copies that wait for their prompt"
        computed = [sequence.state.computed for sequence in copies]
        engine.run(*copies, other)
        assert computed[0] >= 100
        shared = [set(s.kv.block_hashes[: 100 // KV_BLOCK]) for s in copies]
        assert all(one == shared[0] for one in shared)
        assert engine.tokens_computed <= 100 + 4 * 4 + 4 * (4 + 4) + 24 + 8, "the prompt was computed again"
        for sequence in copies:
            assert [sampled.id for sampled in sequence.generated] == expected(prompt, 4, windows)


def test_a_prompt_starts_from_a_checkpoint_of_its_prefix() -> None:
    engine = SimulatedEngine(windows=(0,), blocks=(400,), context=2048, batch=2, tokens=64, states=30)

    def computed(prompt: list[int], count: int = 4) -> tuple[int, list[int]]:
        before = engine.tokens_computed
        sequence = engine.submit(prompt, SamplingParams(max_tokens=count))
        engine.run(sequence)
        ids = [sampled.id for sampled in sequence.generated]
        assert ids == expected(prompt, count, (0,), states=True)
        return engine.tokens_computed - before, ids

    prompt = list(range(1000))
    cost, ids = computed(prompt, 100)
    assert cost >= 1000
    assert computed(prompt)[0] <= KV_BLOCK + 4, "the same prompt was computed again"
    # The next turn of a chat: the answer is in the prompt.
    assert computed([*prompt, *ids, *[5] * 40])[0] <= 40 + 2 * KV_BLOCK + 4
    # A prompt with another end, d tokens before that of the first: at most 4 d and some blocks again.
    for d in (20, 100, 300):
        cost = computed([*prompt[:-d], *[7] * d])[0]
        assert cost <= 5 * d + 6 * KV_BLOCK, (d, cost)
    # A branch leaves a checkpoint behind where it left the text of others.
    computed([*prompt[:160], *[8] * 300])
    assert computed([*prompt[:160], *[9] * 300])[0] <= 300 + KV_BLOCK + 4


def test_few_state_slots_for_a_large_batch_hold_checkpoints() -> None:
    engine = SimulatedEngine(windows=(0,), blocks=(4000,), context=2048, batch=64, tokens=64, states=8)
    prompt = list(range(1000))
    for _ in range(2):
        engine.run(sequence := engine.submit(prompt, SamplingParams(max_tokens=40)))
    assert sequence.state.cached_prompt_tokens >= 1000 - 2 * KV_BLOCK
    # The next message of that conversation, while others run.
    ids = [sampled.id for sampled in sequence.generated]
    others = [engine.submit([n + 1] * 30, SamplingParams(max_tokens=60)) for n in range(3)]
    engine.step()
    follows = engine.submit([*prompt, *ids, *[5] * 40], SamplingParams(max_tokens=4))
    engine.run(follows, *others)
    assert follows.state.cached_prompt_tokens >= 1000
    assert all(len(other.generated) == 60 for other in others)

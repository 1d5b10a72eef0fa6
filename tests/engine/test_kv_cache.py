"""KV blocks: each has one owner or is free, and sliding groups give back what nobody can see."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.kv_cache import NO_BLOCK, BlockTable, KVCache
from tandem.program.step_inputs import KV_BLOCK

pytestmark = pytest.mark.fast


def check(cache: KVCache, sequences: list[list[BlockTable]]) -> None:
    for group, count in enumerate(cache.blocks):
        owned = [b for tables in sequences for b in tables[group].blocks if b != NO_BLOCK]
        assert sorted(owned + cache._free[group]) == list(range(count))
    assert cache.free_blocks == tuple(len(free) for free in cache._free)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_block_has_one_owner_or_is_free(data: st.DataObject) -> None:
    windows = data.draw(st.sampled_from([(0,), (10,), (0, 1), (0, 16, 40)]))
    cache = KVCache(windows, tuple(data.draw(st.integers(1, 12)) for _ in windows))
    sequences = [cache.new_tables() for _ in range(3)]
    lengths = [0] * 3
    for _ in range(data.draw(st.integers(1, 30))):
        i = data.draw(st.integers(0, 2))
        tables = sequences[i]
        match data.draw(st.sampled_from(["reserve", "reserve", "slide", "release"])):
            case "reserve":
                tokens = lengths[i] + data.draw(st.integers(0, 60))
                before = [list(table.blocks) for table in tables]
                if cache.reserve(tables, tokens):
                    lengths[i] = tokens
                    assert all(len(table.blocks) * KV_BLOCK >= tokens for table in tables)
                else:
                    assert [table.blocks for table in tables] == before, "a failed reservation took something"
            case "slide":
                cache.slide(tables, lengths[i])
                for table, window in zip(tables, windows, strict=True):
                    seen = range(max(0, lengths[i] - window + 1) if window else 0, lengths[i])
                    assert all(table.blocks[position // KV_BLOCK] != NO_BLOCK for position in seen)
                    kept = [b for b in table.blocks if b != NO_BLOCK]
                    assert not window or len(kept) <= -(-window // KV_BLOCK) + 1
            case "release":
                cache.release(tables)
                lengths[i] = 0
        check(cache, sequences)
    for tables in sequences:
        cache.release(tables)
    assert cache.free_blocks == cache.blocks


def test_low_blocks_are_taken_first() -> None:
    """Memory that was never needed is never touched."""
    cache = KVCache((0,), (100,))
    tables = cache.new_tables()
    for _ in range(3):
        assert cache.reserve(tables, 5 * KV_BLOCK)
        assert sorted(tables[0].blocks) == [0, 1, 2, 3, 4]
        cache.release(tables)


def test_a_group_that_is_short_takes_nothing_from_the_others() -> None:
    cache = KVCache((0, 16), (10, 2))
    tables = cache.new_tables()
    assert not cache.reserve(tables, 3 * KV_BLOCK)
    assert cache.free_blocks == (10, 2)


def test_a_long_sequence_slides_through_few_blocks() -> None:
    cache = KVCache((20,), (4,))
    tables = cache.new_tables()
    for position in range(1000):
        assert cache.reserve(tables, position + 1)
        cache.slide(tables, position + 1)
    assert sum(block != NO_BLOCK for block in tables[0].blocks) <= 3

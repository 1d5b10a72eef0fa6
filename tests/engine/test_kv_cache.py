"""KV blocks: each has one owner or is free, and sliding-window groups free blocks outside the window."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.kv_cache import (
    EARLIER,
    FEW,
    NO_BLOCK,
    PROMPT_END,
    BlockPool,
    BlockTable,
    KVCache,
    SequenceStates,
    StatePool,
)
from tandem.engine.kv_size import HEADROOM, MAX_LAYER_BYTES, plan_kv, plan_states, step_bytes
from tandem.errors import DoesNotFitError
from tandem.gguf.file import GGUF, TensorInfo
from tandem.gguf.formats import by_name
from tandem.kernels.abi import KV_BLOCK
from tandem.kernels.panels import panel_layout
from tandem.model.architectures import ARCHITECTURES
from tandem.model.config import ModelConfig, Rope
from tandem.model.model import Model
from tandem.program.step_inputs import StepLimits
from tests.gguf_files import write

pytestmark = pytest.mark.fast


def check(cache: KVCache, sequences: list[list[BlockTable]]) -> None:
    for group, count in enumerate(cache.blocks):
        owned = [b for tables in sequences for b in tables[group].blocks if b != NO_BLOCK]
        pool = cache.pools[group]
        assert sorted([*owned, *pool._free, *pool._evictable]) == list(range(count))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_block_has_one_owner_or_is_free(data: st.DataObject) -> None:
    windows = data.draw(st.sampled_from([(0,), (10,), (0, 1), (0, KV_BLOCK, 40)]))
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
                cache.free_outside_window(tables, lengths[i])
                for table, window in zip(tables, windows, strict=True):
                    seen = range(max(0, lengths[i] - window + 1) if window else 0, lengths[i])
                    assert all(table.blocks[position // KV_BLOCK] != NO_BLOCK for position in seen)
                    kept = [b for b in table.blocks if b != NO_BLOCK]
                    assert not window or len(kept) <= -(-window // KV_BLOCK) + 1
            case "release":
                cache.free(tables)
                lengths[i] = 0
        check(cache, sequences)
    for tables in sequences:
        cache.free(tables)
    assert cache.free_blocks == cache.blocks


def test_low_blocks_are_allocated_first() -> None:
    """Memory that was never needed is never touched."""
    cache = KVCache((0,), (100,))
    tables = cache.new_tables()
    for _ in range(3):
        assert cache.reserve(tables, 5 * KV_BLOCK)
        assert sorted(tables[0].blocks) == [0, 1, 2, 3, 4]
        cache.free(tables)


def test_reserve_allocates_nothing_if_a_group_is_short() -> None:
    cache = KVCache((0, KV_BLOCK), (10, 2))
    tables = cache.new_tables()
    assert not cache.reserve(tables, 3 * KV_BLOCK)
    assert cache.free_blocks == (10, 2)


def test_a_long_sequence_frees_blocks_outside_the_window() -> None:
    cache = KVCache((20,), (4,))
    tables = cache.new_tables()
    for position in range(1000):
        assert cache.reserve(tables, position + 1)
        cache.free_outside_window(tables, position + 1)
    assert sum(block != NO_BLOCK for block in tables[0].blocks) <= 3


# Bytes of a block in a layer of `config`: keys and values of 2 heads of 64 float16.
LAYER_BLOCK = 2 * KV_BLOCK * 2 * 64 * 2


def config(windows: tuple[int, ...]) -> ModelConfig:
    layers = len(windows)
    return ModelConfig(
        "llama",
        layers,
        dim=256,
        ffn_dim=512,
        q_heads=4,
        kv_heads=2,
        head_dim=64,
        vocab=320,
        trained_context=4096,
        eps=1e-5,
        scale=0.125,
        ropes=(Rope(1e4, 64),),
        layer_rope=(0,) * layers,
        layer_window=windows,
    )


@pytest.mark.parametrize(
    ("windows", "free", "blocks"),
    [
        ((0, 0), 1e12, (64 * 8,)),  # eight full contexts
        ((0, 0), 64 * 2 * LAYER_BLOCK, (64,)),  # the first takes all there is
        ((0, 0), 64 * 2 * LAYER_BLOCK * 13, (64 * 3,)),  # others a quarter of it
        # a sliding layer keeps its window and a step
        ((0, 32), 1e12, (64 * 8, ((32 + 256) // KV_BLOCK + 2) * 8)),
    ],
)
def test_as_many_sequences_as_fit(windows: tuple[int, ...], free: float, blocks: tuple[int, ...]) -> None:
    limits = StepLimits(256, 8, 9, 64, len(set(windows)))
    free += HEADROOM + step_bytes(limits, 1)
    assert plan_kv(config(windows), limits, "f16", weights=0, free=(free, free)) == blocks


@pytest.mark.parametrize("wanted", [None, 1e12])
def test_a_layer_has_no_more_than_shaders_can_reach(wanted: float | None) -> None:
    limits = StepLimits(256, 64, 65, 1 << 16, 1)  # of 2**16 blocks: at least 512 MB a layer and sequence
    (blocks,) = plan_kv(config((0, 0)), limits, "f16", weights=0, free=(1e14, 1e14), wanted=wanted)
    assert blocks * LAYER_BLOCK < 1 << 32 <= (blocks + 1) * LAYER_BLOCK


@pytest.mark.parametrize(("kv", "advice"), [("f16", ", or kv q8 for half of it"), ("q8", "")])
def test_a_context_that_does_not_fit_says_which_would(kv: str, advice: str) -> None:
    """The largest: what steps need is less for a smaller context, too."""
    limits, weights = StepLimits(256, 1, 2, 64), int(1e9)
    free = weights + HEADROOM + step_bytes(limits, 1) + 10 * 2 * LAYER_BLOCK
    wanted = rf"\(1.0 GB\) with a context of {64 * KV_BLOCK} .* at most \d+" + advice
    with pytest.raises(DoesNotFitError, match=wanted) as error:
        plan_kv(config((0, 0)), limits, kv, weights=weights, free=(free, free))
    largest = int(re.findall(r"a context of at most (\d+)", str(error.value))[0]) // KV_BLOCK
    assert largest >= (10 if kv == "f16" else 18)
    assert plan_kv(config((0, 0)), replace(limits, blocks=largest), kv, weights=weights, free=(free, free))
    with pytest.raises(DoesNotFitError):
        plan_kv(config((0, 0)), replace(limits, blocks=largest + 1), kv, weights=weights, free=(free, free))


def test_a_model_that_does_not_fit_says_which_would() -> None:
    weights = int(1e9)
    with pytest.raises(DoesNotFitError, match=r"1.0 GB that are free: .* a file of at most 0.8 GB"):
        plan_kv(config((0, 0)), StepLimits(256, 1, 2, 64), "f16", weights=weights, free=(weights, weights))


@pytest.mark.parametrize("spare", [0, 16])
def test_what_steps_need_for_a_batch_counts(spare: int) -> None:
    """A batch of 512 with a context of 131,072: history and bias of every row, two of each, and the logits."""
    blocks, weights, batch = 131072 // KV_BLOCK, int(1e9), 512
    limits = StepLimits(512, batch + spare, batch + 1, blocks, 1, 150_000)
    inputs = step_bytes(limits, 2)
    adjustments, logits = 2 * (batch + spare) * (131072 + 1088) * 16, (batch + spare) * 150_000 * 4
    assert inputs == pytest.approx(adjustments + logits, rel=0.1) and inputs > adjustments + logits
    one = blocks * 2 * LAYER_BLOCK
    free = weights + HEADROOM + one + inputs
    assert plan_kv(config((0, 0)), limits, "f16", weights=weights, free=(free, free), step_slots=2) == (
        blocks,
    )
    half = weights + HEADROOM + one + inputs / 2
    with pytest.raises(DoesNotFitError, match=r"a context of 131072 .* a batch of 512 need") as error:
        plan_kv(config((0, 0)), limits, "f16", weights=weights, free=(half, half), step_slots=2)
    assert error.value.missing == pytest.approx(inputs / 2)
    most = int(re.findall(r"a batch of at most (\d+)", str(error.value))[0])
    assert 200 < most < 260
    fits = [StepLimits(512, n + spare, n + 1, blocks, 1, 150_000) for n in (most, most + 1)]
    assert plan_kv(config((0, 0)), fits[0], "f16", weights=weights, free=(half, half), step_slots=2)
    with pytest.raises(DoesNotFitError):
        plan_kv(config((0, 0)), fits[1], "f16", weights=weights, free=(half, half), step_slots=2)


@pytest.mark.parametrize(("format", "bits"), [("Q4_0", 4.5), ("Q2_K", 2.625), ("IQ1_S", 8.5)])
def test_what_weights_take_is_known_before_they_are_read(tmp_path: Path, format: str, bits: float) -> None:
    """Formats that are converted take more than in the file."""
    with GGUF.open(write(tmp_path / "a.gguf", [], [])) as gguf:
        blocks = by_name(format)
        gguf.tensors["m"] = TensorInfo("m", blocks, (48, 512), 0, 48 * blocks.row_bytes(512), gguf.path)
        gguf.tensors["v"] = TensorInfo("v", by_name("F16"), (100,), 0, 200, gguf.path)
        model = Model(gguf, config((0,)), ARCHITECTURES["llama"])
        assert model.nbytes(panel_layout) == 48 * 512 * bits / 8 + 400


def test_a_block_in_use_takes_the_place_of_an_equal_one_that_is_not() -> None:
    pool = BlockPool(2)
    old, new = pool.allocate(), pool.allocate()
    pool.publish(old, b"text")
    pool.publish(new, b"text")
    assert pool.cached == {b"text": old}, "both are in use"
    pool.free(old)
    pool.publish(new, b"text")
    assert pool.cached == {b"text": new} and pool.hashes[old] is None and pool.num_free == 1


@pytest.mark.parametrize("chunk", [4, 8])
@pytest.mark.parametrize(("spare", "kept"), [(FEW, {8}), (FEW + 2, {4, 8})])
def test_few_slots_keep_ends_of_prompts_however_they_are_cut(chunk: int, spare: int, kept: set[int]) -> None:
    cache, states = KVCache((0,), (8,), states=FEW + 4), SequenceStates()
    assert cache.reserve_state(states)
    states.checkpoints = {8: PROMPT_END, 4: EARLIER}
    for begin in range(0, 8, chunk):
        cache.advance_state(states, begin * KV_BLOCK, chunk * KV_BLOCK, spare)
    assert {blocks for blocks, _ in states.unpublished} == kept


def test_a_short_request_does_not_evict_a_long_conversation() -> None:
    """Slots for three checkpoints. A conversation that has gone on needs its first ones no more."""
    pool, texts = StatePool(3), {name: [f"{name}{i}".encode() for i in range(90)] for name in "abcd"}

    def keep(name: str, blocks: int, reason: str) -> None:
        slot = pool.allocate()
        pool.keep(slot, texts[name][:blocks], reason)
        pool.free(slot)

    for blocks in (80, 85, 90):
        keep("a", blocks, PROMPT_END)
    for name in "bcd":  # in turn, the prompts before the last one of `a`, and then short requests
        keep(name, 20, PROMPT_END)
    assert {*pool.cached} == {texts["a"][89], texts["c"][19], texts["d"][19]}
    for _ in range(9):  # but at last it goes
        keep("b", 20, PROMPT_END)
        keep("c", 20, PROMPT_END)
        keep("d", 20, PROMPT_END)
    assert texts["a"][89] not in pool.cached


def test_state_slots_are_limited_by_the_largest_layer() -> None:
    """Qwen 3.6 27B on a large GPU: 48 layers of 3.3 MB."""
    limits, layer = StepLimits(512, 64, 65, 32, 1), 3_300_000
    assert plan_states(limits, [layer] * 48, weights=0, free=1e12) == 2 * 65 + 16
    assert plan_states(limits, [layer] * 48, weights=0, free=130e9) == 81
    assert plan_states(limits, [MAX_LAYER_BYTES // 20, 1], weights=0, free=1e12) == 20
    assert plan_states(limits, [layer] * 48, weights=0, free=1e12, kv_memory=16e9) == 65 + 10

"""Logits and named intermediates of given tokens, read between launches."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.engine.params import SamplingParams
from tandem.errors import ContextError, RequestError
from tandem.kernels.abi import KV_BLOCK
from tests.engine.tiny_models import opened
from tests.program.programs import GOLDENS

pytestmark = pytest.mark.fast

IDS = list(range(3, 40))


def test_every_value_has_its_own_width_and_the_same_bits_when_fused() -> None:
    with (
        opened(GOLDENS["llama"], context=64, batch=16) as engine,
        opened(GOLDENS["llama"], context=64, batch=5, passes=()) as plain,
    ):
        config = engine.model.config
        assert config.vocab % 16 and config.kv_heads * config.head_dim % 16, (
            "widths that are padded in memory"
        )
        names = [name for name in engine.program.values if name != "result"]
        captured, again = engine.capture(IDS, names), plain.capture(IDS, names)
        assert captured["logits"].shape == (len(IDS), config.vocab)
        assert captured["blk.1.v"].shape == (len(IDS), config.kv_heads * config.head_dim)
        assert captured["blk.0.attn"].shape == (len(IDS), config.q_heads * config.head_dim)
        for name in names:
            np.testing.assert_array_equal(captured[name], again[name], err_msg=name)
        np.testing.assert_array_equal(captured["logits"], engine.logits(IDS))
        assert set(plain.program.values) > set(names), "without fusion more can be seen"


def test_what_cannot_be_captured() -> None:
    with opened(GOLDENS["llama"], context=32, batch=4) as engine:
        for problem, kind, ids, names in (
            ("no intermediate 'blk.9.q': `LLM.intermediates` lists", RequestError, [1], ["blk.9.q"]),
            ("the prompt is empty", RequestError, [], ["logits"]),
            ("33 tokens are more than the context of 32", ContextError, [1] * 33, ["logits"]),
            ("a token id is outside", RequestError, [10**6], ["logits"]),
        ):
            with pytest.raises(kind, match=problem):
                engine.capture(ids, names)
        assert engine.logits([1] * 32).shape == (32, engine.model.config.vocab)
        assert engine.cache.free_blocks == engine.cache.blocks


def test_requests_are_served_during_out_of_band_forwards() -> None:
    """An out-of-band forward does not depend on them, nor they on it, even if it preempts them."""
    params = SamplingParams(max_tokens=KV_BLOCK + 8, ignore_eos=True)
    ids = list(range(3, 2 * KV_BLOCK + 8))
    with opened(GOLDENS["llama"], context=4 * KV_BLOCK, batch=2) as engine:
        expected = engine.capture(ids, ["result_norm"])["result_norm"]
        alone = [engine.run((ids[i:], params))[0] for i in range(3)]  # tokens and logits
        sequences = [engine.submit(ids[i:], params) for i in range(3)]
        parts = []
        for part in engine.captured(ids, ["result_norm"]):
            parts.append(part["result_norm"])
            engine.step()
        np.testing.assert_array_equal(np.concatenate(parts), expected)
        while any(sequence.finish_reason is None for sequence in sequences):
            engine.step()
        assert [([s.id for s in each.generated], engine.seen[each]) for each in sequences] == alone
        assert engine.cache.free_blocks == engine.cache.blocks
        assert max(sequence.state.admissions for sequence in sequences) > 1, (
            "there is room for all: use a smaller cache"
        )

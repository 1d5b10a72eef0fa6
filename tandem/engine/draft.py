"""Guesses by a smaller model with the same vocabulary.

It has an engine of its own, whose requests are the texts so far. What they have in common with those before is in its
KV cache, so that a guess computes little more than its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import takewhile
from weakref import WeakKeyDictionary

from tandem.engine.engine import Engine
from tandem.engine.kv_plan import KV_SHARE
from tandem.engine.params import SamplingParams
from tandem.engine.sequence import Sequence
from tandem.errors import RequestError
from tandem.kernels.layouts import KV_TYPES, kv_bytes
from tandem.model.model import Model
from tandem.program.step_inputs import KV_BLOCK

FEW = 16  # tokens that a text grows by between guesses, where there are some at each step


class DraftModel:
    def __init__(self, engine: Engine, vocab: int) -> None:
        """`vocab`: of the model it guesses for."""
        self.engine, self.vocab = engine, vocab
        self.usual = True
        self._read: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()  # tokens of each text

    def guess(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        drafts = [self._submit(sequence.tokens, count) for sequence, count in wanted]
        while any(draft and draft.finish_reason is None for draft in drafts):
            self.engine.step()
        guessed = [sequence for (sequence, _), draft in zip(wanted, drafts, strict=True) if draft]
        self.usual = all(len(sequence.tokens) - self._read.get(sequence, 0) <= FEW for sequence in guessed)
        self._read.update((sequence, len(sequence.tokens)) for sequence in guessed)
        return [
            self._shared([sampled.id for sampled in draft.generated]) if draft else [] for draft in drafts
        ]

    def _submit(self, tokens: list[int], count: int) -> Sequence | None:
        if not count or len(tokens) + count >= self.engine.context:
            return None
        if max(tokens) >= self.engine.model.config.vocab:  # a token that only the main model has
            return None
        return self.engine.submit(tokens, SamplingParams(max_tokens=count, ignore_eos=True))

    def _shared(self, guess: list[int]) -> list[int]:
        """Up to a token that only the draft model has: one that pads its vocabulary."""
        return list(takewhile(lambda token: token < self.vocab, guess))


def kv_shares(
    model: Model, draft: Model, kv: str, context: int, batch: int, free: float, wanted: float | None
) -> tuple[float | None, float]:
    """Bytes of KV cache for a model and for its draft model: room for the same texts, out of the `wanted` bytes for
    both, or out of what both leave free, where the model then takes what there is."""
    one, other = (
        -(-context // KV_BLOCK) * kv_bytes(c.layers, c.kv_heads, c.head_dim, KV_TYPES.index(kv))
        for c in (model.config, draft.config)
    )
    if wanted is not None:
        return wanted * one / (one + other), wanted * other / (one + other)
    both = (free - model.nbytes - draft.nbytes) * KV_SHARE
    return None, other * max(1.0, min(batch, both / (one + other)))


def check_vocabularies(tokens: Items[str], draft: Items[str]) -> None:
    """Refuses a draft model that means other texts by the same ids; one may have more tokens at its end."""
    count = min(len(tokens), len(draft))
    if list(tokens)[:count] != list(draft)[:count]:
        raise RequestError("the draft model has another vocabulary: use one of the same family as the model")

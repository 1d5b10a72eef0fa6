"""Drafts tokens with a smaller model that has the same vocabulary.

The draft model has its own engine. For each sequence of the main model it has a draft sequence, which pauses between
drafts, and resumes from the last token that both have in common.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import takewhile

from tandem.engine.engine import STEP_TOKENS, Engine
from tandem.engine.kv_size import HEADROOM, KV_FRACTION, context_bytes
from tandem.engine.params import SamplingParams
from tandem.engine.sequence import Sequence
from tandem.engine.speculation_cost import WINDOW
from tandem.errors import DoesNotFitError, RequestError
from tandem.kernels.abi import KV_BLOCK
from tandem.kernels.layout import ChooseLayout
from tandem.model.model import Model


class DraftModel:
    """Proposes the likeliest tokens of a draft model."""

    cost_coefficient = 0.4  # typical of a model with a third of the weights
    acceptance_window = WINDOW

    def __init__(self, engine: Engine, vocab: int) -> None:
        """`vocab`: vocabulary size of the main model."""
        self.engine, self.vocab = engine, vocab
        self._drafts: dict[Sequence, Sequence] = {}  # main sequence -> draft sequence

    def uncached(self, sequence: Sequence) -> int:
        draft = self._drafts.get(sequence)
        return max(0, len(sequence.tokens) - (draft.state.computed if draft else 0))

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        goals = {}  # draft sequence -> number of tokens to reach
        try:
            for sequence, count in wanted:
                if count and (draft := self._begin(sequence, count)):
                    goals[draft] = len(sequence.tokens) + count
            self._run(goals)
        except BaseException:  # else a sequence that is running would be resumed again
            for sequence, _ in wanted:
                self.forget(sequence)
            raise
        drafts = []
        for sequence, count in wanted:
            tokens = self._drafts[sequence].tokens[len(sequence.tokens) :] if sequence in self._drafts else []
            # A draft ends before a token that the main model does not have: padding of the vocabulary.
            drafts.append(list(takewhile(lambda token: token < self.vocab, tokens[:count])))
        return drafts

    def forget(self, sequence: Sequence) -> None:
        if draft := self._drafts.pop(sequence, None):
            self.engine.cancel(draft)

    def _begin(self, sequence: Sequence, count: int) -> Sequence | None:
        """Submits or resumes the draft sequence with the current tokens; None if the draft model cannot take them."""
        tokens, draft = sequence.tokens, self._drafts.get(sequence)
        if len(tokens) + count >= self.engine.context or max(tokens) >= self.engine.model.config.vocab:
            self.forget(sequence)  # too long, or a token that the draft model does not have
            return None
        if draft and self.engine.scheduler.resume(draft, tokens):
            return draft
        self.forget(sequence)
        draft = self.engine.submit(tokens, SamplingParams(max_tokens=self.engine.context, ignore_eos=True))
        # Without a step in flight ahead: it would compute more tokens than wanted.
        draft.state.must_wait_for_token = draft.state.wait_for_token = True
        self._drafts[sequence] = draft
        return draft

    def _run(self, goals: dict[Sequence, int]) -> None:
        """Runs steps until each draft sequence reaches its goal, and pauses it there."""
        scheduler = self.engine.scheduler
        while goals:
            before = [draft.state.computed for draft in goals]
            stuck = not self.engine.step() and before == [draft.state.computed for draft in goals]
            for draft in [draft for draft, goal in goals.items() if len(draft.tokens) >= goal]:
                scheduler.pause(draft)
                del goals[draft]
            if stuck:  # paused sequences hold all KV blocks or all table rows
                self._make_room(goals)

    def _make_room(self, goals: dict[Sequence, int]) -> None:
        """Frees the paused sequences; if there are none, gives up the drafts that wait for memory."""
        pausing = [sequence for sequence, draft in self._drafts.items() if draft not in goals]
        for sequence in pausing or list(self._drafts):
            self.forget(sequence)
        if not pausing:
            goals.clear()


def split_kv_memory(
    model: Model,
    draft: Model,
    kv: str,
    context: int,
    batch: int,
    free: tuple[float, float],
    wanted: float | None,
    choose: ChooseLayout,
) -> tuple[float | None, float]:
    """Splits KV memory between a model and its draft model, so that both hold the same number of tokens.

    With `wanted`: divides these bytes. Otherwise returns None for the model (it takes what is free) and bytes for the
    draft model, which is loaded first and leaves room for one context. `choose`: the device's `weight_layout`."""
    one_context, draft_context = (
        context_bytes(m.config, -(-min(context, m.config.trained_context) // KV_BLOCK), STEP_TOKENS, kv)
        for m in (model, draft)
    )
    both = one_context + draft_context
    if wanted is not None:
        return wanted * one_context / both, wanted * draft_context / both
    weights, draft_weights = model.nbytes(choose), draft.nbytes(choose)
    fast_free, total_free = (nbytes - weights - draft_weights - HEADROOM for nbytes in free)
    if total_free < both:
        raise DoesNotFitError(
            f"the model ({weights / 1e9:.1f} GB), its draft model ({draft_weights / 1e9:.1f} GB) and a context "
            f"of {context} for both ({both / 1e9:.1f} GB) do not fit in the {free[1] / 1e9:.1f} GB that are "
            "free: use no draft model, or a smaller context",
            missing=both - total_free,
        )
    return None, draft_context * max(1.0, min(batch, fast_free * KV_FRACTION / both))


def check_vocabularies(tokens: Items[str], draft: Items[str]) -> None:
    """Refuses a draft model with another vocabulary. Extra tokens at the end are allowed."""
    count = min(len(tokens), len(draft))
    if list(tokens)[:count] != list(draft)[:count]:
        raise RequestError("the draft model has another vocabulary: use one of the same family as the model")

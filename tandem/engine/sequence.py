"""A request as the engine sees it: its tokens, how many of them are computed, and what has been sampled.

A step is scheduled while the one before it runs, so a sequence may be one sampled token ahead of what the host knows.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tandem.engine.kv_cache import BlockTable
from tandem.engine.params import SamplingParams
from tandem.errors import RequestError, TandemError
from tandem.program.step_inputs import EDIT_INTS, Ints

if TYPE_CHECKING:
    from tandem.engine.grammar import Grammar
    from tandem.engine.speculation import RequestAcceptance

_numbers = itertools.count()


class Sampled(NamedTuple):
    """One sampled token."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their log-probabilities


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    tables: list[BlockTable]
    most: int = 2**31  # tokens that may be generated
    tokens: list[int] = field(default_factory=list)  # prompt and generated
    computed: int = 0  # tokens whose keys and values are in the cache, or will be after the steps in flight
    due: int = 0  # its blocks want looking after when so many are computed
    ahead: int = 0  # tokens that steps in flight are sampling
    waits: bool = False  # for them: what comes next depends on what the host does with them
    row: int = -1  # of the results of the last step that sampled it
    entered: int = 0  # how often it was let in
    cached: int = 0  # tokens of the prompt that others had computed
    acceptance: RequestAcceptance | None = None  # of its draft tokens
    grammar: Grammar | None = None  # what its tokens must obey
    keys: list[bytes] = field(default_factory=list)  # of its full KV blocks
    slot: int = -1  # row of the block tables while running
    generated: list[Sampled] = field(default_factory=list)
    scored: list[Sampled] = field(default_factory=list)  # the prompt's from the second on, if asked for
    finish_reason: str | None = None  # "stop", "length", "cancelled", "timeout", "error"
    error: TandemError | None = None
    param_row: Any = None  # the sampling parameters as StepInputs has them, made once
    submitted: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0
    finished: float = 0.0
    number: int = field(default_factory=lambda: next(_numbers))  # first come, first served
    priority: int = field(init=False)
    always_waits: bool = field(init=False)
    deadline: float = field(init=False)
    seed: int = field(init=False)
    ends: frozenset[int] = field(init=False)  # tokens that end it
    counts: bool = field(init=False)  # how often it had each token: penalties want to know
    edits: Ints = field(init=False)
    edited: bool = field(init=False)  # some of its logits are
    _early_edits: Ints = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        self.tokens = list(self.prompt)
        self.priority, self.counts = params.priority, params.uses_history
        self.always_waits = self.waits = bool(self.counts or self.grammar or params.logits_processor)
        self.deadline = self.submitted + (math.inf if params.timeout is None else params.timeout)
        self.most = min(self.most, params.max_tokens)
        self.seed = int.from_bytes(os.urandom(8)) if params.seed is None else int(params.seed) & (2**64 - 1)
        self.ends = frozenset() if params.ignore_eos else self.stop_ids
        self.edits = self._early_edits = _edits(params, self.prompt)
        if params.min_tokens:
            no_end = {**params.logit_bias, **dict.fromkeys(self.stop_ids, -math.inf)}
            self._early_edits = _edits(replace(params, logit_bias=no_end), self.prompt)
        self.edited = self.counts or len(self._early_edits) > 0

    @property
    def pending(self) -> int:
        """Tokens that the next step can compute: also the one that is being sampled, unless its successor depends on
        what only the host does with it, or there will be none."""
        if not self.ahead:
            return len(self.tokens) - self.computed
        if self.waits or len(self.generated) + self.ahead >= self.most:
            return 0
        return len(self.tokens) + self.ahead - self.computed

    def extend(self, drawn: list[Sampled], draft: Items[int]) -> int:
        """Appends what was sampled, up to the first that differs from the draft; returns the accepted draft tokens."""
        self.append(drawn[0])
        accepted = 0
        while accepted < len(draft) and drawn[accepted].id == draft[accepted] and self.finish_reason is None:
            accepted += 1
            self.append(drawn[accepted])
        return accepted

    def append(self, sampled: Sampled) -> None:
        if not self.generated:
            self.first_token = time.perf_counter()
        if self.grammar and not self.grammar.accept(sampled.id):
            self.fail(RequestError(self.grammar.problem))
            return
        self.generated.append(sampled)
        self.tokens.append(sampled.id)
        if self.counts:
            self.edits = _counted(self.edits, sampled.id)
            self._early_edits = _counted(self._early_edits, sampled.id)
        if sampled.id in self.ends or (self.grammar and self.grammar.ended):
            self.finish("stop")
        elif len(self.generated) >= self.most:
            self.finish("length")

    def edits_of(self, draw: int, draft: Items[int] = ()) -> Ints:
        """The edits of the n-th token's logits, after draft tokens before it: no end is taken before min_tokens."""
        edits = self._early_edits if draw < self.params.min_tokens else self.edits
        for token in draft if self.counts else ():
            edits = _counted(edits, token)
        return edits

    def fail(self, error: TandemError) -> None:
        self.error = error
        self.finish("error")

    def finish(self, reason: str) -> None:
        if self.finish_reason is None:
            self.finish_reason = reason
            self.finished = time.perf_counter()


class Chunk:
    """`count` tokens of a sequence from `begin` on; `sampled` if the last of all is among them. `draft_tokens` come on
    top, each with a row of results. The first `scores` tokens have rows for their successors."""

    __slots__ = ("begin", "count", "draft_tokens", "entered", "row", "sampled", "scores", "sequence")

    def __init__(self, sequence: Sequence, begin: int, count: int, sampled: bool) -> None:
        self.sequence, self.begin, self.count, self.sampled = sequence, begin, count, sampled
        self.draft_tokens: Items[int] = ()
        self.scores = 0
        self.entered, self.row = sequence.entered, sequence.row  # as they were when it was scheduled

    @property
    def total(self) -> int:
        return self.count + len(self.draft_tokens)


def _counted(edits: Ints, token: int) -> Ints:
    """The edits after one more use of a token."""
    at = int(np.searchsorted(edits[:, 0], token))
    if at == len(edits) or edits[at, 0] != token:
        edits = np.insert(edits, at, (token, 0, 0, 0), axis=0)
    else:
        edits = edits.copy()
    edits[at, 1] += 1
    return edits


def _edits(params: SamplingParams, prompt: list[int]) -> Ints:
    """Tokens whose logits change, as StepInputs has them: int32 [n, 4] of token, uses so far, bias (float32), 0;
    by token, for the kernel looks them up."""
    used = Counter(prompt) if params.uses_history else Counter[int]()
    tokens = sorted(used.keys() | params.logit_bias.keys())
    edits = np.zeros((len(tokens), EDIT_INTS), np.int32)
    edits[:, 0] = tokens
    edits[:, 1] = [used[token] for token in tokens]
    edits.view(np.float32)[:, 2] = [params.logit_bias.get(token, 0.0) for token in tokens]
    return edits

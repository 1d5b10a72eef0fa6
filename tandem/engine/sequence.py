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
from tandem.kernels.abi import ADJUSTMENT_INTS
from tandem.program.step_inputs import Ints

if TYPE_CHECKING:
    from tandem.engine.speculation import RequestAcceptance
    from tandem.engine.structured_output import Constraint

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
    max_tokens: int = 2**31  # tokens that may be generated
    tokens: list[int] = field(default_factory=list)  # prompt and generated
    computed: int = 0  # tokens whose keys and values are in the cache, or will be after the steps in flight
    maintain_blocks_at: int = 0  # its blocks want looking after when so many are computed
    in_flight_tokens: int = 0  # tokens that steps in flight are sampling
    needs_sampled_token: bool = False  # for them: what comes next depends on what the host does with them
    result_row: int = -1  # of the results of the last step that sampled it
    admissions: int = 0  # how often it was let in
    cached_prompt_tokens: int = 0  # tokens of the prompt that others had computed
    acceptance: RequestAcceptance | None = None  # of its draft tokens
    constraint: Constraint | None = None  # what its tokens must obey
    block_hashes: list[bytes] = field(default_factory=list)  # of its full KV blocks
    table_row: int = -1  # row of the block tables while running
    generated: list[Sampled] = field(default_factory=list)
    prompt_scores: list[Sampled] = field(
        default_factory=list
    )  # the prompt's from the second on, if asked for
    finish_reason: str | None = None  # "stop", "length", "cancelled", "timeout", "error"
    error: TandemError | None = None
    param_row: Any = None  # the sampling parameters as StepInputs has them, made once
    submitted: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0
    finished: float = 0.0
    number: int = field(default_factory=lambda: next(_numbers))  # first come, first served
    priority: int = field(init=False)
    always_needs_sampled_token: bool = field(init=False)
    deadline: float = field(init=False)
    seed: int = field(init=False)
    end_ids: frozenset[int] = field(init=False)  # tokens that end it
    counts_tokens: bool = field(init=False)  # how often it had each token: penalties want to know
    adjustments: Ints = field(init=False)
    adjusted: bool = field(init=False)  # some of its logits are
    _early_adjustments: Ints = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        self.tokens = list(self.prompt)
        self.priority, self.counts_tokens = params.priority, params.uses_history
        self.always_needs_sampled_token = self.needs_sampled_token = bool(
            self.counts_tokens or self.constraint or params.logits_processor
        )
        self.deadline = self.submitted + (math.inf if params.timeout is None else params.timeout)
        self.max_tokens = min(self.max_tokens, params.max_tokens)
        self.seed = int.from_bytes(os.urandom(8)) if params.seed is None else int(params.seed) & (2**64 - 1)
        self.end_ids = frozenset() if params.ignore_eos else self.stop_ids
        self.adjustments = self._early_adjustments = _adjustments(params, self.prompt)
        if params.min_tokens:
            no_end = {**params.logit_bias, **dict.fromkeys(self.stop_ids, -math.inf)}
            self._early_adjustments = _adjustments(replace(params, logit_bias=no_end), self.prompt)
        self.adjusted = self.counts_tokens or len(self._early_adjustments) > 0

    @property
    def pending(self) -> int:
        """Tokens that the next step can compute: also the one that is being sampled, unless its successor depends on
        what only the host does with it, or there will be none."""
        if not self.in_flight_tokens:
            return len(self.tokens) - self.computed
        if self.needs_sampled_token or len(self.generated) + self.in_flight_tokens >= self.max_tokens:
            return 0
        return len(self.tokens) + self.in_flight_tokens - self.computed

    def extend(self, sampled_tokens: list[Sampled], draft: Items[int]) -> int:
        """Appends what was sampled, up to the first that differs from the draft; returns the accepted draft tokens."""
        self.append(sampled_tokens[0])
        accepted = 0
        while (
            accepted < len(draft)
            and sampled_tokens[accepted].id == draft[accepted]
            and self.finish_reason is None
        ):
            accepted += 1
            self.append(sampled_tokens[accepted])
        return accepted

    def append(self, sampled: Sampled) -> None:
        if not self.generated:
            self.first_token = time.perf_counter()
        if self.constraint and not self.constraint.accept(sampled.id):
            self.fail(RequestError(self.constraint.problem))
            return
        self.generated.append(sampled)
        self.tokens.append(sampled.id)
        if self.counts_tokens:
            self.adjustments = _counted(self.adjustments, sampled.id)
            self._early_adjustments = _counted(self._early_adjustments, sampled.id)
        if sampled.id in self.end_ids or (self.constraint and self.constraint.ended):
            self.finish("stop")
        elif len(self.generated) >= self.max_tokens:
            self.finish("length")

    def adjustments_at(self, index: int, draft: Items[int] = ()) -> Ints:
        """The logit adjustments of the n-th generated token, after draft tokens: no stop token before min_tokens."""
        adjustments = self._early_adjustments if index < self.params.min_tokens else self.adjustments
        for token in draft if self.counts_tokens else ():
            adjustments = _counted(adjustments, token)
        return adjustments

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

    __slots__ = ("admissions", "begin", "count", "draft_tokens", "row", "sampled", "scores", "sequence")

    def __init__(self, sequence: Sequence, begin: int, count: int, sampled: bool) -> None:
        self.sequence, self.begin, self.count, self.sampled = sequence, begin, count, sampled
        self.draft_tokens: Items[int] = ()
        self.scores = 0
        self.admissions, self.row = (
            sequence.admissions,
            sequence.result_row,
        )  # as they were when it was scheduled

    @property
    def total(self) -> int:
        return self.count + len(self.draft_tokens)


def _counted(adjustments: Ints, token: int) -> Ints:
    """The adjustments after one more use of a token."""
    at = int(np.searchsorted(adjustments[:, 0], token))
    if at == len(adjustments) or adjustments[at, 0] != token:
        adjustments = np.insert(adjustments, at, (token, 0, 0, 0), axis=0)
    else:
        adjustments = adjustments.copy()
    adjustments[at, 1] += 1
    return adjustments


def _adjustments(params: SamplingParams, prompt: list[int]) -> Ints:
    """Tokens whose logits change, as StepInputs has them: int32 [n, 4] of token, uses so far, bias (float32), 0;
    by token, for the kernel looks them up."""
    used = Counter(prompt) if params.uses_history else Counter[int]()
    tokens = sorted(used.keys() | params.logit_bias.keys())
    adjustments = np.zeros((len(tokens), ADJUSTMENT_INTS), np.int32)
    adjustments[:, 0] = tokens
    adjustments[:, 1] = [used[token] for token in tokens]
    adjustments.view(np.float32)[:, 2] = [params.logit_bias.get(token, 0.0) for token in tokens]
    return adjustments

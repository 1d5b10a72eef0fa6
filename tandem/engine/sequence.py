"""A Sequence is a request inside the engine; a Chunk is the part of it that one step computes.

The owners of each part of a Sequence; nobody else changes it:

    request      Request           nobody: prompt and parameters
    state        SchedulerState    Scheduler: its computed tokens, and whether it runs
    kv           SequenceKV        KVCache and Scheduler: its KV blocks and state slots
    sampling     SamplingState     Batch (result_row, param_row) and Sequence (the counts of penalties)
    acceptance   RequestAcceptance Speculator: the acceptance rate of its draft tokens
    the rest                       Sequence's own methods: its tokens, its constraint, and how it ended

A step is scheduled while the previous one runs, so a sequence may have tokens in flight that the host does not know.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from tandem.engine.images import Image, ImageSpan, text_ids
from tandem.engine.kv_cache import BlockTable, SequenceKV
from tandem.engine.params import SamplingParams
from tandem.engine.sampling import Sampled, SamplingState
from tandem.errors import RequestError, TandemError
from tandem.kernels.states import NO_STATE

if TYPE_CHECKING:
    from tandem.engine.speculation import RequestAcceptance
    from tandem.engine.structured_output import Constraint

_numbers = itertools.count()


class Request:
    """A prompt and its parameters. They never change."""

    __slots__ = (
        "deadline",
        "eos_ids",
        "max_tokens",
        "number",
        "params",
        "priority",
        "prompt",
        "seed",
        "stop_token_ids",
        "submitted",
    )

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        eos_ids: frozenset[int],
        max_tokens: int,
    ) -> None:
        self.prompt, self.params = prompt, params
        self.eos_ids = eos_ids  # end-of-sequence tokens of the model; they have no text
        # Tokens that end the request.
        self.stop_token_ids = frozenset[int]() if params.ignore_eos else eos_ids
        self.max_tokens = min(max_tokens, params.max_tokens)  # tokens to generate
        self.seed = int.from_bytes(os.urandom(8)) if params.seed is None else int(params.seed) & (2**64 - 1)
        self.number = next(_numbers)  # order of arrival
        self.priority = params.priority
        self.submitted = time.perf_counter()
        self.deadline = self.submitted + (math.inf if params.timeout is None else params.timeout)


class SchedulerState:
    """The progress of a sequence."""

    __slots__ = (
        "admissions",
        "cached_prompt_tokens",
        "computed",
        "in_flight_tokens",
        "must_wait_for_token",
        "stateless_prompt_tokens",
        "table_row",
        "wait_for_token",
    )

    def __init__(self, must_wait_for_token: bool, table_row: int) -> None:
        self.computed = 0  # tokens whose keys and values are cached, or will be after the steps in flight
        self.in_flight_tokens = 0  # tokens that steps in flight are sampling
        # Each of its steps depends on the id of the token before (penalties, a constraint, a logits processor), so it
        # is not scheduled while that token is in flight.
        self.must_wait_for_token = must_wait_for_token
        # Its next step waits for the token in flight: always if it must, else while speculation drafts tokens for it.
        self.wait_for_token = must_wait_for_token
        self.table_row = table_row  # its row in the block tables; -1: it is not running
        self.admissions = 0  # times it was admitted: more than 1 after a preemption
        self.cached_prompt_tokens = 0  # prompt tokens that were in the prefix cache at its first admission
        # Prompt tokens after them that had cached KV blocks, but no checkpoint of recurrent layers: computed again.
        self.stateless_prompt_tokens = 0


class Sequence:
    __slots__ = (
        "__weakref__",
        "acceptance",
        "constraint",
        "error",
        "finish_reason",
        "finished",
        "first_token",
        "generated",
        "images",
        "images_end",
        "kv",
        "prompt_scores",
        "request",
        "sampling",
        "shift",
        "state",
        "tokens",
    )

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        eos_ids: frozenset[int],
        tables: list[BlockTable],
        max_tokens: int = 2**31,
        *,
        constraint: Constraint | None = None,
        table_row: int = -1,
        images: Items[ImageSpan] = (),
    ) -> None:
        """`max_tokens`: number of output tokens that the context has room for."""
        self.request = request = Request(prompt, params, eos_ids, max_tokens)
        self.sampling = SamplingState(
            params, text_ids(prompt, images), eos_ids, request.seed, constraint is not None, len(prompt)
        )
        waits = self.sampling.counts_tokens or constraint is not None or params.logits_processor is not None
        self.state = SchedulerState(waits, table_row)
        self.kv = SequenceKV(tables)
        self.constraint = constraint  # for structured output; advances with each token
        self.acceptance: RequestAcceptance | None = None
        self.tokens = list(prompt)  # prompt and output
        self.images = images  # of the prompt, in order
        self.images_end = images[-1].end if images else 0  # no token from here on is of an image
        # Added to the index of such a token it is its position, where positions have sections (images.py).
        self.shift = sum(max(span.image.grid) - span.image.tokens for span in images)
        self.generated: list[Sampled] = []
        self.prompt_scores: list[Sampled] = []  # of prompt tokens from the second on, if requested
        self.finish_reason: str | None = None  # "stop", "length", "cancelled", "timeout", "error"
        self.error: TandemError | None = None
        self.first_token = self.finished = 0.0  # times

    @property
    def next_image(self) -> Image | None:
        """The first image without embeddings: the sequence cannot run before it has them all."""
        return next((span.image for span in self.images if span.image.embeddings is None), None)

    def append(self, sampled: Sampled) -> None:
        """Appends a token, and ends the request if it was the last."""
        request, constraint = self.request, self.constraint
        if not self.generated:
            self.first_token = time.perf_counter()
        if constraint and not constraint.accept(sampled.id):
            self.fail(RequestError(constraint.problem))
            return
        self.generated.append(sampled)
        self.tokens.append(sampled.id)
        if self.sampling.counts_tokens:
            self.sampling.count(sampled.id)
        if sampled.id in request.stop_token_ids or (constraint and constraint.ended):
            self.finish("stop")
        elif len(self.generated) >= request.max_tokens:
            self.finish("length")

    def score_prompt(self, begin: int, scores: list[Sampled]) -> None:
        """Sets the log-probabilities of the prompt tokens after `begin`."""
        self.prompt_scores[begin:] = scores

    def restart(self, tokens: list[int]) -> None:
        """Replaces the tokens, as if all of them were a prompt."""
        self.tokens[:] = tokens
        self.generated.clear()

    def stop_after(self, count: int) -> None:
        """Ends the output after `count` tokens, and drops tokens sampled after them: a stop string was found."""
        self.finish("stop")
        self.finish_reason = "stop"
        del self.generated[count:]

    def fail(self, error: TandemError) -> None:
        self.error = error
        self.finish("error")

    def finish(self, reason: str) -> None:
        if self.finish_reason is None:
            self.finish_reason = reason
            self.finished = time.perf_counter()


class Chunk:
    """The tokens of one sequence in one step: `count` tokens from `begin` on.

    `samples_next`: the last of them is the sequence's last token, so the step samples the next one.
    `draft_tokens`: computed after them; each has a row of results.
    `scores`: number of prompt tokens, the first ones, with a row that scores the next token.
    `source`: the state slot that recurrent layers read. `targets`: (token of the chunk, state slot that they write)."""

    __slots__ = (
        "admissions",
        "begin",
        "count",
        "draft_tokens",
        "result_row",
        "samples_next",
        "scores",
        "sequence",
        "source",
        "targets",
    )

    def __init__(self, sequence: Sequence, begin: int, count: int, samples_next: bool) -> None:
        self.sequence, self.begin, self.count = sequence, begin, count
        self.samples_next = samples_next
        self.draft_tokens: Items[int] = ()
        self.scores = 0
        self.source = NO_STATE
        self.targets: Items[tuple[int, int]] = ()  # none: the model has no recurrent layers
        self.admissions = sequence.state.admissions  # differs later if the sequence was preempted
        self.result_row = sequence.sampling.result_row  # in the previous step

    @property
    def total(self) -> int:
        return self.count + len(self.draft_tokens)

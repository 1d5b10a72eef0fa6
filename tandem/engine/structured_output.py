"""Answers of a given form: JSON of a schema, a regular expression, a Lark grammar, or one of some texts.

llguidance says which tokens may come next; the sampler draws among those. A sequence with a grammar waits for its
token, since the next mask depends on it; masks are made while the device runs the others' step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.engine.params import SamplingParams
from tandem.errors import RequestError
from tandem.program.step_inputs import Ints

if TYPE_CHECKING:
    from tandem.model.tokenizer import Tokenizer


# What llguidance may do for one token: 6,000 items are within a few milliseconds where a text has few readings, and as
# many as JSON with the most optional properties takes. By its own limit a form of many readings may take half a second.
MAX_ITEMS = 6000
MAX_OPTIONAL = 495  # properties of an object: with more, a row of its parser is too long


class Constraint:
    """Where a sequence is in its grammar. One that meets llguidance's limits stays where it is, and says so."""

    problem = (
        "logit_bias bans every token that the output constraint allows: ban fewer"  # if one is not accepted
    )

    def __init__(self, matcher: Any, vocab: int, ends: frozenset[int]) -> None:
        self._matcher, self._ends = matcher, ends
        self.mask = np.zeros(-(-vocab // 32), np.int32)  # the last one

    def write_masks(self, rows: Ints, draft: Sequence[int] = ()) -> None:
        """A bit for each token that may come next, and a row more after each draft token; the draft is `possible`."""
        for i in range(1 + len(draft)):
            if i and not self._matcher.consume_token(draft[i - 1]):
                return  # a limit was met: nothing will be accepted
            if self._matcher.is_stopped():  # what would come after the end is dropped
                break
            self._matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
            rows[i, : len(self.mask)] = self.mask
        if i:
            self._matcher.rollback(i)

    def forced(self) -> list[int]:
        """Tokens of the only text that may come next, up to where there is a choice."""
        return list(self._matcher.compute_ff_tokens())

    def possible(self, draft: list[int]) -> list[int]:
        """The draft up to the first token that may not come; nothing that may be the end, for no row follows it."""
        allowed = self._matcher.validate_tokens(draft)
        ends = (i for i, token in enumerate(draft[:allowed]) if token in self._ends)
        return draft[: next(ends, allowed)]

    def accept(self, token: int) -> bool:
        """False if it may not come: `problem` says why."""
        matcher = self._matcher
        if not matcher.is_error() and matcher.validate_tokens([token]) and matcher.consume_token(token):
            return True
        if matcher.is_error():  # it met a limit, now or with the last mask, which then had the end alone
            self.problem = f"the output constraint is too complex: {_first_line(matcher.get_error())}"
        return False

    @property
    def ended(self) -> bool:
        """Nothing may come any more."""
        return bool(self._matcher.is_stopped())


class ConstraintCompiler:
    """Makes grammars for a vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """`vocab`: of the model, which may have more tokens than its tokenizer."""
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError:
            raise RequestError("structured output needs the package llguidance: install it") from None
        words = TokenizerWrapper(_Vocabulary(tokenizer))
        self._tokenizer = LLTokenizer(words, n_vocab=vocab, eos_token=sorted(tokenizer.stop_ids))
        self._vocab, self._ends = vocab, tokenizer.stop_ids

    def compile(self, params: SamplingParams) -> Constraint:
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = _grammar_text(LLMatcher, params)
            limits = LLParserLimits(step_max_items=MAX_ITEMS)
            matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        except (ValueError, TypeError, RecursionError) as error:
            raise _refused(params, str(error)) from None
        constraint = Constraint(matcher, self._vocab, self._ends)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(
                constraint.mask.ctypes.data, constraint.mask.nbytes
            )  # meets limits early
        if matcher.is_error():
            raise _refused(params, matcher.get_error())
        return constraint


class _Vocabulary:
    """A tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self.eos_token_id, self.bos_token_id = min(tokenizer.stop_ids, default=0), tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(id) for id in ids]
        self.special_token_ids = [id for id in ids if tokenizer.is_hidden(id)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text, bos=False, continues=True)


def _grammar_text(matcher: Any, params: SamplingParams) -> str:
    if params.json_schema is not None:
        schema = params.json_schema
        text = schema if isinstance(schema, str) else json.dumps(schema)
        _check_optional(json.loads(text))
        return str(matcher.grammar_from_json_schema(text))
    if params.regex is not None:
        return str(matcher.grammar_from_regex(params.regex))
    if params.choices:
        texts = " | ".join(map(json.dumps, params.choices))  # one terminal: thousands of rules are too many
        return str(matcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}"))
    return str(matcher.grammar_from_lark(params.grammar))


def _check_optional(schema: Any) -> None:
    """Refuses what would fail only when an answer comes to it."""
    parts = [schema]
    while parts:
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
        properties = part.get("properties") if isinstance(part, dict) else None
        if not isinstance(properties, dict):
            continue
        required = part.get("required")
        optional = len(properties.keys() - set(map(str, required if isinstance(required, list) else ())))
        if optional > MAX_OPTIONAL:
            raise ValueError(
                f"an object has {optional} optional properties and may have {MAX_OPTIONAL}: require some, or split it"
            )


def _refused(params: SamplingParams, reason: str) -> RequestError:
    return RequestError(f"{params.constraint} cannot be used: {_first_line(reason)}")


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")

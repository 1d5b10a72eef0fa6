"""Structured output (constrained decoding): JSON of a schema, a regular expression, a Lark grammar, or a choice.

llguidance computes a mask of the tokens that may come next; the sampler chooses no other token. The next mask depends
on the sampled token, so a constrained sequence is scheduled only when its token is known. Its mask is computed while
the device runs a step of the other sequences.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.devices.host_memory import require_memory
from tandem.engine.params import SamplingParams
from tandem.errors import OutOfMemoryError, RequestError
from tandem.program.step_inputs import Ints

if TYPE_CHECKING:
    from tandem.model.tokenizer import Tokenizer


# Parser items that llguidance may create for one token. 6,000 take a few milliseconds, and are enough for JSON with
# MAX_OPTIONAL properties. With llguidance's own limit an ambiguous grammar may take half a second per token.
MAX_ITEMS = 6000
# Memory that must be free for llguidance, which ends the process if there is none: for each token, for a constraint.
VOCABULARY_BYTES, COMPILE_BYTES = 512, 16 << 20
# Steps of the lexer: for the grammar, and for one token. As many take tens of milliseconds at most.
GRAMMAR_FUEL, TOKEN_FUEL = 200_000, 20_000
MAX_STATES = 20_000  # of the lexer, with 1 to 2 KB each
MAX_SOURCE = 128 << 10  # bytes of a constraint: its compilation takes more than linear time
MAX_SIMPLE = 4 << 10  # bytes of a constraint without check: it takes a few milliseconds
SIMPLE_KEYWORDS = {"type", "properties", "required", "items", "additionalProperties", "enum", "const"} | {
    "title",
    "description",
}
MAX_COMPILED = 8  # compiled constraints that are kept, for requests with the same one
MAX_OPTIONAL = 495  # optional properties of an object: with more, a row of the parser is too long


class Constraint:
    """The position of one sequence in its grammar."""

    problem = "logit_bias bans every token that the output constraint allows: ban fewer"  # why `accept` refused a token

    def __init__(self, matcher: Any, vocab: int, eos_ids: frozenset[int]) -> None:
        self._matcher, self._eos_ids = matcher, eos_ids
        self.mask = np.zeros(-(-vocab // 32), np.int32)  # the last mask, a bit per token

    def write_masks(self, rows: Ints, draft: Sequence[int] = ()) -> None:
        """Writes a mask of the tokens that may come next, and one more after each draft token. All draft tokens are
        allowed (`allowed_prefix`)."""
        for i in range(1 + len(draft)):
            if i and not self._matcher.consume_token(draft[i - 1]):
                return  # a limit was exceeded: `accept` will refuse any token
            if self._matcher.is_stopped():  # tokens after the end are dropped
                break
            self._matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
            rows[i, : len(self.mask)] = self.mask
        if i:
            self._matcher.rollback(i)

    def forced_tokens(self) -> list[int]:
        """Returns the tokens that must come next, up to the first position with a choice."""
        return list(self._matcher.compute_ff_tokens())

    def allowed_prefix(self, draft: list[int]) -> list[int]:
        """Returns the draft up to the first token that is not allowed or is a stop token: no row may follow it."""
        allowed = self._matcher.validate_tokens(draft)
        ends = (i for i, token in enumerate(draft[:allowed]) if token in self._eos_ids)
        return draft[: next(ends, allowed)]

    def accept(self, token: int) -> bool:
        """Advances by a sampled token. Returns False if it is not allowed: `problem` says why."""
        matcher = self._matcher
        if not matcher.is_error() and matcher.validate_tokens([token]) and matcher.consume_token(token):
            return True
        # A limit was exceeded, now or at the last mask, which then allowed only the end.
        if matcher.is_error():
            self.problem = f"the output constraint is too complex: {_first_line(matcher.get_error())}"
        return False

    @property
    def ended(self) -> bool:
        """The output is complete: no token may come next."""
        return bool(self._matcher.is_stopped())


class ConstraintCompiler:
    """Compiles constraints for a vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """`vocab`: the model's vocabulary size, which may be larger than the tokenizer's."""
        llguidance = _import_llguidance()
        require_memory(VOCABULARY_BYTES * vocab)
        words = llguidance.TokenizerWrapper(_Vocabulary(tokenizer))
        self._tokenizer = llguidance.LLTokenizer(words, n_vocab=vocab, eos_token=sorted(tokenizer.eos_ids))
        self._vocab, self._eos_ids = vocab, tokenizer.eos_ids
        self._compiled: dict[str, Any] = {}  # grammar -> matcher; the oldest is forgotten first
        self._lock = threading.Lock()

    def compile(self, params: SamplingParams) -> Constraint:
        require_memory(COMPILE_BYTES)
        grammar = grammar_text(params)
        with self._lock:
            matcher = self._compiled.pop(grammar, None)
            if matcher is None:
                matcher = self._new_matcher(grammar, params)
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_COMPILED:
                del self._compiled[next(iter(self._compiled))]
            return Constraint(matcher.deep_copy(), self._vocab, self._eos_ids)

    def _new_matcher(self, grammar: str, params: SamplingParams) -> Any:
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        except (ValueError, TypeError) as error:
            raise _refused(params, str(error)) from None
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask already exceeds the limits of a grammar that is too complex
        if matcher.is_error():
            raise _refused(params, matcher.get_error())
        return matcher


class _Vocabulary:
    """The interface of a tokenizer that llguidance expects."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self.eos_token_id, self.bos_token_id = min(tokenizer.eos_ids, default=0), tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(id) for id in ids]
        self.special_token_ids = [id for id in ids if tokenizer.is_hidden(id)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text, bos=False, continues=True)


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise RequestError("structured output needs the package llguidance: install it") from None
    except ImportError as error:  # it is there, and its library cannot be mapped
        raise OutOfMemoryError from error
    return llguidance


def parser_limits() -> Any:
    """The limits of a constraint's compilation, and of its masks."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_max_items=MAX_ITEMS,
        initial_lexer_fuel=GRAMMAR_FUEL,
        step_lexer_fuel=TOKEN_FUEL,
        max_lexer_states=MAX_STATES,
    )


def grammar_text(params: SamplingParams) -> str:
    """The constraint of a request as a grammar of llguidance."""
    llguidance = _import_llguidance()
    given = next(
        (one for one in (params.json_schema, params.regex, params.grammar) if isinstance(one, str)), ""
    )
    if len(given) > MAX_SOURCE:  # before it is parsed
        raise _refused(params, f"it has {len(given)} characters: give {MAX_SOURCE} at most")
    try:
        text = _grammar_text(llguidance.LLMatcher, params)
        size = len(text.encode())
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused(params, str(error)) from None
    if size > MAX_SOURCE:
        raise _refused(params, f"it has {size} bytes: give {MAX_SOURCE} at most")
    return text


def is_simple(params: SamplingParams) -> bool:
    """Whether a constraint has only what compiles in milliseconds: a few choices, or a small schema of plain types."""
    if len(json.dumps(params.choices or params.json_schema)) > MAX_SIMPLE:
        return False
    if params.choices or not isinstance(params.json_schema, dict):
        return bool(params.choices)
    parts: list[Any] = [params.json_schema]
    while parts:
        part = parts.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict) or not part.keys() <= SIMPLE_KEYWORDS:
            return False
        properties = part.get("properties", {})
        parts += properties.values() if isinstance(properties, dict) else [properties]
        parts += (part[name] for name in ("items", "additionalProperties") if name in part)
    return True


def _grammar_text(matcher: Any, params: SamplingParams) -> str:
    if params.json_schema is not None:
        schema = params.json_schema
        text = schema if isinstance(schema, str) else json.dumps(schema)
        _check_optional(json.loads(text))
        return str(matcher.grammar_from_json_schema(text))
    if params.regex is not None:
        return str(matcher.grammar_from_regex(params.regex))
    if params.choices:
        texts = " | ".join(map(json.dumps, params.choices))  # one terminal, since thousands of rules are slow
        return str(matcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}"))
    return str(matcher.grammar_from_lark(_as_lark(params.grammar or "")))


def _as_lark(grammar: str) -> str:
    """A grammar in Lark's syntax; llama.cpp's GBNF, which defines rules with `::=`, is translated."""
    if "::=" not in grammar or len(grammar) > MAX_SOURCE:
        return grammar
    from llguidance.gbnf_to_lark import GrammarParser, resolve

    try:
        rules = _bottom_up(GrammarParser().parse(grammar))
        resolve(rules)
        return "%llguidance {}\n" + "".join(f"{rule}\n" for rule in rules.values())
    except Exception as error:  # it raises several types; for a rule that is missing, an Exception
        raise ValueError(f"the GBNF cannot be read: {error}") from None


def _bottom_up(rules: dict[str, Any]) -> dict[str, Any]:
    """Puts each rule behind those that it names. `resolve` goes through all rules until nothing changes: of a chain of
    4,000 in the other order, once for each of them, for seconds."""
    ordered: dict[str, Any] = {}
    stack, entered = list(rules), set[str]()
    while stack:
        name = stack[-1]
        if name not in entered and name in rules:
            entered.add(name)
            stack += _named_rules(rules[name]) - entered
        else:
            stack.pop()
            if name in rules:
                ordered[name] = rules[name]
    return ordered


def _named_rules(rule: Any) -> set[str]:
    names, parts = set[str](), [rule]
    while parts:
        part = parts.pop()
        if hasattr(part, "target"):  # a reference
            names.add(part.name)
        parts += part.children()
    return names


def _check_optional(schema: Any) -> None:
    """Refuses a schema that the parser would refuse only in the middle of an output."""
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

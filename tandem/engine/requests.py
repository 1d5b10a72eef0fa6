"""A request's life: from a prompt, checked and queued, through steps that are everybody's, to the result or its end."""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tandem.engine.engine import Engine
from tandem.engine.params import SamplingParams
from tandem.engine.reply import Reply, Result, Token
from tandem.errors import RequestError
from tandem.interrupts import deferred

if TYPE_CHECKING:
    from tandem.engine.structured_output import Constraint, ConstraintCompiler
    from tandem.model.chat_template import ChatTemplate
    from tandem.model.tokenizer import Tokenizer

NOT_A_PROMPT = (
    "a prompt is a text or a list of token ids; a conversation, for chat and stream, is a list of messages"
)
MAX_COMPLETIONS = 128  # to one prompt
Message = Mapping[str, Any]


class Requests:
    """Several threads may have requests: whoever waits for a token makes the next step, for all of them."""

    engine: Engine
    tokenizer: Tokenizer
    _template: ChatTemplate | None

    def __init__(self) -> None:
        self.lock = threading.Lock()  # of the engine
        self._left: deque[Reply] = deque()  # nobody reads these any more
        self._constraints: ConstraintCompiler | None = None

    def prepare(self, prompt: str | list[int] | Iterable[Message], **params: Any) -> Reply:
        """A request that has been checked but is not queued yet."""
        items = as_items(prompt)
        is_chat = bool(items) and isinstance(items[0], Mapping)
        return self._prepare(self.chat_ids(items) if is_chat else self._ids(items), params)

    def chat_ids(self, messages: Iterable[Message], **template: Any) -> list[int]:
        """The token ids of a conversation, up to where the model's answer begins."""
        from tandem.model.chat_template import ChatTemplate

        if self._template is None:
            self._template = ChatTemplate.from_gguf(self.engine.model.gguf, self.tokenizer)
        messages = as_items(messages)
        if not all(isinstance(message, Mapping) for message in messages):
            raise RequestError('a conversation is a list of messages: [{"role": "user", "content": "..."}]')
        text = self._template.render([dict(message) for message in messages], **template)
        return self.tokenizer.encode(text, special=True)

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty: give at least one character")
            return self.tokenizer.encode(prompt)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise RequestError(NOT_A_PROMPT) from None

    def _copies(self, ids: list[int], params: dict[str, Any], n: int | None) -> list[Reply]:
        """`n` requests for the same, or one; a seed is the first one's, and the others count on from it."""
        if n is not None and not (isinstance(n, int) and 1 <= n <= MAX_COMPLETIONS):
            raise RequestError(f"n={n!r}: give a number of answers, 1 to {MAX_COMPLETIONS}")
        first = self._prepare(ids, params)
        seed = first.sequence.params.seed
        seeds = [{} if seed is None else {"seed": seed + i} for i in range(1, n or 1)]
        return [first, *(self._prepare(ids, params | own) for own in seeds)]

    def _prepare(self, ids: list[int], params: dict[str, Any]) -> Reply:
        known = {f.name for f in dataclasses.fields(SamplingParams)}
        unknown = params.keys() - known
        if unknown:
            raise RequestError(
                f"unknown parameter {sorted(unknown)[0]!r}; there is: {', '.join(sorted(known))}"
            )
        wanted = SamplingParams(**params)
        constraint = self._compile(wanted) if wanted.constraint else None
        sequence = self.engine.prepare(ids, wanted, self.tokenizer.stop_ids, constraint)
        return Reply(sequence, self.tokenizer)

    def _compile(self, params: SamplingParams) -> Constraint:
        from tandem.engine.structured_output import ConstraintCompiler

        if self._constraints is None:
            self._constraints = ConstraintCompiler(self.tokenizer, self.engine.model.config.vocab)
        return self._constraints.compile(params)

    def _stream(self, reply: Reply) -> Iterator[Token]:
        try:
            self._enqueue([reply])  # here and not before: a stream nobody reads takes no place in the queue
            while not reply.done:
                yield from self._advance([reply])
            reply.check()
        finally:
            self._cancel([reply])

    def _run(self, replies: list[Reply]) -> list[Result]:
        try:
            self._enqueue(replies)
            while unfinished := [reply for reply in replies if not reply.done]:
                self._advance(unfinished)
        finally:
            self._cancel(replies)
        return [reply.result() for reply in replies]

    def _enqueue(self, replies: list[Reply]) -> None:
        with self.lock:
            for reply in replies:
                self.engine.enqueue(reply.sequence)

    def _cancel(self, replies: list[Reply]) -> None:
        """What was left before its end: now, or before the next step. A stream may be collected as garbage anywhere,
        also in a thread that has the lock, which must not wait for itself."""
        unfinished = [
            each for each in replies if each.sequence.finish_reason is None or each.sequence.table_row >= 0
        ]
        self._left.extend(unfinished)  # also one that an interrupt kept from being put away
        if self.lock.acquire(blocking=False):
            try:
                with deferred():
                    self.cancel_left()
            finally:
                self.lock.release()

    def cancel_left(self) -> None:
        """Ends the requests that nobody reads any more; the caller has the lock."""
        while self._left:
            self.engine.cancel(self._left.popleft().sequence)

    def _advance(self, replies: list[Reply]) -> list[Token]:
        """What is new of these replies, after a step if nothing is.

        A step serves every request, so a reply that was not read meanwhile has several new tokens."""
        with self.lock, deferred():
            for reply in replies:
                if reply.has_new_tokens:
                    break
            else:
                self.cancel_left()
                self.engine.step()
            tokens: list[Token] = []
            for reply in replies:
                tokens += self.take(reply)
            return tokens

    def take(self, reply: Reply) -> list[Token]:
        """What is new of a reply; the caller has the lock."""
        tokens = []
        while reply.has_new_tokens:
            tokens.append(reply.next())
        if reply.text.stopped:
            self.engine.cancel(reply.sequence)
        return tokens


def as_items(prompt: Any) -> Any:
    """A text as it is; anything else as a list."""
    if isinstance(prompt, str):
        return prompt
    try:
        return list(prompt)
    except TypeError:
        raise RequestError(NOT_A_PROMPT) from None

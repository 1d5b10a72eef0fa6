"""From a prompt and parameters to a checked request: chat template, tokenizer, output constraint, limits."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

from tandem.engine.engine import Engine
from tandem.engine.output import OutputReader
from tandem.engine.params import SamplingParams
from tandem.errors import RequestError

if TYPE_CHECKING:
    from tandem.engine.structured_output import Constraint, ConstraintCompiler
    from tandem.model.chat_template import ChatTemplate
    from tandem.model.tokenizer import Tokenizer

NOT_A_PROMPT = (
    "a prompt is a text or a list of token ids; a conversation, for chat and stream, is a list of messages"
)
MAX_COMPLETIONS = 128  # completions of one prompt
Message = Mapping[str, Any]


class InputProcessor:
    def __init__(self, engine: Engine, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.engine, self.tokenizer, self._template = engine, tokenizer, template
        self._compiler: ConstraintCompiler | None = None

    def process(self, prompt: str | list[int] | Iterable[Message], **params: Any) -> OutputReader:
        """Checks a request. It is not queued yet."""
        items = as_items(prompt)
        is_chat = bool(items) and isinstance(items[0], Mapping)
        return self._new_output(self.chat_ids(items) if is_chat else self.token_ids(items), params)

    def process_copies(self, ids: list[int], params: dict[str, Any], n: int | None) -> list[OutputReader]:
        """Checks `n` requests (None: one) with the same prompt; request i has seed + i."""
        if n is not None and not (isinstance(n, int) and 1 <= n <= MAX_COMPLETIONS):
            raise RequestError(f"n={n!r}: give a number of answers, 1 to {MAX_COMPLETIONS}")
        first = self._new_output(ids, params)
        seed = first.sequence.request.params.seed
        seeds = [{} if seed is None else {"seed": seed + i} for i in range(1, n or 1)]
        return [first, *(self._new_output(ids, params | own) for own in seeds)]

    def chat_ids(
        self, messages: Iterable[Message], limit: int | None = None, /, **template: Any
    ) -> list[int]:
        """Returns the token ids of a conversation, up to the beginning of the model's response. `limit`: as in
        Tokenizer.encode."""
        from tandem.model.chat_template import ChatTemplate

        if self._template is None:
            self._template = ChatTemplate.from_gguf(self.engine.model.gguf, self.tokenizer)
        messages = as_items(messages)
        if not all(isinstance(message, Mapping) for message in messages):
            raise RequestError('a conversation is a list of messages: [{"role": "user", "content": "..."}]')
        text = self._template.render([dict(message) for message in messages], **template)
        return self.tokenizer.encode(text, special=True, limit=limit)

    def token_ids(self, prompt: Any) -> list[int]:
        """Returns the token ids of a text; token ids in any kind of sequence become a list of int."""
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty: give at least one character")
            return self.tokenizer.encode(prompt)
        tokens = as_items(prompt)
        try:
            if bool in map(type, tokens):
                raise TypeError
            return [operator.index(token) for token in tokens]
        except TypeError:
            raise RequestError(NOT_A_PROMPT) from None

    def _new_output(self, ids: list[int], params: dict[str, Any]) -> OutputReader:
        known = {f.name for f in dataclasses.fields(SamplingParams)}
        unknown = params.keys() - known
        if unknown:
            raise RequestError(
                f"unknown parameter {sorted(unknown)[0]!r}; there is: {', '.join(sorted(known))}"
            )
        wanted = SamplingParams(**params)
        constraint = self._compile(wanted) if wanted.constraint else None
        sequence = self.engine.new_sequence(ids, wanted, self.tokenizer.eos_ids, constraint)
        return OutputReader(sequence, self.tokenizer)

    def _compile(self, params: SamplingParams) -> Constraint:
        from tandem.engine.structured_output import ConstraintCompiler

        if self._compiler is None:
            self._compiler = ConstraintCompiler(self.tokenizer, self.engine.model.config.vocab)
        return self._compiler.compile(params)


def as_items(prompt: Any) -> Any:
    """Returns a text unchanged, and anything else as a list."""
    if isinstance(prompt, str):
        return prompt
    try:
        items = list(prompt)
    except TypeError:
        items = None
    # The types can be iterated too, but not over prompts, token ids or messages.
    if items is None or isinstance(prompt, bytes | bytearray | memoryview | Mapping | Set):
        raise RequestError(NOT_A_PROMPT)
    return items

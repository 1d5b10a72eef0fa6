"""From a prompt and parameters to a checked request: chat template, tokenizer, output constraint, limits."""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tandem.engine.engine import Engine
from tandem.engine.images import PLACEHOLDER, Image, ImageParts, ImageSpan, PromptIds, images_in
from tandem.engine.output import OutputReader
from tandem.engine.params import SamplingParams, TextTokens
from tandem.errors import ContextError, RequestError, TemplateError
from tandem.model.image_file import MAX_IMAGES, read_image

if TYPE_CHECKING:
    from tandem.engine.structured_output import Constraint, ConstraintCompiler
    from tandem.model.chat_template import ChatTemplate
    from tandem.model.tokenizer import Tokenizer
    from tandem.model.vision import VisionModel

NOT_A_PROMPT = (
    "a prompt is a text or a list of token ids; a conversation, for chat and stream, is a list of messages"
)
MAX_COMPLETIONS = 128  # completions of one prompt
Message = Mapping[str, Any]


class InputProcessor:
    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, template: ChatTemplate | None, no_vision: str = ""
    ) -> None:
        """`no_vision`: why the vision encoder beside the model is not used, if so."""
        self.engine, self.tokenizer, self._template = engine, tokenizer, template
        self._no_vision = no_vision
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

        self.engine.check_generates()
        given = as_items(messages)
        if not all(isinstance(message, Mapping) for message in given):
            raise RequestError('a conversation is a list of messages: [{"role": "user", "content": "..."}]')
        chat = [dict(message) for message in given]
        sources = [part.get("image") for message in chat for part in _parts(message) if _is_image(part)]
        vision = self.vision(len(sources)) if sources else None
        if self._template is None:
            self._template = ChatTemplate.from_gguf(self.engine.model.gguf, self.tokenizer)
        if vision is None:
            return self.tokenizer.encode(self._template.render(chat, **template), special=True, limit=limit)
        texts = _cut_at_images(self._template, chat, template, vision.encoder, len(sources))
        ids, spans, text = PromptIds(), list[ImageSpan](), texts[0]
        for source, after in zip(sources, texts[1:], strict=True):
            read = source if isinstance(source, ImageParts) else vision.parts(read_image(source))
            for part in read:
                if isinstance(part, str):
                    text += part
                    continue
                ids += self._text_ids(text, limit, first=not ids)
                c = vision.config
                image = Image(
                    part, c.tokens(part), is_whole=self.engine.model.config.whole_images, grid=c.grid(part)
                )
                text = ""
                spans.append(ImageSpan(len(ids), image))
                ids += [PLACEHOLDER] * image.tokens
                if limit is not None and len(ids) > limit:
                    return ids
            text += after
        ids += self._text_ids(text, limit, first=False)
        ids.images = spans
        return ids

    def _text_ids(self, text: str, limit: int | None, *, first: bool) -> list[int]:
        follows = {} if first else {"bos": False, "continues": True}
        return self.tokenizer.encode(text, special=True, limit=limit, **follows)

    def vision(self, images: int) -> VisionModel:
        """The encoder of a prompt with `images` images."""
        if self.engine.encoder is None:
            why = self._no_vision or "fetch its mmproj file with `tandem pull`, or name it with --mmproj"
            raise RequestError(f"this model was loaded without a vision encoder, which reads images: {why}")
        if images > MAX_IMAGES:
            raise RequestError(f"the prompt has more than {MAX_IMAGES} images: give fewer")
        return self.engine.encoder.model

    def token_ids(self, prompt: Any, limit: int | None = None) -> list[int]:
        """Returns the token ids of a text; token ids in any kind of sequence become a list of int. `limit`: as in
        Tokenizer.encode."""
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty: give at least one character")
            return self.tokenizer.encode(prompt, limit=limit)
        tokens = as_items(prompt)
        try:
            if bool in map(type, tokens):
                raise TypeError
            ids = [operator.index(token) for token in tokens]
            if images := images_in(prompt):
                ids = PromptIds(ids)
                ids.images = images
            return ids
        except TypeError:
            raise RequestError(NOT_A_PROMPT) from None

    def short_ids(self, ids: list[int], truncate: bool) -> list[int]:
        """Returns the tokens of a text that is embedded or ranked; with `truncate`, those that fit into the context:
        the last one ends the text."""
        context = self.engine.context
        if len(ids) > context and not truncate:
            raise ContextError(
                f"the text has {len(ids)} or more tokens and the context holds {context}: shorten it, truncate it, or "
                "load the model with a larger context",
                len(ids),
                context,
            )
        return ids if len(ids) <= context else [*ids[: context - 1], ids[-1]]

    def prompted_pairs(
        self, query: str, documents: Iterable[str], template: str, truncate: bool
    ) -> Iterator[TextTokens]:
        """A query and each document as a prompt that asks for a judgement; the end of a long document may be cut. It
        has the tokens of the template only: no BOS or EOS, as in llama.cpp."""
        before, _, after = template.partition("{document}")
        head, tail = before.replace("{query}", query), after.replace("{query}", query)
        encode = partial(self.tokenizer.encode, special=True, bos=False)
        last = encode(tail, limit=self.engine.context)
        limit = self.engine.context - len(last)
        if limit < 1 or len(encode(head, limit=limit)) >= limit:
            raise ContextError(
                f"the query has more tokens than the context of {self.engine.context} holds: shorten it"
            )
        for document in documents:
            ids = encode(head + document, limit=limit)
            yield TextTokens(self.short_ids([*(ids[:limit] if truncate else ids), *last], truncate=False))

    def pairs(self, query: str, documents: Iterable[str], truncate: bool) -> Iterator[TextTokens]:
        """[CLS] query [SEP] document [SEP], or <s> query </s></s> document </s>, for each document. The query is
        tokenized once: a long one may have few tokens."""
        limit, last = self.engine.context, self.tokenizer.eos_id
        first = self.tokenizer.encode(query, limit=limit)
        if len(first) >= limit:
            raise ContextError(
                f"the query has {len(first)} or more tokens, and the context holds {limit}: shorten it"
            )
        ends = [] if last is None else [last]
        first += ends * self.tokenizer.ends_twice
        for document in documents:
            ids = self.tokenizer.encode(document, bos=False, limit=limit)
            yield TextTokens(self.short_ids([*first, *ids, *ends], truncate), len(first))

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


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def _cut_at_images(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    encoder: ModuleType,
    images: int,
) -> list[str]:
    """The conversation as text, cut where the template writes an image; or, if it knows none, where the parts of a
    message have one."""
    # A user may write what stands for an image: something that nobody can write stands for that meanwhile.
    mark, written = encoder.MARK, f"\x02{os.urandom(8).hex()}\x03"

    def escaped(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(mark, written)
        if isinstance(value, dict):
            return {"type": "image"} if _is_image(value) else {k: escaped(v) for k, v in value.items()}
        return [escaped(one) for one in value] if isinstance(value, list | tuple) else value

    safe, variables = [escaped(message) for message in messages], escaped(variables)
    try:
        texts = template.render(safe, **variables).split(mark)
    except TemplateError:
        texts = []
    if len(texts) != images + 1:
        plain = [{**message, "content": _joined(message, encoder.ALONE)} for message in safe]
        texts = template.render(plain, **variables).split(mark)
    if len(texts) != images + 1:
        raise TemplateError("the chat template leaves out images: use a model whose template has them")
    return [text.replace(written, mark) for text in texts]


def _joined(message: Message, image: str) -> Any:
    parts = _parts(message)
    texts = [image if _is_image(part) else part["text"] for part in parts]
    return "".join(texts) if any(map(_is_image, parts)) else message.get("content")


def as_items(prompt: Any) -> Any:
    """Returns a text and a prompt with images unchanged, and anything else as a list."""
    if isinstance(prompt, str | PromptIds):
        return prompt
    try:
        items = list(prompt)
    except TypeError:
        items = None
    # The types can be iterated too, but not over prompts, token ids or messages.
    if items is None or isinstance(prompt, bytes | bytearray | memoryview | Mapping | Set):
        raise RequestError(NOT_A_PROMPT)
    return items

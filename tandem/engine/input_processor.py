"""From a prompt and parameters to a checked request: chat template, tokenizer, output constraint, limits."""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

from tandem.engine.engine import Engine
from tandem.engine.images import PLACEHOLDER, Image, ImageSpan, PromptIds, images_in
from tandem.engine.output import OutputReader
from tandem.engine.params import SamplingParams
from tandem.errors import RequestError, TemplateError
from tandem.model.image_file import MAX_IMAGES, read_image
from tandem.model.vision import AFTER_IMAGE, BEFORE_IMAGE

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

        if self._template is None:
            self._template = ChatTemplate.from_gguf(self.engine.model.gguf, self.tokenizer)
        messages = as_items(messages)
        if not all(isinstance(message, Mapping) for message in messages):
            raise RequestError('a conversation is a list of messages: [{"role": "user", "content": "..."}]')
        # What stands for an image until the text is rendered: nothing that a user can write.
        mark, images = f"\x02{os.urandom(8).hex()}\x03", list[Image]()
        rendered = [self._without_images(dict(message), mark, images) for message in messages]
        text = self._template.render(rendered, **template)
        if images:
            return self._ids_with_images(text.split(mark), images, limit)
        return self.tokenizer.encode(text, special=True, limit=limit)

    def _without_images(self, message: dict[str, Any], mark: str, images: list[Image]) -> dict[str, Any]:
        """Puts marks in the places of a message's images, which are appended to `images`."""
        parts = message.get("content")
        if not isinstance(parts, list) or not any(_is_image(part) for part in parts):
            return message
        texts = []
        for part in parts:
            if _is_image(part):
                images.append(self._read_image(part.get("image"), len(images)))
                texts.append(mark)
            elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"].strip())
            else:
                raise RequestError(
                    "a part of a message with images is not a text or an image: give these only"
                )
        return {**message, "content": "".join(texts)}

    def _read_image(self, source: Any, before: int) -> Image:
        if self.engine.encoder is None:
            why = self._no_vision or "give its vision encoder, an mmproj file, with --mmproj"
            raise RequestError(f"this model was loaded without the part that reads images: {why}")
        if before >= MAX_IMAGES:
            raise RequestError(f"the prompt has more than {MAX_IMAGES} images: give fewer")
        vision = self.engine.encoder.config
        return Image(read_image(source, vision.image_size), vision.tokens)

    def _ids_with_images(self, texts: list[str], images: list[Image], limit: int | None) -> PromptIds:
        """The ids of texts with an image between each two."""
        if len(texts) != len(images) + 1:
            raise TemplateError("the chat template leaves out images: use a model whose template has them")
        ids, spans = PromptIds(), list[ImageSpan]()
        for i, text in enumerate(texts):
            text = (AFTER_IMAGE if i else "") + text + (BEFORE_IMAGE if i < len(images) else "")
            first = {} if not i else {"bos": False, "continues": True}
            ids += self.tokenizer.encode(text, special=True, limit=limit, **first)
            if i < len(images):
                spans.append(ImageSpan(len(ids), images[i]))
                ids += [PLACEHOLDER] * images[i].tokens
        ids.images = spans
        return ids

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
            ids = [operator.index(token) for token in tokens]
            if images := images_in(prompt):
                ids = PromptIds(ids)
                ids.images = images
            return ids
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


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


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

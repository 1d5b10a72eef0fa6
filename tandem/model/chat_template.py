"""Renders messages to a prompt: with the template of the model file, or with the format of its family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

from tandem.errors import RequestError, TandemError, TemplateError
from tandem.gguf.file import GGUF
from tandem.model.chat_formats import BY_NAME, BY_TOKEN, Format, is_plain, known_format, llama2
from tandem.model.tokenizer import Tokenizer

PROBE = "tandem probe"  # a text that is rendered to see how a template takes it


class ChatTemplate:
    """The template of a model file, or the format of its family.

    Templates run in a sandbox (template_sandbox.py).
    """

    def __init__(self, source: str, format: Format | None = None, **tokens: str) -> None:
        """`format`: for a model without a template. `tokens`: variables, bos_token and eos_token."""
        self.source, self._format, self._tokens = source, format or known_format(source), tokens
        self._jinja: Callable[..., str] | None = None
        if not self._format:
            self._compile()

    @classmethod
    def from_gguf(cls, gguf: GGUF, tokenizer: Tokenizer, chosen: str | None = None) -> Self:
        """`chosen`: a template in Jinja, or the name of a format, in place of the file's template."""
        source = gguf.get("tokenizer.chat_template", "") if chosen is None else chosen
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        tokens = {name: tokenizer.piece(id) for name, id in ids.items() if id is not None}
        if format := BY_NAME.get(source):
            return cls("", format, **tokens)
        return cls(source, None if source else _family_format(gguf, tokenizer), **tokens)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Returns the prompt for `messages` ({"role": ..., "content": ...}). `variables`: of the template."""
        if not messages:
            raise RequestError("there are no messages: give at least one")
        messages = [_checked(message) for message in messages]
        if self._format and (not self.source or (is_plain(messages) and not tools)):
            if not all(isinstance(message.get("content") or "", str) for message in messages):
                raise TemplateError("this chat format has no images: use a model whose template has them")
            ends = self._tokens.get("bos_token", ""), self._tokens.get("eos_token", "")
            return self._format(messages, *ends, add_generation_prompt)
        if self._takes_parts_only:
            messages = [_in_parts(message) for message in messages]
        return self._compile()(
            **{"documents": None, **self._tokens, **variables},
            messages=messages,
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
        )

    @cached_property
    def _takes_parts_only(self) -> bool:
        """Whether the template leaves out a content that is one text (SmolVLM's)."""

        def renders(content: Any) -> bool:
            variables = {"documents": None, **self._tokens, "tools": None, "add_generation_prompt": True}
            try:
                return PROBE in self._compile()(**variables, messages=[{"role": "user", "content": content}])
            except TandemError:
                return False

        return "type" in self.source and not renders(PROBE) and renders([{"type": "text", "text": PROBE}])

    def _compile(self) -> Callable[..., str]:
        if self._jinja is None:
            from tandem.model.template_sandbox import compile_template  # it imports Jinja

            self._jinja = compile_template(self.source)
        return self._jinja


def _family_format(gguf: GGUF, tokenizer: Tokenizer) -> Format:
    for token, format in BY_TOKEN.items():
        if tokenizer.find(token) is not None:
            return format
    if gguf.get("general.architecture", "") == "llama" and gguf.get("tokenizer.ggml.model", "") == "llama":
        return llama2
    raise TemplateError(
        f"{gguf.path} has no chat template, and its vocabulary none of the tokens that chats are written with "
        f"({' '.join(BY_TOKEN)}): give a plain prompt (`tandem run --raw`)"
    )


def _checked(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with a text as its content, or a list of parts if it has images."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError('a message is {"role": "user", "content": "..."}: give each one a role')
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise RequestError(
            f"the content of a message is text or a list of parts, not {type(content).__name__}"
        )
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "image" and (kind != "text" or not isinstance(part.get("text"), str)):
            raise RequestError(f"a part of a message is of the kind {kind!r}: give texts and images")
    if any(part["type"] == "image" for part in content):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )

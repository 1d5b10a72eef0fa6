"""Messages to the text of a prompt: by the model file's own template, or by its family's where it has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from tandem.errors import RequestError, TemplateError
from tandem.model.gguf import GGUF
from tandem.model.template_sandbox import compile_template
from tandem.model.tokenizer import Tokenizer

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\n' ~ (message.content or '') ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages -%}
{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' ~ (message.content or '') | trim ~ '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# These know no system role: its words go before those of the first user.
GEMMA = """\
{{- bos_token }}
{%- set system = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}
{%- for message in messages if message.role != 'system' %}
{{- '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\n' }}
{{- (system if loop.first else '') ~ (message.content or '') | trim ~ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

LLAMA2 = """\
{%- set system = '<<SYS>>\n' ~ messages[0].content ~ '\n<</SYS>>\n\n' if messages[0].role == 'system' else '' %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'assistant' %}{{ ' ' ~ (message.content or '') | trim ~ ' ' ~ eos_token }}
{%- else %}{{ bos_token ~ '[INST] ' ~ (system if loop.first else '') ~ (message.content or '') | trim ~ ' [/INST]' }}
{%- endif %}
{%- endfor %}"""

MISTRAL = """\
{{- bos_token }}
{%- set system = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'assistant' %}{{ ' ' ~ (message.content or '') | trim ~ eos_token }}
{%- else %}{{ '[INST] ' ~ (system if loop.first else '') ~ (message.content or '') | trim ~ '[/INST]' }}
{%- endif %}
{%- endfor %}"""

BY_TOKEN = {
    "<|im_start|>": CHATML,
    "<start_of_turn>": GEMMA,
    "<|start_header_id|>": LLAMA3,
    "[INST]": MISTRAL,
}


class ChatTemplate:
    """A compiled template. It cannot reach the machine, nor run for ever (template_sandbox.py)."""

    def __init__(self, source: str, **tokens: str) -> None:
        """`tokens` are variables of every run: bos_token, eos_token."""
        self.source = source
        self._tokens, self._render = tokens, compile_template(source)

    @classmethod
    def from_gguf(cls, gguf: GGUF, tokenizer: Tokenizer) -> Self:
        source = gguf.get("tokenizer.chat_template", "")
        if not source:
            source = _family_template(gguf, tokenizer)
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        return cls(source, **{name: tokenizer.piece(id) for name, id in ids.items() if id is not None})

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for `messages` ({"role": ..., "content": ...}); `variables` are for templates that know them."""
        if not messages:
            raise RequestError("there are no messages: give at least one")
        return self._render(
            **{"documents": None, **self._tokens, **variables},
            messages=[_plain_message(message) for message in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
        )


def _family_template(gguf: GGUF, tokenizer: Tokenizer) -> str:
    for token, template in BY_TOKEN.items():
        if tokenizer.find(token) is not None:
            return template
    if gguf.get("general.architecture", "") == "llama" and gguf.get("tokenizer.ggml.model", "") == "llama":
        return LLAMA2
    raise TemplateError(
        f"{gguf.path} has no chat template, and its vocabulary none of the tokens that chats are written with "
        f"({' '.join(BY_TOKEN)}): give a plain prompt (`tandem run --raw`)"
    )


def _plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one text, where it is given as parts."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError('a message is {"role": "user", "content": "..."}: give each one a role')
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise RequestError(
            f"the content of a message is text or a list of parts, not {type(content).__name__}"
        )
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"a part of a message is of the kind {kind!r}: this engine takes text alone")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}

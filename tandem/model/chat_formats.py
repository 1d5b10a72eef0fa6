"""Chat formats of the model families, without Jinja: for files without a template, and for plain conversations where
the file's template is known to render identically.

Jinja takes 25 ms to import and to compile a template: a tenth of the time to first token of a small model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Message = dict[str, Any]
Format = Callable[..., str]  # (messages, bos, eos, add_generation_prompt) -> text


def chatml(
    messages: Sequence[Message], bos: str, eos: str, add_generation_prompt: bool, *, system: str | None = None
) -> str:
    """`system`: the system message of a conversation that does not begin with one."""
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    turns = [f"<|im_start|>{message['role']}\n{_content(message)}<|im_end|>\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n" * add_generation_prompt


def llama3(messages: Sequence[Message], bos: str, eos: str, add_generation_prompt: bool) -> str:
    def header(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    turns = [f"{header(message['role'])}{_content(message).strip()}<|eot_id|>" for message in messages]
    return bos + "".join(turns) + header("assistant") * add_generation_prompt


# These formats have no system role: the system text is put before the first user message.


def gemma(messages: Sequence[Message], bos: str, eos: str, add_generation_prompt: bool) -> str:
    text = bos
    for role, content in _without_system(messages, "{}\n\n"):
        text += f"<start_of_turn>{'model' if role == 'assistant' else role}\n{content}<end_of_turn>\n"
    return text + "<start_of_turn>model\n" * add_generation_prompt


def llama2(messages: Sequence[Message], bos: str, eos: str, add_generation_prompt: bool) -> str:
    text = ""
    for role, content in _without_system(messages, "<<SYS>>\n{}\n<</SYS>>\n\n"):
        text += f" {content} {eos}" if role == "assistant" else f"{bos}[INST] {content} [/INST]"
    return text


def mistral(messages: Sequence[Message], bos: str, eos: str, add_generation_prompt: bool) -> str:
    text = bos
    for role, content in _without_system(messages, "{}\n\n"):
        text += f" {content}{eos}" if role == "assistant" else f"[INST] {content}[/INST]"
    return text


def _content(message: Message) -> str:
    return message.get("content") or ""


def _without_system(messages: Sequence[Message], system_format: str) -> list[tuple[str, str]]:
    """Returns (role, content) of all messages but system messages; the first begins with the formatted system text."""
    system = system_format.format(_content(messages[0])) if messages[0]["role"] == "system" else ""
    turns = [(m["role"], _content(m).strip()) for m in messages if m["role"] != "system"]
    return [(role, content if i else system + content) for i, (role, content) in enumerate(turns)]


BY_NAME: dict[str, Format] = {
    "chatml": chatml, "gemma": gemma, "llama2": llama2, "llama3": llama3, "mistral": mistral
}  # fmt: skip
BY_TOKEN: dict[str, Format] = {
    "<|im_start|>": chatml,
    "<start_of_turn>": gemma,
    "<|start_header_id|>": llama3,
    "[INST]": mistral,
}

# SHA-256 of a template -> format that renders plain conversations identically (a test compares them).
SMOLLM2 = partial(chatml, system="You are a helpful AI assistant named SmolLM, trained by Hugging Face")
QWEN2_5 = partial(chatml, system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
KNOWN: dict[str, Format] = {
    "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788": SMOLLM2,
    "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f": QWEN2_5,
    "d5495a1e5db0611132a97e46a65dbb64a642a499421228b9c8b93229097fa9a4": QWEN2_5,
}


def known_format(template: str) -> Format | None:
    return KNOWN.get(hashlib.sha256(template.encode(errors="replace")).hexdigest())


def is_plain(messages: Sequence[Message]) -> bool:
    """Whether a conversation has only fields and roles that every template supports."""
    return all(
        message.keys() == {"role", "content"}
        and message["role"] in ("system", "user", "assistant")
        and isinstance(message["content"], str)
        for message in messages
    )

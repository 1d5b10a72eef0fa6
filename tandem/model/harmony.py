"""Harmony, the chat format of gpt-oss, decoded to the tags that other models write.

A response is a list of messages, each after a header that names its channel and perhaps a recipient:
`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`. Analysis becomes
`<think>...</think>`, a message to a function `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, and all else
text.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tandem.model.tokenizer import Tokenizer

FINAL = "<|channel|>final<|message|>"  # the header of an answer
ENDS = ("<|return|>", "<|call|>")  # of a response; <|end|> only ends a message
CHANNEL = "<|channel|>"
MAX_HEADER = 1000  # characters; anything longer is not a header but text
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class Markers(NamedTuple):
    """The control tokens around messages."""

    start: int
    channel: int
    message: int
    end: int
    constrain: int


def find_markers(tokenizer: Tokenizer) -> Markers | None:
    """Returns the markers if this is the vocabulary of gpt-oss."""
    texts = ("<|start|>", CHANNEL, "<|message|>", "<|end|>", "<|constrain|>", *ENDS)
    found = [id for id in map(tokenizer.find, texts) if id is not None]
    return Markers(*found[:5]) if len(found) == len(texts) else None


class HarmonyDecoder:
    """Decodes a response token by token, like StreamDecoder."""

    def __init__(self, tokenizer: Tokenizer, markers: Markers, prompt: list[int]) -> None:
        """`prompt`: a conversation that ends in a header, or in a message; other prompts are continued as text."""
        from tandem.model.tokenizer import StreamDecoder

        self._decoder, self._markers = StreamDecoder(tokenizer, continues=True), markers
        # The header of the current message, as far as it was received. None: the header is complete, text follows.
        self._header: str | None = None
        self._close = ""  # text to write at the end of the current message
        self._thinks = False  # `<think>` was written, and `</think>` was not yet
        places = (i for i in range(len(prompt) - 1, -1, -1) if prompt[i] == markers.start)
        for id in prompt[next(places, len(prompt)) :]:
            if self._header is not None or id in markers:  # the text of a message is not needed
                self.push(id)

    def push(self, id: int) -> str:
        markers = self._markers
        if id in (markers.start, markers.end):
            return self._end()
        if id == markers.channel:
            text = self._end() if self._header is None else ""
            self._header = (self._header or "").removesuffix(CHANNEL) + CHANNEL
            return text
        if id == markers.message:
            return self._begin() if self._header is not None else ""
        if id == markers.constrain:
            return ""
        text = self._decoder.push(id)
        if self._header is None:
            return text
        self._header += text
        return "" if self._is_header(self._header) else self._headless()

    def flush(self) -> str:
        return self._decoder.flush()

    def _is_header(self, text: str) -> bool:
        """Whether `text` may be the beginning of a header. A response without a header is text."""
        role = "assistant"
        rest = text.removeprefix(role)
        begins = (
            CHANNEL in text or role.startswith(text) or " to=".startswith(rest) or rest.startswith(" to=")
        )
        return begins and len(text) <= MAX_HEADER

    def _headless(self) -> str:
        text, self._header = (self._header or "").removeprefix("assistant"), None
        return self._end_reasoning() + text

    def _begin(self) -> str:
        header, self._header = self._header or "", None
        if recipient := RECIPIENT.search(header):
            self._close = "}\n</tool_call>\n"
            name = json.dumps(recipient[1])
            return f'{self._end_reasoning()}<tool_call>\n{{"name": {name}, "arguments": '
        channel = header.partition(CHANNEL)[2].strip()
        if channel.startswith("analysis"):
            goes_on, self._thinks = self._thinks, True
            return "\n\n" if goes_on else "<think>\n"
        self._close = "\n\n" if channel.startswith("commentary") else ""  # text before a tool call
        return self._end_reasoning()

    def _end(self) -> str:
        text, self._close, self._header = self._close, "", ""
        return text

    def _end_reasoning(self) -> str:
        had_reasoning, self._thinks = self._thinks, False
        return "\n</think>\n\n" if had_reasoning else ""

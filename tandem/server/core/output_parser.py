"""Reads an answer as it comes: which part is thought, which is text, and which are calls of tools."""

from __future__ import annotations

import json
import re

from tandem.server.core.generation import Delta, ToolCall
from tandem.server.core.tool_calls import BARE, MARKS, new_id, parse_calls

THINK_START, THINK_END = "<think>", "</think>"


class OutputParser:
    """Gets the text of an answer token by token; holds back what may be the beginning of a mark.

    Each of `_start`, `_reasoning`, `_opening`, `_text`, `_call`, `_arguments` ... reads a part and returns whether
    the next one can go on. Space around thoughts and calls belongs to nobody.
    """

    def __init__(
        self,
        tools: set[str] | None = None,
        *,
        several: bool = True,
        thinking: bool = False,
        id_length: int = 24,
    ) -> None:
        """`tools`: that may be called; `several`: more than once. `thinking`: the prompt has begun a thought."""
        self._tools, self._several, self._id_length = tools or set(), several, id_length
        self._marks = tuple(MARKS) if tools else ()
        self._read = self._reasoning if thinking else self._start
        self._held = ""  # not handed out yet
        self._close = ""  # the mark that ends the call
        self._object = JSONObjectScanner()  # its arguments
        self._is_first = True  # nothing of this part was handed out yet
        self._ended = False
        self.called = False
        self.reasoning_tokens = 0  # deltas of text that were thought

    def push(self, text: str, last: bool = False) -> Delta:
        """What is new, given more text; `last`: there will be no more."""
        delta = Delta()
        self.reasoning_tokens += self._read == self._reasoning
        self._held += text
        self._ended = last
        while self._read(delta):
            pass
        return delta

    def _start(self, delta: Delta) -> bool:
        """Does it begin with a thought?"""
        begin = self._held.lstrip()
        if (
            THINK_START.startswith(begin[: len(THINK_START)])
            and len(begin) < len(THINK_START)
            and not self._ended
        ):
            return False
        is_reasoning = begin.startswith(THINK_START)
        self._held = begin[len(THINK_START) :] if is_reasoning else self._held
        self._read = self._reasoning if is_reasoning else self._opening
        return True

    def _reasoning(self, delta: Delta) -> bool:
        text, ends = self._up_to((THINK_END,))
        delta.reasoning += self._stripped(text)
        if not ends:
            return False
        self._held = self._held[len(THINK_END) :]
        self._is_first, self._read = True, self._after_reasoning
        return True

    def _after_reasoning(self, delta: Delta) -> bool:
        self._held = self._held.lstrip()
        self._read = self._opening if self._held else self._read
        return bool(self._held)

    def _opening(self, delta: Delta) -> bool:
        """Is all of it a call, without marks?"""
        begin = self._held.lstrip()
        if self._tools and not self._ended and (not begin or begin == "["):
            return False
        self._read = self._call if self._tools and begin.startswith(BARE) else self._text
        return True

    def _text(self, delta: Delta) -> bool:
        if not self._marks:
            delta.text, self._held = delta.text + self._held, ""
            return False
        text, begins = self._up_to(self._marks)
        delta.text += self._stripped(text) if self.called else text
        if begins:
            self._read = self._call
        return begins

    def _call(self, delta: Delta) -> bool:
        mark = next((mark for mark in self._marks if self._held.startswith(mark)), "")
        self._close = MARKS.get(mark, "")
        if self._begins(delta, len(mark)):
            return True
        end = self._held.find(self._close, len(mark)) if self._close else -1
        if end < 0 and not self._ended:
            return False
        end = len(self._held) if end < 0 else end
        calls = parse_calls(self._held[len(mark) : end], self._tools, self._id_length)
        if self._several or not self.called:
            delta.calls += calls if self._several else calls[:1]
        delta.text += "" if calls else self._held[: end + len(self._close)]
        self._held = self._held[end + len(self._close) :]
        self.called, self._is_first, self._read = self.called or bool(calls), True, self._text
        return True

    def _begins(self, delta: Delta, at: int) -> bool:
        """Is there a call whose arguments can be handed out as they come?"""
        found = match_call_start(self._held, at)
        if not found or found[0] not in self._tools or (self.called and not self._several):
            return False
        delta.calls.append(ToolCall(new_id(self._id_length), found[0], ""))
        self._held = self._held[found[1] :]
        self._object, self._read, self.called = JSONObjectScanner(), self._arguments, True
        return True

    def _arguments(self, delta: Delta) -> bool:
        text, self._held, ends = self._object.take(self._held)
        if delta.calls:
            delta.calls[-1].arguments += text
        else:
            delta.arguments += text
        self._read = self._rest_of_call if ends else self._read
        return ends

    def _rest_of_call(self, delta: Delta) -> bool:
        """The brace that closes it, if it was not forgotten; other keys count for nothing."""
        end = self._held.find(self._close) if self._close else -1
        _, rest, ends = JSONObjectScanner(depth=1).take(self._held[:end] if end >= 0 else self._held)
        if not ends and end < 0 and not self._ended:
            return False
        self._held = (rest if ends else "") + (self._held[end:] if end >= 0 else "")
        self._read = self._after_call
        return True

    def _after_call(self, delta: Delta) -> bool:
        """More calls up to the closing mark. What else is written there is dropped."""
        self._held = self._held.lstrip(" \t\r\n,;")
        if self._begins(delta, 0):
            return True
        end = self._held.find(self._close) if self._close else -1
        if end < 0 and not self._ended:
            return False
        end = len(self._held) if end < 0 else end
        delta.calls += parse_calls(self._held[:end], self._tools, self._id_length) if self._several else []
        self._held = self._held[end + len(self._close) :]
        self._is_first, self._read = True, self._text
        return True

    def _up_to(self, marks: tuple[str, ...]) -> tuple[str, bool]:
        """Takes what comes before a mark, without the space there; and whether a mark was found."""
        place = min((found for mark in marks if (found := self._held.find(mark)) >= 0), default=-1)
        if place < 0 and self._ended:
            text, self._held = self._held, ""
            return text, False
        end = place if place >= 0 else len(self._held) - max(_overlap(self._held, mark) for mark in marks)
        text = self._held[:end].rstrip()
        self._held = self._held[place if place >= 0 else len(text) :]
        return text, place >= 0

    def _stripped(self, text: str) -> str:
        """Without the space at the beginning of a part."""
        text = text.lstrip() if self._is_first else text
        self._is_first = self._is_first and not text
        return text


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


# As nearly all models write it, Qwen 2.5 with the double brace of its template. Other orders of its keys are read too,
# when the call is whole.
BEGIN = re.compile(
    r'\s*\[?\s*\{?\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def match_call_start(text: str, at: int) -> tuple[str, int] | None:
    """The name of the call that begins there, and where its arguments do."""
    found = BEGIN.match(text, at)
    try:
        return (json.loads(found[1], strict=False), found.end()) if found else None
    except ValueError:
        return None


class JSONObjectScanner:
    """Finds the end of a JSON object, whose text comes in deltas."""

    def __init__(self, depth: int = 0) -> None:
        """`depth`: objects and lists that are open already."""
        self._depth, self._in_string, self._escaped = depth, False, False

    def take(self, text: str) -> tuple[str, str, bool]:
        """What belongs to the object, what comes after it, and whether it has ended. New lines in strings, which models
        write and JSON does not know, are escaped."""
        taken = []
        for place, letter in enumerate(text):
            taken.append(json.dumps(letter)[1:-1] if self._in_string and letter < " " else letter)
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = letter == "\\", letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return "".join(taken), text[place + 1 :], True
        return "".join(taken), "", False

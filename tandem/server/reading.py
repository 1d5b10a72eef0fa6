"""Reads an answer as it comes: which part is thought, which is text, and which are calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.server.call_text import ObjectText, begun_call
from tandem.server.generation import ToolCall
from tandem.server.tool_formats import BARE, MARKS, new_id, read_calls

THINK, THOUGHT = "<think>", "</think>"


@dataclass
class News:
    text: str = ""
    reasoning: str = ""
    arguments: str = ""  # more of the call that came last
    calls: list[ToolCall] = field(
        default_factory=list
    )  # after that: new ones, with what is there of their arguments


class Reader:
    """Gets the text of an answer token by token; holds back what may be the beginning of a mark.

    Each of `_start`, `_thought`, `_opening`, `_text`, `_call`, `_arguments` ... reads a part of it, and returns whether
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
        self._read = self._thought if thinking else self._start
        self._held = ""  # not handed out yet
        self._close = ""  # the mark that ends the call
        self._object = ObjectText()  # its arguments
        self._is_first = True  # nothing of this part was handed out yet
        self._ended = False
        self.called = False
        self.thoughts = 0  # pieces of text that were thought

    def push(self, text: str, last: bool = False) -> News:
        """What is new, given more text; `last`: there will be no more."""
        news = News()
        self.thoughts += self._read == self._thought
        self._held += text
        self._ended = last
        while self._read(news):
            pass
        return news

    def _start(self, news: News) -> bool:
        """Does it begin with a thought?"""
        begin = self._held.lstrip()
        if THINK.startswith(begin[: len(THINK)]) and len(begin) < len(THINK) and not self._ended:
            return False
        is_thought = begin.startswith(THINK)
        self._held = begin[len(THINK) :] if is_thought else self._held
        self._read = self._thought if is_thought else self._opening
        return True

    def _thought(self, news: News) -> bool:
        text, ends = self._up_to((THOUGHT,))
        news.reasoning += self._stripped(text)
        if not ends:
            return False
        self._held = self._held[len(THOUGHT) :]
        self._is_first, self._read = True, self._after_thought
        return True

    def _after_thought(self, news: News) -> bool:
        self._held = self._held.lstrip()
        self._read = self._opening if self._held else self._read
        return bool(self._held)

    def _opening(self, news: News) -> bool:
        """Is all of it a call, without marks?"""
        begin = self._held.lstrip()
        if self._tools and not self._ended and (not begin or begin == "["):
            return False
        self._read = self._call if self._tools and begin.startswith(BARE) else self._text
        return True

    def _text(self, news: News) -> bool:
        if not self._marks:
            news.text, self._held = news.text + self._held, ""
            return False
        text, begins = self._up_to(self._marks)
        news.text += self._stripped(text) if self.called else text
        if begins:
            self._read = self._call
        return begins

    def _call(self, news: News) -> bool:
        mark = next((mark for mark in self._marks if self._held.startswith(mark)), "")
        self._close = MARKS.get(mark, "")
        if self._begins(news, len(mark)):
            return True
        end = self._held.find(self._close, len(mark)) if self._close else -1
        if end < 0 and not self._ended:
            return False
        end = len(self._held) if end < 0 else end
        calls = read_calls(self._held[len(mark) : end], self._tools, self._id_length)
        if self._several or not self.called:
            news.calls += calls if self._several else calls[:1]
        news.text += "" if calls else self._held[: end + len(self._close)]
        self._held = self._held[end + len(self._close) :]
        self.called, self._is_first, self._read = self.called or bool(calls), True, self._text
        return True

    def _begins(self, news: News, at: int) -> bool:
        """Is there a call whose arguments can be handed out as they come?"""
        found = begun_call(self._held, at)
        if not found or found[0] not in self._tools or (self.called and not self._several):
            return False
        news.calls.append(ToolCall(new_id(self._id_length), found[0], ""))
        self._held = self._held[found[1] :]
        self._object, self._read, self.called = ObjectText(), self._arguments, True
        return True

    def _arguments(self, news: News) -> bool:
        text, self._held, ends = self._object.take(self._held)
        if news.calls:
            news.calls[-1].arguments += text
        else:
            news.arguments += text
        self._read = self._rest_of_call if ends else self._read
        return ends

    def _rest_of_call(self, news: News) -> bool:
        """The brace that closes it, if it was not forgotten; other keys count for nothing."""
        end = self._held.find(self._close) if self._close else -1
        _, rest, ends = ObjectText(depth=1).take(self._held[:end] if end >= 0 else self._held)
        if not ends and end < 0 and not self._ended:
            return False
        self._held = (rest if ends else "") + (self._held[end:] if end >= 0 else "")
        self._read = self._after_call
        return True

    def _after_call(self, news: News) -> bool:
        """More calls up to the closing mark. What else is written there is dropped."""
        self._held = self._held.lstrip(" \t\r\n,;")
        if self._begins(news, 0):
            return True
        end = self._held.find(self._close) if self._close else -1
        if end < 0 and not self._ended:
            return False
        end = len(self._held) if end < 0 else end
        news.calls += read_calls(self._held[:end], self._tools, self._id_length) if self._several else []
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

"""Deltas, which become the responses of all APIs, and the parser that makes them: it splits generated text into
reasoning, text and tool calls while it streams."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.engine.output import TokenLogprob, Usage
from tandem.server.core.tool_calls import BARE_CALL_STARTS, CALL_TAGS, ToolCall, new_call_id, parse_calls

THINK_START, THINK_END = "<think>", "</think>"


@dataclass(frozen=True)
class GenerationUsage(Usage):
    """Token counts and times of one response."""

    reasoning_tokens: int = 0  # part of completion_tokens


@dataclass(slots=True)
class Delta:
    """The part that one token adds to one of the responses."""

    index: int = 0  # of the response
    text: str = ""
    reasoning: str = ""
    arguments: str = ""  # continues the last tool call
    tool_calls: list[ToolCall] = field(default_factory=list)  # new calls, after `arguments`
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # NaN for the first token of an echoed prompt
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, from the prefix cache
    finish_reason: str | None = None  # on the last delta: stop, length or tool_calls
    stop_string: str | None = None  # on the last delta: the stop string that ended the response
    usage: GenerationUsage | None = None  # on the last delta


NO_USAGE = GenerationUsage(0, 0, 0.0, 0.0)


@dataclass
class GenerationResult:
    """A complete response: the sum of its deltas."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = "length"
    stop_string: str | None = None
    usage: GenerationUsage = NO_USAGE

    @property
    def logprob_count(self) -> int:
        """The number of all log-probabilities."""
        return sum(1 + len(token.top) for token in self.logprobs)

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        if delta.arguments:
            self.tool_calls[-1].arguments += delta.arguments
        self.tool_calls += delta.tool_calls
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_string = delta.stop_string
        self.usage = delta.usage or self.usage


def total_usage(usages: Sequence[GenerationUsage]) -> GenerationUsage:
    """The usage of several responses to one prompt, whose tokens count once."""
    first = usages[0] if usages else NO_USAGE
    return GenerationUsage(
        first.prompt_tokens,
        sum(usage.completion_tokens for usage in usages),
        min((usage.first_token_seconds for usage in usages), default=0.0),
        max((usage.decode_seconds for usage in usages), default=0.0),
        first.cached_tokens,
        sum(usage.reasoning_tokens for usage in usages),
    )


class OutputParser:
    """The reasoning and tool-call parser of one response.

    A state machine: `_state` is the method that parses the current part. A state consumes `_buffer`, adds to the delta
    and returns True if the next state can continue, or False if it needs more text. Text that may be the beginning of a
    tag is held back. Whitespace around reasoning and tool calls is dropped.
    """

    def __init__(
        self,
        tools: set[str] | None = None,
        *,
        parallel: bool = True,
        thinking: bool = False,
        id_length: int = 24,
    ) -> None:
        """`tools`: names that may be called; `parallel`: several calls are allowed; `thinking`: the prompt ends with
        `<think>`, so the response starts with reasoning."""
        self._tools, self._parallel, self._id_length = tools or set(), parallel, id_length
        self._tags = tuple(CALL_TAGS) if tools else ()
        self._state = self._reasoning if thinking else self._start
        self._buffer = ""  # received, not parsed yet
        self._close_tag = ""  # of the current call
        self._scanner = JSONObjectScanner()  # of the current call's arguments, then of the rest of the call
        self._at_part_start = True  # nothing of the current part has been returned
        self._ended = False
        self.called = False  # the response contains a tool call
        self.reasoning_tokens = 0

    @property
    def complete(self) -> bool:
        """The one call that a response without parallel calls may have is complete: the rest would be dropped."""
        in_call = self._state in (self._arguments, self._rest_of_call)
        return self.called and not self._parallel and not in_call

    def push(self, text: str, last: bool = False) -> Delta:
        """Parses the text of the next token. `last`: the response ends here, so nothing is held back."""
        delta = Delta()
        self.reasoning_tokens += self._state == self._reasoning
        self._buffer += text
        self._ended = last
        while self._state(delta):
            pass
        return delta

    # ---- states

    def _start(self, delta: Delta) -> bool:
        """The beginning of the response: `<think>`, or anything else."""
        text = self._buffer.lstrip()
        if len(text) < len(THINK_START) and THINK_START.startswith(text) and not self._ended:
            return False
        is_reasoning = text.startswith(THINK_START)
        self._buffer = text[len(THINK_START) :] if is_reasoning else self._buffer
        self._state = self._reasoning if is_reasoning else self._content_start
        return True

    def _reasoning(self, delta: Delta) -> bool:
        text, ends = self._take_until((THINK_END,))
        delta.reasoning += self._strip_start(text)
        if not ends:
            return False
        self._buffer = self._buffer[len(THINK_END) :]
        self._at_part_start, self._state = True, self._after_reasoning
        return True

    def _after_reasoning(self, delta: Delta) -> bool:
        self._buffer = self._buffer.lstrip()
        self._state = self._content_start if self._buffer else self._state
        return bool(self._buffer)

    def _content_start(self, delta: Delta) -> bool:
        """The beginning of the content: a tool call without tags is the whole content."""
        text = self._buffer.lstrip()
        if self._tools and not self._ended and (not text or text == "["):
            return False
        self._state = self._call if self._tools and text.startswith(BARE_CALL_STARTS) else self._text
        return True

    def _text(self, delta: Delta) -> bool:
        if not self._tags:
            delta.text, self._buffer = delta.text + self._buffer, ""
            return False
        text, found = self._take_until(self._tags)
        delta.text += self._strip_start(text) if self.called else text
        if found:
            self._state = self._call
        return found

    def _call(self, delta: Delta) -> bool:
        """A tool call: streamed if it is written as usual, otherwise parsed when it is complete. Text that is no call
        of a known tool stays text."""
        tag = next((tag for tag in self._tags if self._buffer.startswith(tag)), "")
        self._close_tag = CALL_TAGS.get(tag, "")
        if self._start_call(delta, len(tag)):
            return True
        end = self._buffer.find(self._close_tag, len(tag)) if self._close_tag else -1
        if end < 0 and not self._ended:
            return False
        end = len(self._buffer) if end < 0 else end
        calls = parse_calls(self._buffer[len(tag) : end], self._tools, self._id_length)
        if self._parallel or not self.called:
            delta.tool_calls += calls if self._parallel else calls[:1]
        delta.text += "" if calls else self._buffer[: end + len(self._close_tag)]
        self._buffer = self._buffer[end + len(self._close_tag) :]
        self.called, self._at_part_start, self._state = self.called or bool(calls), True, self._text
        return True

    def _start_call(self, delta: Delta, at: int) -> bool:
        """Starts a call whose arguments can be streamed, if one begins at `at`."""
        found = match_call_start(self._buffer, at)
        if not found or found[0] not in self._tools or (self.called and not self._parallel):
            return False
        delta.tool_calls.append(ToolCall(new_call_id(self._id_length), found[0], ""))
        self._buffer = self._buffer[found[1] :]
        self._scanner, self._state, self.called = JSONObjectScanner(), self._arguments, True
        return True

    def _arguments(self, delta: Delta) -> bool:
        text, self._buffer, ends = self._scanner.take(self._buffer)
        if delta.tool_calls:
            delta.tool_calls[-1].arguments += text
        else:
            delta.arguments += text
        if ends:
            self._scanner, self._state = JSONObjectScanner(depth=1), self._rest_of_call
        return ends

    def _rest_of_call(self, delta: Delta) -> bool:
        """From the arguments to the closing brace, which models sometimes forget. Other keys are ignored."""
        end = self._buffer.find(self._close_tag) if self._close_tag else -1
        held = 0 if self._ended else _overlap(self._buffer, self._close_tag)
        scanned = end if end >= 0 else len(self._buffer) - held
        _, rest, ends = self._scanner.take(self._buffer[:scanned])
        self._buffer = rest + self._buffer[scanned:]
        if not ends and end < 0 and not self._ended:
            return False
        self._state = self._after_call
        return True

    def _after_call(self, delta: Delta) -> bool:
        """From a call to its closing tag: more calls; other text is dropped."""
        self._buffer = self._buffer.lstrip(" \t\r\n,;")
        if self._start_call(delta, 0):
            return True
        end = self._buffer.find(self._close_tag) if self._close_tag else -1
        if end < 0 and not self._ended:
            return False
        end = len(self._buffer) if end < 0 else end
        if self._parallel:
            delta.tool_calls += parse_calls(self._buffer[:end], self._tools, self._id_length)
        self._buffer = self._buffer[end + len(self._close_tag) :]
        self._at_part_start, self._state = True, self._text
        return True

    # ---- helpers

    def _take_until(self, tags: tuple[str, ...]) -> tuple[str, bool]:
        """Takes the text before the first tag, without trailing whitespace. Returns it and whether a tag was found."""
        place = min((found for tag in tags if (found := self._buffer.find(tag)) >= 0), default=-1)
        if place < 0 and self._ended:
            text, self._buffer = self._buffer, ""
            return text, False
        end = place if place >= 0 else len(self._buffer) - max(_overlap(self._buffer, tag) for tag in tags)
        text = self._buffer[:end].rstrip()
        self._buffer = self._buffer[place if place >= 0 else len(text) :]
        return text, place >= 0

    def _strip_start(self, text: str) -> str:
        """Removes whitespace at the beginning of a part."""
        text = text.lstrip() if self._at_part_start else text
        self._at_part_start = self._at_part_start and not text
        return text


def _overlap(text: str, tag: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)


# {"name": ..., "arguments": { as nearly all models write it; Qwen 2.5 copies the double brace of its template. Calls
# with their keys in another order are parsed when they are complete. No repetition is tried at a second length (*+):
# after 2,000 spaces that would take seconds for each token.
CALL_START = re.compile(
    r'\s*+(?:\[\s*+)?+(?:\{\s*+)?\{\s*+"name"\s*+:\s*+("(?:[^"\\]|\\.)*+")\s*+,\s*+'
    r'"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
)
MAX_CALL_START = 4096  # characters; a call that begins with more is parsed when it is complete


def match_call_start(text: str, at: int) -> tuple[str, int] | None:
    """(tool name, where its arguments start) if a call in JSON starts at `at`."""
    found = CALL_START.match(text, at, at + MAX_CALL_START)
    try:
        return (json.loads(found[1], strict=False), found.end()) if found else None
    except ValueError:
        return None


class JSONObjectScanner:
    """Finds the end of a JSON object that arrives in parts."""

    def __init__(self, depth: int = 0) -> None:
        """`depth`: objects and lists that are open already."""
        self._depth, self._in_string, self._escaped = depth, False, False

    def take(self, text: str) -> tuple[str, str, bool]:
        """(text of the object, text after it, whether it has ended). Control characters in strings, which models write
        and JSON forbids, are escaped."""
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

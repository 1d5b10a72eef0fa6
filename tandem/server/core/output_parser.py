"""Deltas, which become the responses of all APIs, and the parser that makes them: it splits generated text into
reasoning, text and tool calls while it streams."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import regex

from tandem.engine.output import TokenLogprob, Usage
from tandem.server.core.argument_scanners import JSONScanner, Scanner, overlap
from tandem.server.core.schemas import Schema
from tandem.server.core.tool_calls import ToolCall, new_call_id, parse_calls
from tandem.server.core.tool_formats import ACCEPTED, QWEN3_CODER, ToolFormat

# Opening tag -> formats of the calls that may follow; "": without a tag.
FORMATS: dict[str, list[ToolFormat]] = {}
for _format in ACCEPTED:
    FORMATS.setdefault(_format.tag, []).append(_format)
CALL_TAG = regex.compile("|".join(regex.escape(tag) for tag in FORMATS if tag))
# The beginning of a response that may be calls without a tag.
BARE_CALLS = regex.compile(
    r'\s*+(?:\[\s*+)?+(?:\{\s*+){1,2}+"(?:name|arguments|parameters|type|id|function)"'
    r"|\s*+\[\s*+[A-Za-z_][\w.-]{0,63}+\("
)
MAX_HEAD = 4096  # characters before the arguments; a call that begins with more is parsed when it is complete
MAX_LABEL = 32  # characters of the name of a channel


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


class ReasoningTags(NamedTuple):
    """How a model family marks reasoning, before the text or the calls of a response."""

    start: str
    end: str
    answer: str = ""  # between the reasoning and what follows it
    final: str = ""  # between that and a text
    has_label: bool = False  # a word follows `start` on its line


REASONING = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),  # Mistral
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|channel>", "<channel|>", has_label=True),  # Gemma 4
)
# gpt-oss, whose responses reach the parser with <think> (model/harmony.py).
HARMONY = ReasoningTags(
    "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"
)


def reasoning_for(template: str) -> ReasoningTags | None:
    """The reasoning of the family that a chat template belongs to, if it has any."""
    return next((tags for tags in REASONING if tags.start in template), None)


class OutputParser:
    """The reasoning and tool-call parser of one response.

    A state machine: `_state` is the method that parses the current part. A state consumes `_buffer`, adds to the delta
    and returns True if the next state can continue, or False if it needs more text. Text that may be the beginning of a
    tag is held back. Whitespace around reasoning and tool calls is dropped.
    """

    def __init__(
        self,
        tools: Mapping[str, Schema] | None = None,
        *,
        parallel: bool = True,
        reasoning: ReasoningTags | None = None,
        id_length: int = 24,
    ) -> None:
        """`tools`: names that may be called, with the schemas of their arguments; `parallel`: several calls are
        allowed; `reasoning`: the prompt ends with its start, so the response begins with reasoning."""
        self._tools, self._parallel, self._id_length = tools or {}, parallel, id_length
        self._tags = reasoning or REASONING[0]  # of the reasoning
        self._state = self._reasoning if reasoning else self._start
        self._buffer = ""  # received, not parsed yet
        self._format = QWEN3_CODER  # of the current call
        self._scanner: Scanner  # of the current call's arguments, then of the rest of the call
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
        """The beginning of the response: reasoning, or anything else."""
        text = self._buffer.lstrip()
        for tags in REASONING:
            if text.startswith(tags.start):
                self._buffer, self._tags = text[len(tags.start) :], tags
                self._state = self._label if tags.has_label else self._reasoning
                return True
        if not self._ended and any(tags.start.startswith(text) for tags in REASONING):
            return False
        self._state = self._content_start
        return True

    def _label(self, delta: Delta) -> bool:
        """The rest of the line of a start tag."""
        label, end, rest = self._buffer.partition("\n")
        may_be_label = len(label) < MAX_LABEL and (label.isalpha() or not label)
        if may_be_label and not end and not self._ended:
            return False
        self._buffer = rest if may_be_label else self._buffer
        self._state = self._reasoning
        return True

    def _reasoning(self, delta: Delta) -> bool:
        """ReasoningTags ends with its tag; the models of Qwen3-Coder's format may forget it before a call."""
        tags = (self._tags.end, QWEN3_CODER.tag) if self._tools else (self._tags.end,)
        text, tag = self._take_until(regex.compile("|".join(map(regex.escape, tags))))
        delta.reasoning += self._strip_start(text)
        if not tag:
            return False
        if tag != self._tags.end:
            found = self._match(QWEN3_CODER.begins, self._spaces() + len(tag))
            if found and not found.partial and found["name"] in self._tools:
                self._at_part_start, self._state = True, self._call
            elif found and found.partial and not self._ended:
                return False
            else:
                delta.reasoning += self._take(self._spaces() + len(tag))
            return True
        self._take(self._spaces() + len(tag))
        self._at_part_start, self._state = True, self._after_reasoning
        return True

    def _after_reasoning(self, delta: Delta) -> bool:
        self._buffer = self._buffer.lstrip()
        self._state = self._content_start if self._buffer else self._state
        return bool(self._buffer)

    def _content_start(self, delta: Delta) -> bool:
        """The beginning of the content: a tool call without tags is the whole content."""
        found = BARE_CALLS.match(self._buffer, partial=True) if self._tools else None
        if found and found.partial and not self._ended:
            return False
        self._state = self._call if found and not found.partial else self._text
        return True

    def _text(self, delta: Delta) -> bool:
        if not self._tools:
            delta.text, self._buffer = delta.text + self._buffer, ""
            return False
        text, tag = self._take_until(CALL_TAG)
        delta.text += self._strip_start(text) if self.called else text
        self._state = self._call if tag else self._state
        return bool(tag)

    def _call(self, delta: Delta) -> bool:
        """A tool call: streamed if it is written as usual, otherwise parsed when it is complete. Text that is no call
        of a known tool stays text."""
        found = CALL_TAG.match(self._buffer, self._spaces())
        tag, at = (found[0], found.end()) if found else ("", 0)
        started, name = self._start_call(delta, [(one, one.begins) for one in FORMATS[tag]], at)
        if started or (name is not None and not self._ended):
            return started
        close_tag = FORMATS[tag][0].close_tag
        end = self._buffer.find(close_tag, at) if close_tag else -1
        place = len(self._buffer) if end < 0 else end
        may_be_json = self._buffer[at:place].lstrip()[:1] in ("{", "[") or "```" in tag
        if end < 0 and may_be_json and not self._ended:
            return False
        calls = parse_calls(self._buffer[at:place], self._tools, self._id_length) if may_be_json else []
        delta.tool_calls += calls if self._parallel else calls[:1]
        self.called = self.called or bool(calls)
        is_begun = name in self._tools or (tag[:1] not in ("", "`") and (may_be_json or name is not None))
        if calls or (is_begun and end < 0):  # a call that was cut is no text
            self._take(place + len(close_tag))
            self._at_part_start = True
        else:
            delta.text += self._take(place + len(close_tag) if may_be_json else at)
        self._state = self._after_call if self.complete else self._text
        return True

    def _start_call(
        self, delta: Delta, heads: Sequence[tuple[ToolFormat, Any]], at: int
    ) -> tuple[bool, str | None]:
        """Starts a call whose arguments can be streamed, if one begins at `at`. Returns whether there is one and, if
        there may be one when more text is there, its name as far as it is known."""
        may_start = None
        for format, head in heads:
            found = self._match(head, at)
            if not found:
                continue
            name = _unescaped(found["name"] or "") if format.is_json else found["name"] or ""
            if found.partial:
                may_start = may_start or name
            elif name in self._tools:
                delta.tool_calls.append(ToolCall(new_call_id(self._id_length), name, ""))
                self._take(found.end())
                self._format, self._scanner = format, format.arguments.scan(self._tools[name])
                self._state, self.called = self._arguments, True
                return True, name
        return False, may_start

    def _arguments(self, delta: Delta) -> bool:
        text, self._buffer, ends = self._scanner.take(self._buffer, self._ended)
        if delta.tool_calls:
            delta.tool_calls[-1].arguments += text
        else:
            delta.arguments += text
        if ends:
            self._scanner = JSONScanner(depth=1)
            self._state = self._rest_of_call if self._format.is_json else self._after_call
        return ends

    def _rest_of_call(self, delta: Delta) -> bool:
        """From the arguments to the closing brace, which models sometimes forget. Other keys are ignored."""
        close_tag = self._format.close_tag
        end = self._buffer.find(close_tag) if close_tag else -1
        held = 0 if self._ended else overlap(self._buffer, close_tag)
        scanned = end if end >= 0 else len(self._buffer) - held
        _, rest, ends = self._scanner.take(self._buffer[:scanned])
        self._buffer = rest + self._buffer[scanned:]
        if not ends and end < 0 and not self._ended:
            return False
        self._state = self._after_call
        return True

    def _after_call(self, delta: Delta) -> bool:
        """From a call to its closing tag: more calls; other text is dropped."""
        format = self._format
        if not self._parallel:
            self._buffer = ""
            return False
        if format.is_json or not format.each:
            started, name = self._start_call(delta, [(format, format.continues)], 0)
            if started or (name is not None and not self._ended):
                return started
            if name is not None:  # a call that was cut is no text
                self._buffer = ""
        self._buffer = self._buffer.lstrip(" \t\r\n,;")
        if format.tag and not format.close_tag:
            self._buffer = self._buffer.lstrip(" \t\r\n]")
            if not self._buffer and not self._ended:
                return False
        else:
            found = format.closes.search(self._buffer, partial=True)
            if not self._ended and (not found or found.partial):
                return False
            end = found.start() if found and not found.partial else len(self._buffer)
            delta.tool_calls += parse_calls(self._take(end), self._tools, self._id_length)
            if self._buffer.startswith(format.close_tag):
                self._take(len(format.close_tag))
        self._at_part_start, self._state = True, self._text
        return True

    # ---- helpers

    def _spaces(self) -> int:
        """The length of the whitespace before a tag."""
        return len(self._buffer) - len(self._buffer.lstrip())

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken

    def _match(self, pattern: Any, at: int) -> Any:
        """The match of a pattern at a place, which may be a partial one."""
        found = pattern.match(self._buffer, at, at + MAX_HEAD, partial=True)
        return None if found and found.partial and len(self._buffer) >= at + MAX_HEAD else found

    def _take_until(self, pattern: Any) -> tuple[str, str]:
        """Takes the text before the first tag, without trailing whitespace. Returns it, and the tag that was found."""
        found = pattern.search(self._buffer, partial=True)
        if self._ended and (not found or found.partial):
            return self._take(len(self._buffer)), ""
        end = found.start() if found else len(self._buffer)
        return self._take(len(self._buffer[:end].rstrip())), "" if not found or found.partial else found[0]

    def _strip_start(self, text: str) -> str:
        """Removes whitespace at the beginning of a part."""
        text = text.lstrip() if self._at_part_start else text
        self._at_part_start = self._at_part_start and not text
        return text


def _unescaped(name: str) -> str:
    """A name in a JSON string."""
    try:
        return str(json.loads(f'"{name}"', strict=False))
    except ValueError:
        return name

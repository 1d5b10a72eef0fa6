"""The types that all APIs share: each API's request becomes a GenerationRequest, Deltas become its response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.output import TokenLogprob, Usage
from tandem.errors import RequestError

Message = dict[str, Any]  # a chat template's message: role, content, tool_calls, ...
WHOLE_CONTEXT = 2**31  # as `max_tokens`: generate until the context is full
DEFAULT_MIN_P = 0.1


@dataclass(frozen=True)
class GenerationUsage(Usage):
    """Token counts and times of one response."""

    reasoning_tokens: int = 0  # part of completion_tokens


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False  # constrain the arguments to the schema


@dataclass
class ToolCall:
    """A call that the model has written."""

    id: str
    name: str
    arguments: str  # JSON; in a stream, the part received so far

    def as_object(self) -> dict[str, Any]:
        """The parsed arguments; `{"arguments": text}` if the model did not write a JSON object."""
        try:
            parsed = json.loads(self.arguments)
        except (ValueError, RecursionError):
            parsed = None
        return parsed if isinstance(parsed, dict) else {"arguments": self.arguments}


@dataclass
class GenerationRequest:
    """One prompt or conversation, and how to generate `n` responses to it."""

    model: str | None  # None: the server's first model
    prompt: str | list[int] | None = None  # text or token ids; None: use `messages`
    messages: list[Message] = field(default_factory=list)
    # Fields of SamplingParams; max_tokens may be 0 with `echo`.
    params: dict[str, Any] = field(default_factory=dict)
    echo: bool = False  # return the prompt before the completion
    n: int = 1  # responses
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"  # auto, none or required
    parallel_tool_calls: bool = True  # a response may contain several calls
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # variables of the chat template
    continue_final_message: bool = False  # continue the last message if it is the assistant's
    keep_alive: float | None = None  # seconds that the model stays loaded; None: the server's setting


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


def named_tool(tools: Sequence[Tool], name: str | None) -> list[Tool]:
    """Only the tool that `tool_choice` requires."""
    found = [tool for tool in tools if tool.name == name]
    if not found:
        raise RequestError(f"tool_choice names {name}, which is not in tools: add it, or choose another")
    return found


def sampling_params(
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
) -> dict[str, Any]:
    """The sampling parameters of a request as SamplingParams takes them.

    A request that sets none of them gets temperature 1 and min_p 0.1, without which small models sample from the long
    tail. `top_p` 0 means greedy and `top_k` -1 means off, as in other engines.
    """
    if temperature is None and top_p is None and top_k is None and min_p is None:
        return {"temperature": 1.0, "min_p": DEFAULT_MIN_P}
    top_k = 1 if top_p == 0 else max(0, top_k or 0)
    given = {"top_p": top_p or None, "top_k": top_k or None, "min_p": min_p}
    return {"temperature": 1.0 if temperature is None else temperature} | {
        name: value for name, value in given.items() if value is not None
    }


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

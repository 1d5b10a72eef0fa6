"""What every dialect's request becomes, and what its answer is made from. Dialects translate; serving.py runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.output import TokenLogprob, Usage
from tandem.errors import RequestError

Message = dict[str, Any]  # as chat templates know them: role, content, tool_calls, ...
WHOLE_CONTEXT = 2**31  # as `max_tokens`: until the context is full
DEFAULT_MIN_P = 0.1


@dataclass(frozen=True)
class GenerationUsage(Usage):
    """What an answer took."""

    reasoning_tokens: int = 0  # of its tokens: thoughts


@dataclass(frozen=True)
class Tool:
    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False  # the arguments of its calls must fit


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON, or what there is of it yet

    def as_object(self) -> dict[str, Any]:
        """The arguments; in a key of their own where the model has written something else than an object."""
        try:
            found = json.loads(self.arguments)
        except (ValueError, RecursionError):
            found = None
        return found if isinstance(found, dict) else {"arguments": self.arguments}


@dataclass
class GenerationRequest:
    """A request for one or more answers to one prompt."""

    model: str | None  # None: the server's first
    prompt: str | list[int] | None = None  # or
    messages: list[Message] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)  # of SamplingParams; max_tokens may be 0 with echo
    echo: bool = False  # the prompt is part of the answer
    count: int = 1  # answers
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"  # or none, required
    parallel_tools: bool = True  # an answer may have several calls
    template: dict[str, Any] = field(default_factory=dict)  # variables of the chat template
    continue_last: bool = False  # the answer goes on from the last message, which is the assistant's
    keep_alive: float | None = None  # seconds that the model stays loaded afterwards; None: the usual ones


@dataclass(slots=True)
class Delta:
    """What is new of one of the answers."""

    index: int = 0  # which answer
    text: str = ""
    reasoning: str = ""
    arguments: str = ""  # of the call that came last
    calls: list[ToolCall] = field(default_factory=list)  # that begin, after those arguments
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # NaN: of a prompt's first token
    prompt_tokens: int = 0  # of its prompt
    finish: str | None = None  # on the last one: stop, length or tool_calls
    stopped_by: str | None = None  # on the last one: the stop string that ended it
    usage: GenerationUsage | None = None  # on the last one


NO_USAGE = GenerationUsage(0, 0, 0.0, 0.0)


@dataclass
class GenerationResult:
    """All deltas of an answer put together."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str = "length"
    stopped_by: str | None = None
    usage: GenerationUsage = NO_USAGE

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        if delta.arguments:
            self.calls[-1].arguments += delta.arguments
        self.calls += delta.calls
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish = delta.finish or self.finish
        self.stopped_by = delta.stopped_by
        self.usage = delta.usage or self.usage


def named_tool(tools: Sequence[Tool], name: str | None) -> list[Tool]:
    """The one that a request says must be called."""
    found = [tool for tool in tools if tool.name == name]
    if not found:
        raise RequestError(f"tool_choice names {name}, which is not among the tools")
    return found


def sampling_params(
    temperature: float | None = None, top_p: float | None = None, top_k: int | None = None,
    min_p: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """How tokens are drawn. Whoever says nothing of it gets the temperature that the dialects have in common, and no
    token of the long tail, which small models cannot do without. A `top_p` of 0 and a `top_k` of -1 are taken as
    other engines do."""
    if temperature is None and top_p is None and top_k is None and min_p is None:
        return {"temperature": 1.0, "min_p": DEFAULT_MIN_P}
    top_k = 1 if top_p == 0 else max(0, top_k or 0)
    found = {"top_p": top_p or None, "top_k": top_k or None, "min_p": min_p}
    return {"temperature": 1.0 if temperature is None else temperature} | {
        name: value for name, value in found.items() if value is not None
    }


def total_usage(usages: Sequence[GenerationUsage]) -> GenerationUsage:
    """Of several answers to one prompt, which counts once."""
    first = usages[0] if usages else NO_USAGE
    return GenerationUsage(
        first.prompt_tokens,
        sum(usage.completion_tokens for usage in usages),
        min((usage.first_token_seconds for usage in usages), default=0.0),
        max((usage.decode_seconds for usage in usages), default=0.0),
        first.cached_tokens,
        sum(usage.reasoning_tokens for usage in usages),
    )

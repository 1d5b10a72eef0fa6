"""The requests and answers of OpenAI's /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from tandem.server.http.fields import Fields, Positive
from tandem.server.openai.types import IGNORED, Count, Finish, Sampling, StreamOptions, TopLogprobs, UsageBody

# ---- requests


class Part(Fields):
    ignored = frozenset({"cache_control", "prompt_cache_breakpoint"})
    type: Literal["text"]
    text: str


class CalledFunction(Fields):
    name: str
    arguments: str


class CallGiven(Fields):
    ignored = frozenset({"index"})
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class MessageGiven(Fields):
    ignored = frozenset(
        {"refusal", "annotations", "audio", "function_call", "cache_control", "provider_specific_fields"}
    )
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[CallGiven] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionGiven(Fields):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolGiven(Fields):
    ignored = frozenset({"cache_control"})
    type: Literal["function"]
    function: FunctionGiven


class NamedFunction(Fields):
    name: str


class NamedTool(Fields):
    type: Literal["function"]
    function: NamedFunction


class SchemaGiven(Fields):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaGiven | None = None


class ChatRequest(Sampling):
    ignored = IGNORED
    neutral = (
        ("modalities", ["text"]),
        ("verbosity", "medium"),
        ("functions", []),
        ("function_call", "none"),
        ("function_call", "auto"),
    )
    model: str | None = None
    messages: Annotated[list[MessageGiven], Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[ToolGiven] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# ---- answers


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobBody(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(TypedDict):
    content: list[TokenLogprobBody]


class CallFunction(TypedDict):
    name: str
    arguments: str


class CallBody(TypedDict):
    index: NotRequired[int]
    id: str
    type: Literal["function"]
    function: CallFunction


class MessageBody(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallBody]]


class Choice(TypedDict):
    index: int
    message: MessageBody
    logprobs: Logprobs | None
    finish_reason: Finish


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody

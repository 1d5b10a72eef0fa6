"""Anthropic's /v1/messages."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from typing_extensions import TypedDict

from tandem.errors import RequestError
from tandem.server.core.content_blocks import ContentBlock, block_events, content_blocks
from tandem.server.core.generation import (
    GenerationRequest,
    GenerationUsage,
    Message,
    Tool,
    named_tool,
    sampling_params,
)
from tandem.server.core.serving import Server, get_server
from tandem.server.http import errors
from tandem.server.http.request_body import JSONRoute, Natural, Positive, StrictModel, drop_none
from tandem.server.http.streaming import cancel_on_disconnect, sse_event, stream_response
from tandem.server.openai.types import ERRORS as OPENAI_ERRORS
from tandem.server.openai.types import EVENTS, new_id

router = APIRouter(route_class=JSONRoute, tags=["Anthropic"])
ERRORS = {status: {**about, "model": errors.AnthropicErrorBody} for status, about in OPENAI_ERRORS.items()}
ABOUT = frozenset(
    {"metadata", "service_tier", "cache_control", "inference_geo", "diagnostics", "speed", "user_profile_id",
     "workspace_id"}
)  # fmt: skip
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

# ---- requests


class ContentBlockParam(StrictModel):
    """A block of a message. Which fields it has depends on its type."""

    ignored = frozenset({"cache_control", "citations", "signature", "caller"})
    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlockParam] | None = None
    is_error: bool | None = None


class MessageParam(StrictModel):
    role: Literal["user", "assistant"]
    content: str | list[ContentBlockParam]


class ToolParam(StrictModel):
    ignored = frozenset(
        {"cache_control", "input_examples", "allowed_callers", "eager_input_streaming", "defer_loading"}
    )
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictModel):
    ignored = frozenset({"budget_tokens", "display"})
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(StrictModel):
    ignored = ABOUT
    model: str | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: str | list[ContentBlockParam] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesRequest(CountRequest):
    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(max_length=64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Natural | None = None


# ---- answers


class UsageBody(TypedDict):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class MessageBody(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: UsageBody


class Count(TypedDict):
    input_tokens: int


@router.post("/v1/messages", response_model=MessageBody, responses=EVENTS | ERRORS)
async def messages(request: Request, body: MessagesRequest) -> Response:
    """Answers a conversation; with `stream`, as server-sent events. A last message of the assistant is gone on with."""
    server = get_server(request)
    generation = generation_request(body)
    generation.params = drop_none(
        max_tokens=body.max_tokens,
        **sampling_params(body.temperature, body.top_p, body.top_k),
        stop=body.stop_sequences or None,
        **generation.params,
    )
    generation.model = server.model_name(generation.model)
    if body.stream:
        return await stream_response(request, _events(server, generation), "text/event-stream")
    [answer] = await cancel_on_disconnect(request, server.generate(generation))
    found = _message(generation.model, _usage(answer.usage))
    found["content"] = [_block(block, block.text) for block in content_blocks(answer)]
    found["stop_reason"] = _stop_reason(answer.finish, answer.stopped_by)
    found["stop_sequence"] = answer.stopped_by
    return JSONResponse(found)


@router.post("/v1/messages/count_tokens", response_model=Count, responses=ERRORS)
async def count_tokens(request: Request, body: CountRequest) -> Response:
    """How many tokens a conversation has, tools and template included."""
    return JSONResponse(Count(input_tokens=await get_server(request).count(generation_request(body))))


# ---- translation


def generation_request(body: CountRequest) -> GenerationRequest:
    """All but how tokens are drawn."""
    choice = body.tool_choice or ToolChoice(type="auto")
    tools = [
        Tool(tool.name, tool.description or "", tool.input_schema, bool(tool.strict))
        for tool in body.tools or []
    ]
    if choice.type == "tool":
        tools = named_tool(tools, choice.name)
    config = body.output_config or OutputConfig()
    form = body.output_format or config.format
    system = [{"role": "system", "content": _text(body.system, "system")}] if body.system else []
    thinks = body.thinking.type != "disabled" if body.thinking else None
    return GenerationRequest(
        body.model,
        messages=system + [one for found in body.messages for one in _messages(found)],
        params={"json_schema": form.schema_} if form else {},
        tools=tools,
        tool_choice={"any": "required", "tool": "required"}.get(choice.type, choice.type),
        parallel_tools=not choice.disable_parallel_tool_use and choice.type != "tool",
        template=drop_none(enable_thinking=thinks, reasoning_effort=config.effort),
        continue_last=True,
    )


def _messages(found: MessageParam) -> list[Message]:
    """What one of Anthropic's messages is to templates: results of tools are messages of their own."""
    if isinstance(found.content, str):
        return [{"role": found.role, "content": found.content}]
    results: list[Message] = []
    texts: list[ContentBlockParam] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in found.content:
        if block.type == "tool_result":
            text = _text(block.content or "", "tool_result")
            results.append({"role": "tool", "content": text, **drop_none(tool_call_id=block.tool_use_id)})
        elif block.type == "tool_use":
            function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            texts.append(block)
    if not texts and not calls and results:
        return results
    more = drop_none(tool_calls=calls or None, reasoning_content="\n".join(thoughts) or None)
    return [*results, {"role": found.role, "content": _text(texts, "content"), **more}]


def _text(content: str | list[ContentBlockParam], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise RequestError(f"{where}: blocks of the kind {block.type[:40]!r} are not supported here")
    return "\n".join(block.text or "" for block in content)


def _message(model: str, usage: UsageBody) -> MessageBody:
    return MessageBody(
        id=new_id("msg_"), type="message", role="assistant", model=model, content=[], stop_reason=None,
        stop_sequence=None, usage=usage,
    )  # fmt: skip


def _block(block: ContentBlock, text: str) -> dict[str, Any]:
    if block.call:
        call = block.call
        return {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": call.as_object() if text else {},
        }
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _stop_reason(finish: str, stopped_by: str | None) -> str:
    return "stop_sequence" if stopped_by is not None else STOP_REASONS[finish]


def _usage(usage: GenerationUsage) -> UsageBody:
    return UsageBody(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        cache_creation_input_tokens=0,
    )


DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


async def _events(server: Server, generation: GenerationRequest) -> AsyncGenerator[str, None]:
    def sent(type: str, **values: Any) -> str:
        return sse_event({"type": type, **values}, type)

    begun = False
    async with aclosing(block_events(server.stream(generation))) as found:
        async for change in found:
            index = change.block.index
            if not begun:
                begun, usage = True, _usage(GenerationUsage(change.delta.prompt_tokens, 0, 0.0, 0.0))
                yield sent("message_start", message=_message(generation.model or "", usage))
            if change.what == "begin":
                yield sent("content_block_start", index=index, content_block=_block(change.block, ""))
            elif change.what == "more":
                kind, key = DELTAS[change.block.kind]
                yield sent("content_block_delta", index=index, delta={"type": kind, key: change.text})
            elif change.what == "end":
                yield sent("content_block_stop", index=index)
            elif change.delta.finish and change.delta.usage:
                stopped_by = change.delta.stopped_by
                reason = _stop_reason(change.delta.finish, stopped_by)
                delta = {"stop_reason": reason, "stop_sequence": stopped_by}
                yield sent("message_delta", delta=delta, usage=_usage(change.delta.usage))
    yield sent("message_stop")

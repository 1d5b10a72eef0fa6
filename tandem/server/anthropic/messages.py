"""Anthropic's /v1/messages. The file to copy for a new API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from typing_extensions import TypedDict

from tandem.errors import RequestError
from tandem.server.anthropic.error_body import AnthropicErrorBody
from tandem.server.core.content_blocks import ContentBlock, block_events, content_blocks
from tandem.server.core.images import Content, from_base64, from_url
from tandem.server.core.output_parser import GenerationUsage
from tandem.server.core.prompt import GenerationRequest, given_params, sampling_params
from tandem.server.core.serving import Server, get_server
from tandem.server.core.tool_calls import Message, Tool, named_tools
from tandem.server.http.background import run_inline_if_small
from tandem.server.http.bodies import (
    EVENTS,
    AnyObject,
    JSONRoute,
    Natural,
    Positive,
    StrictModel,
    cancel_on_disconnect,
    drop_none,
    sse_event,
    stream_response,
)
from tandem.server.openai.error_body import ERRORS as OPENAI_ERRORS

router = APIRouter(route_class=JSONRoute, tags=["Anthropic"])
ERRORS = {status: {**about, "model": AnthropicErrorBody} for status, about in OPENAI_ERRORS.items()}
IGNORED = frozenset(
    {
        "metadata",
        "service_tier",
        "cache_control",
        "inference_geo",
        "diagnostics",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

# ---- requests


class ImageSource(StrictModel):
    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ContentBlockParam(StrictModel):
    """A content block of a message. Its type determines which fields it has."""

    ignored = frozenset({"cache_control", "citations", "signature", "caller"})
    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"]
    source: ImageSource | None = None
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: AnyObject | None = None
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
    input_schema: AnyObject
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
    schema_: AnyObject = Field(alias="schema")


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(StrictModel):
    ignored = IGNORED
    model: str | None = None
    messages: Annotated[list[MessageParam], Field(fail_fast=True, min_length=1)]
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


# ---- responses


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
    """Generates a response to a conversation; with `stream`, as server-sent events. A final assistant message is
    continued (prefill)."""
    server = get_server(request)
    generation = await run_inline_if_small(generation_request, body)
    generation.params = drop_none(
        max_tokens=body.max_tokens,
        **sampling_params(body.temperature, body.top_p, body.top_k),
        stop=body.stop_sequences or None,
        **generation.params,
    )
    generation.model, generation.given = server.model_name(generation.model), given_params(body)
    if body.stream:
        return await stream_response(request, _events(server, generation), "text/event-stream")
    [result] = await cancel_on_disconnect(request, server.generate(generation))
    message = _message(generation.model, _usage(result.usage))
    message["content"] = [_block(block, block.text) for block in content_blocks(result)]
    message["stop_reason"] = _stop_reason(result.finish_reason, result.stop_string)
    message["stop_sequence"] = result.stop_string
    return JSONResponse(message)


@router.post("/v1/messages/count_tokens", response_model=Count, responses=ERRORS)
async def count_tokens(request: Request, body: CountRequest) -> Response:
    """The number of tokens of a conversation, with its tools and chat template."""
    generation = await run_inline_if_small(generation_request, body)
    return JSONResponse(Count(input_tokens=await get_server(request).count(generation)))


# ---- translation to and from GenerationRequest, Delta and GenerationResult


def generation_request(body: CountRequest) -> GenerationRequest:
    """The request without its sampling parameters."""
    choice = body.tool_choice or ToolChoice(type="auto")
    tools = [
        Tool(tool.name, tool.description or "", tool.input_schema, bool(tool.strict))
        for tool in body.tools or []
    ]
    if choice.type == "tool":
        tools = named_tools(tools, choice.name)
    config = body.output_config or OutputConfig()
    format = body.output_format or config.format
    system = [{"role": "system", "content": _text(body.system, "system")}] if body.system else []
    thinks = body.thinking.type != "disabled" if body.thinking else None
    return GenerationRequest(
        body.model,
        messages=system + [message for param in body.messages for message in _messages(param)],
        params={"json_schema": format.schema_} if format else {},
        tools=tools,
        tool_choice={"any": "required", "tool": "required"}.get(choice.type, choice.type),
        parallel_tool_calls=not choice.disable_parallel_tool_use and choice.type != "tool",
        template_kwargs=drop_none(enable_thinking=thinks, reasoning_effort=config.effort),
        continue_final_message=True,
    )


def _messages(param: MessageParam) -> list[Message]:
    """One API message as messages of the chat template, in which each tool result is a message."""
    if isinstance(param.content, str):
        return [{"role": param.role, "content": param.content}]
    results: list[Message] = []
    texts: list[ContentBlockParam] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for block in param.content:
        if block.type == "tool_result":
            content = _content(block.content or "", "tool_result")
            results.append({"role": "tool", "content": content, **drop_none(tool_call_id=block.tool_use_id)})
        elif block.type == "tool_use":
            function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            texts.append(block)
    if not texts and not calls and results:
        return results
    more = drop_none(tool_calls=calls or None, reasoning_content="\n".join(reasoning) or None)
    return [*results, {"role": param.role, "content": _content(texts, "content"), **more}]


def _content(content: str | list[ContentBlockParam], where: str) -> Content:
    if isinstance(content, str) or not any(block.type == "image" for block in content):
        return _text(content, where)
    return [
        _image(block.source) if block.type == "image" else {"type": "text", "text": _text([block], where)}
        for block in content
    ]


def _image(source: ImageSource | None) -> dict[str, Any]:
    if source is None:
        raise RequestError("an image block has no source: give one")
    return from_base64(source.data or "") if source.type == "base64" else from_url(source.url or "")


def _text(content: str | list[ContentBlockParam], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise RequestError(
                f"{where}: content blocks of type {block.type[:40]!r} are not supported here: remove them"
            )
    return "\n".join(block.text or "" for block in content)


def _message(model: str, usage: UsageBody) -> MessageBody:
    return MessageBody(
        id=f"msg_{uuid4().hex}",
        type="message",
        role="assistant",
        model=model,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=usage,
    )


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


def _stop_reason(finish_reason: str, stop_string: str | None) -> str:
    return "stop_sequence" if stop_string is not None else STOP_REASONS[finish_reason]


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
    def sse(type: str, **values: Any) -> str:
        return sse_event({"type": type, **values}, type)

    started = False
    async with aclosing(block_events(server.stream(generation))) as events:
        async for event in events:
            index, delta = event.block.index, event.delta
            if not started:
                started, usage = True, _usage(GenerationUsage(delta.prompt_tokens, 0, 0.0, 0.0))
                yield sse("message_start", message=_message(generation.model or "", usage))
            if event.type == "start":
                yield sse("content_block_start", index=index, content_block=_block(event.block, ""))
            elif event.type == "delta":
                kind, key = DELTAS[event.block.kind]
                yield sse("content_block_delta", index=index, delta={"type": kind, key: event.text})
            elif event.type == "stop":
                yield sse("content_block_stop", index=index)
            elif delta.finish_reason and delta.usage:
                reason = _stop_reason(delta.finish_reason, delta.stop_string)
                stop = {"stop_reason": reason, "stop_sequence": delta.stop_string}
                yield sse("message_delta", delta=stop, usage=_usage(delta.usage))
    yield sse("message_stop")

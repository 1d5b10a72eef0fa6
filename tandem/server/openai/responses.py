"""OpenAI's /v1/responses without stored responses: each request contains the whole conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from typing_extensions import TypedDict

from tandem.server.core.content_blocks import BlockEvent, ContentBlock, block_events, content_blocks
from tandem.server.core.output_parser import GenerationUsage
from tandem.server.core.prompt import WHOLE_CONTEXT, GenerationRequest, sampling_params
from tandem.server.core.serving import Server, get_server
from tandem.server.core.tool_calls import Message, Tool, named_tool
from tandem.server.http.background import run_inline_if_small
from tandem.server.http.bodies import (
    EVENTS,
    AnyObject,
    JSONRoute,
    Positive,
    StrictModel,
    cancel_on_disconnect,
    drop_none,
    sse_event,
    stream_response,
)
from tandem.server.openai.chat import IGNORED, new_id, now
from tandem.server.openai.error_body import ERRORS

router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])

# ---- requests


class Part(StrictModel):
    ignored = frozenset({"annotations", "logprobs"})
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class MessageItem(StrictModel):
    ignored = frozenset({"id", "status", "phase"})
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class FunctionCallItem(StrictModel):
    ignored = frozenset({"id", "status", "namespace", "caller"})
    type: Literal["function_call"]
    call_id: str | None = None
    name: str
    arguments: str


class FunctionCallOutputItem(StrictModel):
    ignored = frozenset({"id", "status", "caller"})
    type: Literal["function_call_output"]
    call_id: str | None = None
    output: str | list[Part]


class ReasoningItem(StrictModel):
    ignored = frozenset({"id", "status", "encrypted_content"})
    type: Literal["reasoning"]
    content: list[Part] | None = None
    summary: list[Part] | None = None


class ToolParam(StrictModel):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: AnyObject | None = None
    strict: bool | None = None


class NamedTool(StrictModel):
    type: Literal["function"]
    name: str


class TextFormat(StrictModel):
    ignored = frozenset({"name", "description", "strict"})
    type: Literal["text", "json_object", "json_schema"]
    schema_: AnyObject | None = Field(None, alias="schema")


class TextConfig(StrictModel):
    neutral = (("verbosity", "medium"),)
    format: TextFormat | None = None


class Reasoning(StrictModel):
    ignored = frozenset({"summary", "generate_summary"})
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponsesRequest(StrictModel):
    ignored = IGNORED | {"include", "max_tool_calls", "stream_options", "client_metadata"}
    neutral = (("truncation", "disabled"), ("background", False), ("top_logprobs", 0))
    model: str | None = None
    input: (
        str
        | Annotated[
            list[MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem], Field(min_length=1)
        ]
    )
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: AnyObject | None = None
    stream: bool | None = None


# ---- responses


class ResponseBody(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    error: None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]


@router.post("/responses", include_in_schema=False)
@router.post("/v1/responses", response_model=ResponseBody, responses=EVENTS | ERRORS)
async def responses(request: Request, body: ResponsesRequest) -> Response:
    """Generates a response to a conversation; with `stream`, as server-sent events."""
    server = get_server(request)
    generation = await run_inline_if_small(generation_request, body)
    generation.model = server.model_name(generation.model)
    if body.stream:
        return await stream_response(request, _events(server, generation, body), "text/event-stream")
    [result] = await cancel_on_disconnect(request, server.generate(generation))
    response = _response(body, generation.model)
    response["output"] = [_item(block, new_id(PREFIXES[block.kind])) for block in content_blocks(result)]
    return JSONResponse(_finish(response, result.finish_reason, result.usage))


# ---- translation to and from GenerationRequest, Delta and GenerationResult

PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


def generation_request(body: ResponsesRequest) -> GenerationRequest:
    params = sampling_params(body.temperature, body.top_p)
    params["max_tokens"] = body.max_output_tokens or WHOLE_CONTEXT
    format = body.text.format if body.text and body.text.format else None
    if format and format.type != "text":
        params["json_schema"] = {"type": "object"} if format.type == "json_object" else format.schema_ or {}
    tools = [
        Tool(one.name, one.description or "", **drop_none(parameters=one.parameters, strict=one.strict))
        for one in body.tools or []
    ]
    name = body.tool_choice.name if isinstance(body.tool_choice, NamedTool) else None
    if name is not None:
        tools = named_tool(tools, name)
    effort = body.reasoning.effort if body.reasoning else None
    template_kwargs = {"enable_thinking": effort != "none", "reasoning_effort": effort} if effort else {}
    return GenerationRequest(
        body.model,
        messages=_messages(body),
        params=params,
        tools=tools,
        tool_choice="required" if name else str(body.tool_choice or "auto"),
        parallel_tool_calls=body.parallel_tool_calls is not False and name is None,
        template_kwargs=template_kwargs,
    )


def _messages(body: ResponsesRequest) -> list[Message]:
    """The conversation for the chat template, which has tool calls and reasoning in the assistant's message."""
    messages: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    reasoning: dict[str, str] = {}
    for item in body.input:
        if isinstance(item, ReasoningItem):
            reasoning = {"reasoning_content": _text(item.content or item.summary or "")}
        elif isinstance(item, FunctionCallOutputItem):
            message = {"role": "tool", "content": _text(item.output), **drop_none(tool_call_id=item.call_id)}
            messages.append(message)
        elif isinstance(item, FunctionCallItem):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", **reasoning})
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            messages[-1].setdefault("tool_calls", []).append({"type": "function", **call})
        else:
            role = "system" if item.role == "developer" else item.role
            message = {"role": role, "content": _text(item.content)}
            messages.append({**message, **reasoning} if role == "assistant" else message)
            reasoning = {}
    return messages


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _response(body: ResponsesRequest, model: str) -> ResponseBody:
    """The response before generation; most of it repeats the request, as clients expect."""
    text = body.text.model_dump(by_alias=True) if body.text else {"format": {"type": "text"}}
    chosen = body.tool_choice or "auto"
    choice = chosen.model_dump() if isinstance(chosen, NamedTool) else chosen
    return ResponseBody(
        id=new_id("resp_"),
        object="response",
        created_at=now(),
        status="in_progress",
        model=model,
        output=[],
        usage=None,
        incomplete_details=None,
        error=None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=None,
        reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        store=False,
        temperature=body.temperature,
        text=text,
        tool_choice=choice,
        tools=[one.model_dump() for one in body.tools or []],
        top_p=body.top_p,
        truncation="disabled",
    )


def _finish(response: ResponseBody, finish_reason: str, usage: GenerationUsage) -> ResponseBody:
    is_cut = finish_reason == "length"
    response["status"] = "incomplete" if is_cut else "completed"
    response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
    response["usage"] = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
    return response


def _item(block: ContentBlock, id: str, *, done: bool = True) -> dict[str, Any]:
    """A content block as an output item; empty unless `done`."""
    status = "completed" if done else "in_progress"
    if block.call:
        arguments = block.text if done else ""
        call = {"call_id": block.call.id, "name": block.call.name, "arguments": arguments}
        return {"id": id, "type": "function_call", "status": status, **call}
    content = [_part(block, block.text)] if done else []
    if block.kind == "reasoning":
        return {"id": id, "type": "reasoning", "summary": [], "content": content, "status": status}
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(block: ContentBlock, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def _events(
    server: Server, generation: GenerationRequest, body: ResponsesRequest
) -> AsyncGenerator[str, None]:
    numbers, response = count(), _response(body, generation.model or "")
    id = ""

    def sse(type: str, **values: Any) -> str:
        return sse_event({"type": type, "sequence_number": next(numbers), **values}, type)

    async with aclosing(block_events(server.stream(generation))) as events:
        async for event in events:
            if not id:
                yield sse("response.created", response=response)
                yield sse("response.in_progress", response=response)
            if event.type == "start" or not id:
                id = new_id(PREFIXES[event.block.kind])
            if event.type == "finish" and event.delta.usage:
                _finish(response, event.delta.finish_reason or "", event.delta.usage)
                yield sse(f"response.{response['status']}", response=response)
                return
            for type, values in _block_event(event, id):
                yield sse(type, output_index=event.block.index, **values)
            if event.type == "stop":
                response["output"].append(_item(event.block, id))


def _block_event(event: BlockEvent, id: str) -> list[tuple[str, dict[str, Any]]]:
    """(type, fields) of the API's events for one event of a content block."""
    block, place = event.block, {"item_id": id, "content_index": 0}
    if block.call:
        place = {"item_id": id}
    stem = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[
        block.kind
    ]
    logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
    if event.type == "delta":
        return [(f"response.{stem}.delta", {**place, "delta": event.text, **logprobs})]
    if event.type == "start":
        added = [("response.output_item.added", {"item": _item(block, id, done=False)})]
        return (
            added
            if block.call
            else [*added, ("response.content_part.added", {**place, "part": _part(block, "")})]
        )
    item = ("response.output_item.done", {"item": _item(block, id)})
    if block.call:
        return [(f"response.{stem}.done", {**place, "name": block.call.name, "arguments": block.text}), item]
    part = ("response.content_part.done", {**place, "part": _part(block, block.text)})
    return [(f"response.{stem}.done", {**place, "text": block.text, **logprobs}), part, item]

"""OpenAI's /v1/responses. A response is stored with its conversation, unless `store` is false; a later request goes on
from it by `previous_response_id`, or by the conversation (conversations.py) that both name."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from itertools import count
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from tandem.errors import RequestError, ResponseNotFoundError, ResponseStoreError
from tandem.server.core.content_blocks import BlockEvent, ContentBlock, block_events, content_blocks
from tandem.server.core.images import Content, content_of, from_url, joined, text_of
from tandem.server.core.output_parser import GenerationUsage
from tandem.server.core.prompt import (
    WHOLE_CONTEXT,
    GenerationRequest,
    given_params,
    sampling_params,
    with_verbosity,
)
from tandem.server.core.response_store import Item, Page, StoredItem, check_size, parsed, stored_items
from tandem.server.core.serving import Server, get_server
from tandem.server.core.tool_calls import Message, Tool, named_tools
from tandem.server.http.background import MEDIUM, add_stored, run_in_large_thread, run_inline_if_small
from tandem.server.http.bodies import (
    EVENTS,
    AnyObject,
    JSONRoute,
    Positive,
    StrictModel,
    cancel_on_disconnect,
    drop_none,
    sse_event,
    sse_text,
    stream_response,
    written,
)
from tandem.server.http.errors import LOG
from tandem.server.openai.chat import IGNORED, InputTokens, new_id, now
from tandem.server.openai.error_body import ERRORS

router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])
T = TypeVar("T")
Limit = Annotated[int, Query(ge=1, le=100)]  # items of a list
Order = Literal["asc", "desc"]

# ---- requests


class Part(StrictModel):
    ignored = frozenset({"annotations", "logprobs"})
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "input_image"]
    text: str | None = None
    image_url: str | None = None
    detail: str | None = None


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


class AllowedTools(StrictModel):
    """Only some of the tools may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=1000)]


class TextFormat(StrictModel):
    ignored = frozenset({"name", "description", "strict"})
    type: Literal["text", "json_object", "json_schema"]
    schema_: AnyObject | None = Field(None, alias="schema")


class TextConfig(StrictModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(StrictModel):
    ignored = frozenset({"summary", "generate_summary"})
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class CompactionItem(StrictModel):
    """The summary of a conversation (compaction.py)."""

    ignored = frozenset({"id", "created_by"})
    type: Literal["compaction"]
    encrypted_content: str

    @property
    def text(self) -> str:
        try:
            return base64.b64decode(self.encrypted_content, validate=True).decode()
        except ValueError:
            raise RequestError(
                "a compaction item is not one of this server: send the conversation instead"
            ) from None


def encoded_summary(text: str) -> str:
    """The content of a compaction item. It is not encrypted: it is the user's own."""
    return base64.b64encode(text.encode()).decode()


InputItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | CompactionItem
InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=10_000)]
ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


class ConversationParam(StrictModel):
    id: str


class ResponsesRequest(StrictModel):
    ignored = (IGNORED - {"store"}) | {"include", "max_tool_calls", "stream_options", "client_metadata"}
    neutral = (("background", False), ("top_logprobs", 0))
    model: str | None = None
    input: str | InputItems
    previous_response_id: str | None = None
    conversation: str | ConversationParam | None = None
    store: bool | None = None  # default: True
    truncation: Literal["auto", "disabled"] | None = None  # auto: without the oldest messages if need be
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: AnyObject | None = None
    stream: bool | None = None

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationParam) else self.conversation


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
    previous_response_id: str | None
    conversation: dict[str, str] | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    dropped_messages: int  # by truncation; not of OpenAI


@router.post("/responses", include_in_schema=False)
@router.post("/v1/responses", response_model=ResponseBody, responses=EVENTS | ERRORS)
async def responses(request: Request, body: ResponsesRequest) -> Response:
    """Generates a response to a conversation; with `stream`, as server-sent events."""
    server = get_server(request)
    history = await stored_history(server, body)
    generation, new = await run_inline_if_small(prepared, body, history)
    generation.model = server.model_name(generation.model)
    if body.stream:
        events = _events(server, generation, body, history, new)
        return await stream_response(request, events, "text/event-stream")
    [result] = await cancel_on_disconnect(request, server.generate(generation))
    response = _response(body, generation.model)
    response["output"] = [_item(block, new_id(PREFIXES[block.kind])) for block in content_blocks(result)]
    response["dropped_messages"] = generation.dropped_messages
    _finish(response, result.finish_reason, result.usage)
    text = await _keep(server, body, response, history, new)
    return await raw_json(text)


class InputTokensRequest(ResponsesRequest):
    """As a request for a response; what cannot change its prompt is ignored."""


@router.post("/v1/responses/input_tokens", response_model=InputTokens, responses=ERRORS)
async def input_tokens(request: Request, body: InputTokensRequest) -> InputTokens:
    """The number of tokens of the prompt that a request would have."""
    server = get_server(request)
    generation, _ = await run_inline_if_small(prepared, body, await stored_history(server, body))
    return InputTokens(object="response.input_tokens", input_tokens=await server.count(generation))


@router.get("/v1/responses/{response_id}", response_model=dict[str, Any], responses=ERRORS)
async def retrieve(request: Request, response_id: str) -> Response:
    """A stored response."""
    return await raw_json(await stored("resp_", response_id, get_server(request).responses.body))


class Deleted(TypedDict):
    id: str
    object: str
    deleted: bool


@router.delete("/v1/responses/{response_id}", responses=ERRORS)
async def delete(request: Request, response_id: str) -> Deleted:
    """Forgets a stored response. Responses that continue it stay."""
    await stored("resp_", response_id, get_server(request).responses.delete)
    return Deleted(id=response_id, object="response.deleted", deleted=True)


class ItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


@router.get("/v1/responses/{response_id}/input_items", response_model=ItemList, responses=ERRORS)
async def input_items(
    request: Request, response_id: str, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> Response:
    """The conversation before a stored response."""
    pages = partial(
        get_server(request).responses.page, limit=limit, after=after, newest_first=order == "desc"
    )
    return await item_list(await stored("resp_", response_id, pages))


# ---- stored responses and conversations


async def stored(prefix: str, id: str, find: Callable[[str], Awaitable[T | None]]) -> T:
    """What `find` returns for a stored response or conversation, whose id begins with `prefix`."""
    found = await find(id) if id.startswith(prefix) else None
    if found is None or found is False:
        kind = "response" if prefix == "resp_" else "conversation"
        raise ResponseNotFoundError(
            f"no stored {kind} has the id {id[:80]}: it was not stored, was deleted, or was forgotten for newer ones"
        )
    return found


async def raw_json(text: str) -> Response:
    """A response that is JSON already: it may have megabytes."""
    data = await run_in_large_thread(text.encode) if len(text) > MEDIUM else text.encode()
    return Response(data, media_type="application/json")


async def item_list(page: Page | None) -> Response:
    items, has_more = page or Page([], has_more=False)
    ids: list[str | None] = [item.id for item in items] or [None]
    ends = json.dumps({"first_id": ids[0], "last_id": ids[-1], "has_more": has_more})
    return await raw_json(f'{{"object":"list","data":[{",".join(item.text for item in items)}],{ends[1:]}')


def new_items(given: str | list[InputItem]) -> list[Item]:
    """The items of a request, as they are stored."""
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"id": new_id("msg_"), "type": "message", "role": "user", "content": content}]
    items = [item.model_dump(exclude_none=True) for item in given]
    return [{"id": new_id("item_"), **item, "type": item.get("type", "message")} for item in items]


async def stored_history(server: Server, body: ResponsesRequest) -> list[StoredItem]:
    """The stored items that come before those of the request."""
    if body.previous_response_id and body.conversation_id:
        raise RequestError("previous_response_id and conversation exclude each other: use one")
    id, prefix = (
        (body.conversation_id, "conv_") if body.conversation_id else (body.previous_response_id, "resp_")
    )
    items = await stored(prefix, id, server.responses.items) if id else None
    add_stored(sum(len(item.text) for item in items or ()))
    return items or []


def prepared(body: ResponsesRequest, history: list[StoredItem]) -> tuple[GenerationRequest, list[StoredItem]]:
    """The request for the model, and the new items as they will be stored."""
    items, new = new_items(body.input), list[StoredItem]()
    if body.store is not False or body.conversation_id:
        new = stored_items(items)
        check_size([*history, *new])  # before the work
    try:
        before = ITEMS.validate_python(parsed(history))
    except (ValueError, RecursionError):
        raise ResponseStoreError("the stored conversation is damaged: begin a new one") from None
    return generation_request(body, [*before, *ITEMS.validate_python(items)]), new


async def _keep(
    server: Server,
    body: ResponsesRequest,
    response: ResponseBody,
    history: list[StoredItem],
    new: list[StoredItem],
) -> str:
    """Stores a response, and adds it and the `new` items before it to its conversation; returns its JSON. If that
    fails, it is answered all the same, and says that it is not stored."""
    output = stored_items(response["output"])
    if body.conversation_id and not await _stores(
        server.responses.append(body.conversation_id, [*new, *output])
    ):
        response["conversation"] = None
    text = await written(response)
    if body.store is False:
        return text
    entry = server.responses.put(response["id"], text, [*history, *new, *output], len(output))
    if await _stores(entry):
        return text
    response["store"] = False
    return await written(response)


async def _stores(work: Awaitable[bool | None]) -> bool:
    try:
        return await work is not False
    except (RequestError, ResponseStoreError) as error:
        LOG.warning("a response is not stored: %s", error)
        return False


# ---- translation to and from GenerationRequest, Delta and GenerationResult

PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


def generation_request(body: ResponsesRequest, items: list[InputItem]) -> GenerationRequest:
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
        tools = named_tools(tools, name)
    choice = "required" if name else str(body.tool_choice or "auto")
    if isinstance(body.tool_choice, AllowedTools):
        tools = named_tools(tools, *(each.name for each in body.tool_choice.tools))
        choice = body.tool_choice.mode
    effort = body.reasoning.effort if body.reasoning else None
    template_kwargs = {"enable_thinking": effort != "none", "reasoning_effort": effort} if effort else {}
    return GenerationRequest(
        body.model,
        messages=with_verbosity(_messages(body, items), body.text.verbosity if body.text else None),
        params=params,
        given=given_params(body),
        tools=tools,
        tool_choice=choice,
        truncate=body.truncation == "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False and name is None,
        template_kwargs=template_kwargs,
    )


def _messages(body: ResponsesRequest, items: list[InputItem]) -> list[Message]:
    """The conversation for the chat template, which has tool calls and reasoning in the assistant's message."""
    messages: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    reasoning: dict[str, str] = {}
    summaries: list[str] = []  # joined at the end: a request may have thousands
    for item in items:
        if isinstance(item, CompactionItem):
            if not summaries and (not messages or messages[0]["role"] != "system"):
                messages.insert(0, {"role": "system", "content": ""})
            summaries.append(f"Summary of the conversation so far:\n{item.text}")
        elif isinstance(item, ReasoningItem):
            said = _content(item.content or item.summary or "")
            reasoning = {"reasoning_content": text_of(said, "reasoning")}
        elif isinstance(item, FunctionCallOutputItem):
            content = _content(item.output)
            messages.append({"role": "tool", "content": content, **drop_none(tool_call_id=item.call_id)})
        elif isinstance(item, FunctionCallItem):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1], reasoning = {**reasoning, **messages[-1]}, {}
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            messages[-1].setdefault("tool_calls", []).append({"type": "function", **call})
        else:
            role = "system" if item.role == "developer" else item.role
            message = {"role": role, "content": _content(item.content)}
            messages.append({**message, **reasoning} if role == "assistant" else message)
            reasoning = {}
    if summaries:
        before = messages[0]["content"]
        text = "\n\n".join(["", *summaries] if before else summaries)
        messages[0] = {**messages[0], "content": joined(before, text)}
    return messages


def _content(content: str | list[Part]) -> Content:
    return content if isinstance(content, str) else content_of([_part_of(part) for part in content])


def _part_of(part: Part) -> dict[str, Any]:
    if part.type == "input_image":
        if part.image_url is None:
            raise RequestError("input_image has no image_url: give a data URL")
        return from_url(part.image_url)
    if part.text is None:
        raise RequestError(f"a part of type {part.type!r} has no text: give it")
    return {"type": "text", "text": part.text}


def _response(body: ResponsesRequest, model: str) -> ResponseBody:
    """The response before generation; most of it repeats the request, as clients expect."""
    text = body.text.model_dump(by_alias=True) if body.text else {"format": {"type": "text"}}
    chosen = body.tool_choice or "auto"
    choice = chosen if isinstance(chosen, str) else chosen.model_dump()
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
        previous_response_id=body.previous_response_id,
        conversation={"id": body.conversation_id} if body.conversation_id else None,
        reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        store=body.store is not False,
        temperature=body.temperature,
        text=text,
        tool_choice=choice,
        tools=[one.model_dump() for one in body.tools or []],
        top_p=body.top_p,
        truncation=body.truncation or "disabled",
        dropped_messages=0,
    )


def _finish(response: ResponseBody, finish_reason: str, usage: GenerationUsage) -> ResponseBody:
    is_cut = finish_reason == "length"
    response["status"] = "incomplete" if is_cut else "completed"
    response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
    response["usage"] = usage_body(usage)
    return response


def usage_body(usage: GenerationUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


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
    server: Server,
    generation: GenerationRequest,
    body: ResponsesRequest,
    history: list[StoredItem],
    new: list[StoredItem],
) -> AsyncGenerator[str, None]:
    numbers, response = count(), _response(body, generation.model or "")
    id = ""

    def sse(type: str, **values: Any) -> str:
        return sse_event({"type": type, "sequence_number": next(numbers), **values}, type)

    def sse_response(type: str, text: str) -> str:
        return sse_text(f'{{"type":"{type}","sequence_number":{next(numbers)},"response":{text}}}', type)

    async with aclosing(block_events(server.stream(generation))) as events:
        async for event in events:
            if not id:
                response["dropped_messages"] = generation.dropped_messages
                text = await written(response)
                yield sse_response("response.created", text)
                yield sse_response("response.in_progress", text)
            if event.type == "start" or not id:
                id = new_id(PREFIXES[event.block.kind])
            if event.type == "finish" and event.delta.usage:
                _finish(response, event.delta.finish_reason or "", event.delta.usage)
                text = await _keep(server, body, response, history, new)
                yield sse_response(f"response.{response['status']}", text)
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

"""OpenAI's /v1/chat/completions and /v1/models."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tandem.engine.reply import TokenLogprob
from tandem.errors import ModelNotFoundError, RequestError
from tandem.server.generation import (
    WHOLE_CONTEXT,
    Answer,
    Generation,
    Message,
    Piece,
    Spent,
    Tool,
    ToolCall,
    named,
    total,
)
from tandem.server.http.bodies import JSONRoute
from tandem.server.http.fields import given
from tandem.server.http.streaming import event, stream, unless_gone
from tandem.server.openai.chat_types import (
    CallBody,
    CallFunction,
    ChatCompletion,
    ChatRequest,
    Choice,
    FunctionGiven,
    Logprobs,
    MessageBody,
    MessageGiven,
    NamedTool,
    Part,
    ResponseFormat,
    TopLogprob,
)
from tandem.server.openai.types import (
    ERRORS,
    EVENTS,
    ModelCard,
    ModelList,
    new_id,
    now,
    usage_body,
)
from tandem.server.serving import Server, server_of

router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=EVENTS | ERRORS)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answers a conversation; with `stream`, as server-sent events."""
    server = server_of(request)
    wanted = generation(body)
    wanted.model = server.model_name(wanted.model)
    if body.stream:
        return await stream(request, _events(server, wanted, body), "text/event-stream")
    answers = await unless_gone(request, server.answers(wanted))
    return JSONResponse(
        ChatCompletion(
            id=new_id("chatcmpl-"),
            object="chat.completion",
            created=now(),
            model=wanted.model,
            choices=[_choice(index, answer, bool(body.logprobs)) for index, answer in enumerate(answers)],
            usage=usage_body(total([answer.usage for answer in answers])),
        )
    )


@router.get("/v1/models", responses={401: ERRORS[401]})
async def list_models(request: Request) -> ModelList:
    """The models of this server, the first of which is the default."""
    return ModelList(object="list", data=[_card(name) for name in server_of(request).models.names()])


@router.get("/v1/models/{model:path}", responses={401: ERRORS[401], 404: ERRORS[404], 400: ERRORS[400]})
async def show_model(request: Request, model: str) -> ModelCard:
    if model not in server_of(request).models.names():
        raise ModelNotFoundError(f"no model is called {model}")
    return _card(model)


def _card(name: str) -> ModelCard:
    return ModelCard(id=name, object="model", created=0, owned_by="tandem")


# ---- translation


def generation(body: ChatRequest) -> Generation:
    params = body.sampling()
    params["max_tokens"] = body.max_completion_tokens or body.max_tokens or WHOLE_CONTEXT
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs: they are told with logprobs = true")
    if body.logprobs:
        params["logprobs"] = body.top_logprobs or 0
    params.update(_form(body.response_format))
    template = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort:
        template.setdefault("enable_thinking", body.reasoning_effort != "none")
        template.setdefault("reasoning_effort", body.reasoning_effort)
    name = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    tools = [tool(one.function) for one in body.tools or []]
    if name is not None:
        tools = named(tools, name)
    return Generation(
        body.model,
        messages=[message(given) for given in body.messages],
        params=params,
        count=body.n or 1,
        tools=tools,
        tool_choice="required" if name else str(body.tool_choice or "auto"),
        parallel_tools=body.parallel_tool_calls is not False and name is None,
        template=template,
    )


def _form(wanted: ResponseFormat | None) -> dict[str, Any]:
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if wanted.json_schema is None:
        raise RequestError("response_format.json_schema: give the schema")
    return {"json_schema": wanted.json_schema.schema_ or {}}


def tool(function: FunctionGiven) -> Tool:
    more = given(parameters=function.parameters, strict=function.strict)
    return Tool(function.name, function.description or "", **more)


def message(found: MessageGiven) -> Message:
    """As templates know it."""
    role = "system" if found.role == "developer" else found.role
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in found.tool_calls or []
    ]
    return {
        "role": role,
        "content": text_of(found.content),
        **given(
            name=found.name, tool_calls=calls or None, tool_call_id=found.tool_call_id,
            reasoning_content=found.reasoning_content,
        ),
    }  # fmt: skip


def text_of(content: str | list[Part] | None) -> str:
    return "\n".join(part.text for part in content) if isinstance(content, list) else content or ""


def _choice(index: int, answer: Answer, wants_logprobs: bool) -> Choice:
    body = MessageBody(role="assistant", content=answer.text or (None if answer.calls else ""))
    if answer.reasoning:
        body["reasoning_content"] = answer.reasoning
    if answer.calls:
        body["tool_calls"] = [_call(call) for call in answer.calls]
    logprobs = logprobs_body(answer.logprobs) if wants_logprobs else None
    return Choice(index=index, message=body, logprobs=logprobs, finish_reason=answer.finish)  # type: ignore[typeddict-item]


def _call(call: ToolCall) -> CallBody:
    return CallBody(
        id=call.id, type="function", function=CallFunction(name=call.name, arguments=call.arguments)
    )


def logprobs_body(tokens: list[TokenLogprob]) -> Logprobs:
    def one(text: str, logprob: float) -> TopLogprob:
        return TopLogprob(token=text, logprob=max(logprob, -9999.0), bytes=list(text.encode()))

    return Logprobs(
        content=[
            {
                **one(token.text, token.logprob),
                "top_logprobs": [one(text, value) for _, text, value in token.top],
            }
            for token in tokens
        ]
    )


async def _events(server: Server, wanted: Generation, body: ChatRequest) -> AsyncGenerator[str, None]:
    """The answer in chunks; the last but `[DONE]` has the usage, if it was asked for."""
    base = {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion.chunk",
        "created": now(),
        "model": wanted.model,
    }
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    usages: list[Spent] = []
    calls_before = [0] * wanted.count
    begun: set[int] = set()
    async with aclosing(server.run(wanted)) as pieces:
        async for piece in pieces:
            delta: dict[str, Any] = {} if piece.index in begun else {"role": "assistant", "content": ""}
            begun.add(piece.index)
            delta |= _delta(piece, calls_before[piece.index])
            calls_before[piece.index] += len(piece.calls)
            if piece.usage:
                usages.append(piece.usage)
            if delta or piece.finish or piece.logprobs:
                logprobs = logprobs_body(piece.logprobs) if body.logprobs and piece.logprobs else None
                choice = {
                    "index": piece.index,
                    "delta": delta,
                    "logprobs": logprobs,
                    "finish_reason": piece.finish,
                }
                yield event({**base, "choices": [choice], **({"usage": None} if with_usage else {})})
    if with_usage:
        yield event({**base, "choices": [], "usage": usage_body(total(usages))})
    yield "data: [DONE]\n\n"


def _delta(piece: Piece, calls_before: int) -> dict[str, Any]:
    calls: list[Any] = [{"index": calls_before + i, **_call(call)} for i, call in enumerate(piece.calls)]
    if piece.arguments:
        calls.insert(0, {"index": calls_before - 1, "function": {"arguments": piece.arguments}})
    return given(
        content=piece.text or None, reasoning_content=piece.reasoning or None, tool_calls=calls or None
    )

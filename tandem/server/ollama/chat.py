"""Ollama's /api/chat, /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from typing_extensions import TypedDict

from tandem.engine.images import images_in
from tandem.server.core.images import Content, content_of, from_base64
from tandem.server.core.output_parser import Delta, GenerationResult, GenerationUsage
from tandem.server.core.prompt import WHOLE_CONTEXT, GenerationRequest, given_params
from tandem.server.core.serving import Server, get_server
from tandem.server.core.tool_calls import Message, ToolCall
from tandem.server.http.background import run_inline_if_small
from tandem.server.http.bodies import (
    AnyObject,
    Int32,
    JSONRoute,
    Natural,
    Positive,
    StrictModel,
    cancel_on_disconnect,
    drop_none,
    json_line,
    json_response,
    stream_response,
)
from tandem.server.ollama.error_body import OllamaErrorBody
from tandem.server.openai.chat import Seed, StopTexts, TopK, TopLogprobs, logprobs_body, tool
from tandem.server.openai.error_body import ERRORS as OPENAI_ERRORS
from tandem.server.openai.parts import ToolParam

router = APIRouter(route_class=JSONRoute, tags=["Ollama"])
ERRORS = {status: {**about, "model": OllamaErrorBody} for status, about in OPENAI_ERRORS.items()}
MAX_KEEP_ALIVE = 1e9  # seconds; more means for ever
UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
NDJSON = "application/x-ndjson"
LINES: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {NDJSON: {"schema": {"type": "string"}}},
        "description": "The complete response, or a stream",
    }
}
DURATION = r"^(-?\d{1,9}(\.\d{1,9})?(ms|s|m|h))+$"
Duration = float | Annotated[str, Field(pattern=DURATION)]  # seconds, or such as "5m"; negative: for ever

# ---- requests


class Options(StrictModel):
    """Sampling options, with Ollama's defaults. Options about loading are ignored: the server's settings decide."""

    ignored = frozenset(
        {
            "num_ctx",
            "num_batch",
            "num_gpu",
            "num_thread",
            "main_gpu",
            "use_mmap",
            "use_mlock",
            "low_vram",
            "numa",
            "num_keep",
            "f16_kv",
            "vocab_only",
            "logits_all",
        }
    )
    neutral = (
        ("mirostat", 0),
        ("mirostat_tau", 5),
        ("mirostat_eta", 0.1),
        ("tfs_z", 1),
        ("typical_p", 1),
        ("repeat_last_n", -1),
        ("repeat_last_n", 64),
        ("penalize_newline", True),
        ("penalize_newline", False),
    )
    num_predict: Int32 | None = None  # -1: until the context is full
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: TopK | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: StopTexts | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None

    def sampling(self) -> dict[str, Any]:
        """The parameters as SamplingParams takes them."""
        max_tokens = self.num_predict if self.num_predict and self.num_predict > 0 else WHOLE_CONTEXT
        top_k = 40 if self.top_k is None else max(0, self.top_k)
        return drop_none(
            max_tokens=max_tokens,
            temperature=0.8 if self.temperature is None else self.temperature,
            top_k=1 if self.top_p == 0 else top_k,
            top_p=0.9 if self.top_p is None else self.top_p or None,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop or None,
            repeat_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )


class CommonRequest(StrictModel):
    """The fields that chat and generate share."""

    neutral: ClassVar[tuple[tuple[str, Any], ...]] = (("images", []),)
    model: str
    stream: bool | None = None  # default: True
    format: Literal["json", ""] | AnyObject | None = None
    options: Options | None = None
    keep_alive: Duration | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    def generation(self, server: Server, **fields: Any) -> GenerationRequest:
        params = (self.options or Options()).sampling()
        if self.format:
            params["json_schema"] = {"type": "object"} if self.format == "json" else self.format
        if self.logprobs:
            params["logprobs"] = self.top_logprobs or 0
        effort = self.think if isinstance(self.think, str) else None
        thinks = None if self.think is None else bool(self.think)
        template_kwargs = drop_none(enable_thinking=thinks, reasoning_effort=effort)
        name = known_name(server, self.model)
        return GenerationRequest(
            name,
            params=params,
            given=given_params(self.options),
            template_kwargs=template_kwargs,
            keep_alive=_keep_alive(server, self.keep_alive),
            **fields,
        )


class ToolCallFunctionParam(StrictModel):
    ignored = frozenset({"index", "description"})
    name: str
    arguments: AnyObject


class ToolCallParam(StrictModel):
    ignored = frozenset({"id", "type"})
    function: ToolCallFunctionParam


class MessageParam(StrictModel):
    images: list[str] | None = None  # base64
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[ToolCallParam] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(CommonRequest):
    messages: Annotated[list[MessageParam], Field(fail_fast=True)] | None = None
    tools: list[ToolParam] | None = None


class GenerateRequest(CommonRequest):
    neutral = (("template", ""),)
    prompt: str | None = None
    images: list[str] | None = None  # base64
    suffix: str | None = None  # fill-in-the-middle
    # The tokens of the response that this one follows.
    context: Annotated[list[Natural], Field(fail_fast=True)] | None = None
    system: str | None = None
    raw: bool | None = None


class EmbedRequest(StrictModel):
    ignored = frozenset({"options"})
    model: str
    input: str | Annotated[list[str], Field(min_length=1, max_length=2048)]
    truncate: bool | None = None
    keep_alive: Duration | None = None
    dimensions: Positive | None = None


class EmbeddingsRequest(StrictModel):
    """Of the older endpoint, for one text."""

    ignored = frozenset({"options"})
    model: str
    prompt: str
    keep_alive: Duration | None = None


# ---- responses


class Times(TypedDict, total=False):
    total_duration: int  # nanoseconds
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int


class CommonBody(Times):
    model: str
    created_at: str
    done: bool


class ChatBody(CommonBody, total=False):
    message: dict[str, Any]
    logprobs: list[dict[str, Any]]
    done_reason: str


class GenerateBody(CommonBody, total=False):
    response: str
    logprobs: list[dict[str, Any]]
    thinking: str
    done_reason: str
    context: list[int]


class Embeddings(Times):
    model: str
    embeddings: list[list[float]]


class OneEmbedding(TypedDict):
    embedding: list[float]


@router.post("/api/chat", response_model=ChatBody, responses=LINES | ERRORS)
async def chat(request: Request, body: ChatRequest) -> Response:
    """Generates a response to a conversation: as JSON lines, unless `stream` is false."""
    server = get_server(request)
    if not body.messages:
        return await _load_or_unload(server, body, message={"role": "assistant", "content": ""})
    generation = await run_inline_if_small(_chat_request, server, body)
    return await _respond(request, server, generation, body, _chat_body)


@router.post("/api/generate", response_model=GenerateBody, responses=LINES | ERRORS)
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Generates a response to a prompt, with the chat template unless it is `raw`."""
    server = get_server(request)
    if not body.prompt and not body.suffix:
        return await _load_or_unload(server, body, response="")
    if body.suffix:
        generation = body.generation(server, prompt=body.prompt or "", suffix=body.suffix)
    elif body.raw:
        generation = body.generation(server, prompt=[*(body.context or []), body.prompt])
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        user = {"role": "user", "content": _content(body.prompt or "", body.images)}
        generation = body.generation(server, messages=[*system, user], context=body.context or [])
    return await _respond(request, server, generation, body, _generate_body)


@router.post("/api/embed", response_model=Embeddings, responses=ERRORS)
async def embed(request: Request, body: EmbedRequest) -> Response:
    """A normalised vector for each text."""
    server, begin = get_server(request), time.perf_counter()
    texts = [body.input] if isinstance(body.input, str) else body.input
    name = known_name(server, body.model)
    vectors, tokens = await cancel_on_disconnect(
        request,
        server.embed(
            name,
            texts,
            keep_alive=_keep_alive(server, body.keep_alive),
            dimensions=body.dimensions,
            truncate=body.truncate is not False,
        ),
    )
    times = Times(total_duration=_ns(time.perf_counter() - begin), load_duration=0, prompt_eval_count=tokens)
    return await json_response(
        vectors.size, lambda: {"model": body.model, "embeddings": vectors.tolist(), **times}
    )


@router.post("/api/embeddings", responses=ERRORS)
async def embeddings(request: Request, body: EmbeddingsRequest) -> OneEmbedding:
    """A normalised vector for one text."""
    server = get_server(request)
    keep_alive = _keep_alive(server, body.keep_alive)
    work = server.embed(known_name(server, body.model), [body.prompt], keep_alive=keep_alive, truncate=True)
    [vector], _ = await cancel_on_disconnect(request, work)
    return OneEmbedding(embedding=vector.tolist())


# ---- translation to and from GenerationRequest, Delta and GenerationResult


def known_name(server: Server, name: str) -> str:
    """The name of a served model: Ollama's clients add `:latest` to a name without a tag."""
    known = server.known_name(name)
    return known if known in server.models.names() else server.known_name(name.removesuffix(":latest"))


def _keep_alive(server: Server, duration: Duration | None) -> float | None:
    """Seconds that a client's model stays loaded. A server that others share does as its settings say: one client would
    unload the model of all, again and again."""
    return seconds(duration) if server.settings.is_personal else None


def seconds(duration: Duration | None) -> float | None:
    if isinstance(duration, str):
        parts = re.findall(r"(-?\d+(?:\.\d+)?)(ms|s|m|h)", duration)
        duration = sum(float(number) * UNITS[unit] for number, unit in parts)
    return math.inf if duration is not None and not 0 <= duration <= MAX_KEEP_ALIVE else duration


def _chat_request(server: Server, body: ChatRequest) -> GenerationRequest:
    messages = [_message(one) for one in body.messages or []]
    tools = [tool(one.function) for one in body.tools or []]
    return body.generation(server, messages=messages, tools=tools, continue_final_message=True)


def _message(param: MessageParam) -> Message:
    calls = [
        {
            "type": "function",
            "function": {"name": one.function.name, "arguments": json.dumps(one.function.arguments)},
        }
        for one in param.tool_calls or []
    ]
    optional = drop_none(
        tool_calls=calls or None,
        name=param.tool_name,
        tool_call_id=param.tool_call_id,
        reasoning_content=param.thinking,
    )
    return {"role": param.role, "content": _content(param.content or "", param.images), **optional}


def _content(text: str, images: list[str] | None) -> Content:
    """Images come before the text, as in Ollama."""
    return content_of([*map(from_base64, images or ()), {"type": "text", "text": text}])


async def _load_or_unload(server: Server, body: CommonRequest, **empty: Any) -> Response:
    """A request without a prompt loads the model, or unloads it if `keep_alive` is 0. `empty`: the response's body."""
    name, keep = known_name(server, body.model), _keep_alive(server, body.keep_alive)
    if keep == 0:
        server.models.path(name)
        await server.models.unload(name)
    else:
        async with server.models.use(name, keep_alive=keep):
            pass
    reason = "unload" if keep == 0 else "load"
    return JSONResponse(
        {"model": body.model, "created_at": _now(), **empty, "done": True, "done_reason": reason}
    )


def _chat_body(delta: Delta | GenerationResult) -> dict[str, Any]:
    calls = [{"function": {"name": call.name, "arguments": call.as_object()}} for call in delta.tool_calls]
    optional = drop_none(thinking=delta.reasoning or None, tool_calls=calls or None)
    return {"message": {"role": "assistant", "content": delta.text, **optional}, **_logprobs(delta)}


def _generate_body(delta: Delta | GenerationResult) -> dict[str, Any]:
    return {"response": delta.text, **drop_none(thinking=delta.reasoning or None), **_logprobs(delta)}


def _logprobs(delta: Delta | GenerationResult) -> dict[str, Any]:
    return {"logprobs": logprobs_body(delta.logprobs)["content"]} if delta.logprobs else {}


async def _respond(
    request: Request, server: Server, generation: GenerationRequest, body: CommonRequest, to_body: Any
) -> Response:
    base, begin = {"model": body.model}, time.perf_counter()
    if body.stream is not False:
        return await stream_response(request, _lines(server, generation, body, begin, to_body), NDJSON)
    [result] = await cancel_on_disconnect(request, server.generate(generation))
    end = _end(result.finish_reason, result.usage, begin) | _context(generation, body, result.token_ids)
    return await json_response(
        result.logprob_count, lambda: {**base, "created_at": _now(), **to_body(result), **end}
    )


async def _lines(
    server: Server, generation: GenerationRequest, body: CommonRequest, begin: float, to_body: Any
) -> AsyncGenerator[str, None]:
    base, ids = {"model": body.model}, list[int]()
    pending: list[ToolCall] = []  # not sent yet: Ollama's clients expect complete calls
    async with aclosing(server.stream(generation)) as deltas:
        async for delta in deltas:
            if delta.arguments:
                pending[-1].arguments += delta.arguments
            pending += delta.tool_calls
            ids += delta.token_ids
            complete = len(pending) if delta.finish_reason else max(0, len(pending) - 1)
            delta.tool_calls, pending = pending[:complete], pending[complete:]
            if delta.text or delta.reasoning or delta.tool_calls or delta.logprobs:
                yield json_line({**base, "created_at": _now(), **to_body(delta), "done": False})
            if delta.finish_reason and delta.usage:
                end = _end(delta.finish_reason, delta.usage, begin) | _context(generation, body, ids)
                yield json_line({**base, "created_at": _now(), **to_body(Delta()), **end})


def _context(generation: GenerationRequest, body: CommonRequest, ids: list[int]) -> dict[str, Any]:
    """The tokens so far, with which a client may go on; of /api/generate with the chat template only, and without
    images, which tokens cannot say."""
    if not isinstance(body, GenerateRequest) or body.raw or body.suffix or images_in(generation.prompt_ids):
        return {}
    return {"context": [*generation.prompt_ids, *ids]}


def _end(finish_reason: str, usage: GenerationUsage, begin: float) -> dict[str, Any]:
    return {
        "done": True,
        "done_reason": "length" if finish_reason == "length" else "stop",
        "total_duration": _ns(time.perf_counter() - begin),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _ns(usage.first_token_seconds),
        "eval_count": usage.completion_tokens,
        "eval_duration": _ns(usage.decode_seconds),
    }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")

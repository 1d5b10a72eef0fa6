"""Ollama's /api/chat, /api/generate and /api/embed. The models themselves are in ollama_models.py."""

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

from tandem.server.generation import WHOLE_CONTEXT, Answer, Generation, Message, Piece, Spent, ToolCall
from tandem.server.http import errors
from tandem.server.http.bodies import JSONRoute
from tandem.server.http.fields import Fields, Int32, given
from tandem.server.http.streaming import line, stream, unless_gone
from tandem.server.openai.chat import logprobs_body, tool
from tandem.server.openai.chat_types import ToolGiven
from tandem.server.openai.types import ERRORS as OPENAI_ERRORS
from tandem.server.openai.types import Seed, StopTexts, TopK, TopLogprobs
from tandem.server.serving import Server, server_of

router = APIRouter(route_class=JSONRoute, tags=["Ollama"])
ERRORS = {status: {**about, "model": errors.OllamaErrorBody} for status, about in OPENAI_ERRORS.items()}
LONGEST = 1e9  # seconds: more is for ever
UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
NDJSON = "application/x-ndjson"
LINES: dict[int | str, dict[str, Any]] = {
    200: {"content": {NDJSON: {"schema": {"type": "string"}}}, "description": "Whole, or as a stream"}
}
DURATION = r"^(-?\d{1,9}(\.\d{1,9})?(ms|s|m|h))+$"
Duration = float | Annotated[str, Field(pattern=DURATION)]  # seconds, or such as "5m"; negative: for ever

# ---- requests


class Options(Fields):
    """Ollama's defaults. How a model is loaded is set when the server starts."""

    ignored = frozenset(
        {"num_ctx", "num_batch", "num_gpu", "num_thread", "main_gpu", "use_mmap", "use_mlock", "low_vram", "numa",
         "num_keep", "f16_kv", "vocab_only", "logits_all"}
    )  # fmt: skip
    neutral = (
        ("mirostat", 0), ("mirostat_tau", 5), ("mirostat_eta", 0.1), ("tfs_z", 1), ("typical_p", 1),
        ("repeat_last_n", -1), ("repeat_last_n", 64), ("penalize_newline", True), ("penalize_newline", False),
    )  # fmt: skip
    num_predict: Int32 | None = None  # -1: to the end of the context
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
        most = self.num_predict if self.num_predict and self.num_predict > 0 else WHOLE_CONTEXT
        top_k = 40 if self.top_k is None else max(0, self.top_k)
        return given(
            max_tokens=most,
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


class Asked(Fields):
    """What chat and generate have in common."""

    neutral: ClassVar[tuple[tuple[str, Any], ...]] = (("images", []),)
    model: str
    stream: bool | None = None  # True unless said otherwise
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: Duration | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    def generation(self, server: Server, **more: Any) -> Generation:
        params = (self.options or Options()).sampling()
        if self.format:
            params["json_schema"] = {"type": "object"} if self.format == "json" else self.format
        if self.logprobs:
            params["logprobs"] = self.top_logprobs or 0
        effort = self.think if isinstance(self.think, str) else None
        thinks = None if self.think is None else bool(self.think)
        template = given(enable_thinking=thinks, reasoning_effort=effort)
        name = known_name(server, self.model)
        return Generation(name, params=params, template=template, keep_alive=seconds(self.keep_alive), **more)


class CalledFunction(Fields):
    ignored = frozenset({"index", "description"})
    name: str
    arguments: dict[str, Any]


class CallGiven(Fields):
    ignored = frozenset({"id", "type"})
    function: CalledFunction


class MessageGiven(Fields):
    neutral = (("images", []),)
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[CallGiven] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(Asked):
    messages: list[MessageGiven] | None = None
    tools: list[ToolGiven] | None = None


class GenerateRequest(Asked):
    neutral = (("images", []), ("suffix", ""), ("template", ""), ("context", []))
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class EmbedRequest(Fields):
    ignored = frozenset({"truncate", "options"})
    model: str
    input: str | Annotated[list[str], Field(min_length=1, max_length=2048)]
    keep_alive: Duration | None = None


# ---- answers


class Times(TypedDict, total=False):
    total_duration: int  # nanoseconds
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int


class Said(Times):
    model: str
    created_at: str
    done: bool


class ChatAnswer(Said, total=False):
    message: dict[str, Any]
    logprobs: list[dict[str, Any]]
    done_reason: str


class GenerateAnswer(Said, total=False):
    response: str
    logprobs: list[dict[str, Any]]
    thinking: str
    done_reason: str


class Embeddings(Times):
    model: str
    embeddings: list[list[float]]


@router.post("/api/chat", response_model=ChatAnswer, responses=LINES | ERRORS)
async def chat(request: Request, body: ChatRequest) -> Response:
    """Answers a conversation: in lines of JSON, unless `stream` is false."""
    server = server_of(request)
    if not body.messages:
        return await _load_or_unload(server, body, message={"role": "assistant", "content": ""})
    messages, tools = (
        [_message(one) for one in body.messages],
        [tool(one.function) for one in body.tools or []],
    )
    wanted = body.generation(server, messages=messages, tools=tools)
    return await _answer(request, server, wanted, body, _chat_body)


@router.post("/api/generate", response_model=GenerateAnswer, responses=LINES | ERRORS)
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Answers a prompt, through the chat template unless it is `raw`."""
    server = server_of(request)
    if not body.prompt:
        return await _load_or_unload(server, body, response="")
    if body.raw:
        wanted = body.generation(server, prompt=body.prompt)
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        wanted = body.generation(server, messages=[*system, {"role": "user", "content": body.prompt}])
    return await _answer(request, server, wanted, body, _generate_body)


@router.post("/api/embed", response_model=Embeddings, responses=ERRORS)
async def embed(request: Request, body: EmbedRequest) -> Response:
    """A vector of length 1 for each text."""
    server, begin = server_of(request), time.perf_counter()
    texts = [body.input] if isinstance(body.input, str) else body.input
    name = known_name(server, body.model)
    vectors, tokens = await unless_gone(
        request, server.embed(name, texts, keep_alive=seconds(body.keep_alive))
    )
    times = Times(total_duration=_ns(time.perf_counter() - begin), load_duration=0, prompt_eval_count=tokens)
    return JSONResponse({"model": body.model, "embeddings": [vector.tolist() for vector in vectors], **times})


# ---- translation


def known_name(server: Server, name: str) -> str:
    """Ollama's clients add `:latest` where there is no tag."""
    short = name.removesuffix(":latest")
    return short if name not in server.models.names() and short in server.models.names() else name


def seconds(duration: Duration | None) -> float | None:
    if isinstance(duration, str):
        parts = re.findall(r"(-?\d+(?:\.\d+)?)(ms|s|m|h)", duration)
        duration = sum(float(number) * UNITS[unit] for number, unit in parts)
    return math.inf if duration is not None and not 0 <= duration <= LONGEST else duration


def _message(found: MessageGiven) -> Message:
    calls = [
        {
            "type": "function",
            "function": {"name": one.function.name, "arguments": json.dumps(one.function.arguments)},
        }
        for one in found.tool_calls or []
    ]
    more = given(
        tool_calls=calls or None,
        name=found.tool_name,
        tool_call_id=found.tool_call_id,
        reasoning_content=found.thinking,
    )
    return {"role": found.role, "content": found.content or "", **more}


async def _load_or_unload(server: Server, body: Asked, **nothing: Any) -> Response:
    """A request without a prompt: the model is to be there, or not to be."""
    name, keep = known_name(server, body.model), seconds(body.keep_alive)
    if keep == 0:
        server.models.path(name)
        await server.models.unload(name)
    else:
        async with server.models.use(name, keep_alive=keep):
            pass
    reason = "unload" if keep == 0 else "load"
    return JSONResponse(
        {"model": body.model, "created_at": _now(), **nothing, "done": True, "done_reason": reason}
    )


def _chat_body(piece: Piece | Answer) -> dict[str, Any]:
    calls = [{"function": {"name": call.name, "arguments": call.as_object()}} for call in piece.calls]
    more = given(thinking=piece.reasoning or None, tool_calls=calls or None)
    return {"message": {"role": "assistant", "content": piece.text, **more}, **_logprobs(piece)}


def _generate_body(piece: Piece | Answer) -> dict[str, Any]:
    return {"response": piece.text, **given(thinking=piece.reasoning or None), **_logprobs(piece)}


def _logprobs(piece: Piece | Answer) -> dict[str, Any]:
    return {"logprobs": logprobs_body(piece.logprobs)["content"]} if piece.logprobs else {}


async def _answer(request: Request, server: Server, wanted: Generation, body: Asked, form: Any) -> Response:
    base, begin = {"model": body.model}, time.perf_counter()
    if body.stream is not False:
        return await stream(request, _lines(server, wanted, base, begin, form), NDJSON)
    [answer] = await unless_gone(request, server.answers(wanted))
    end = _end(answer.finish, answer.usage, begin)
    return JSONResponse({**base, "created_at": _now(), **form(answer), **end})


async def _lines(
    server: Server, wanted: Generation, base: dict[str, Any], begin: float, form: Any
) -> AsyncGenerator[str, None]:
    calls: list[ToolCall] = []  # the last of them may not be whole yet
    async with aclosing(server.run(wanted)) as pieces:
        async for piece in pieces:
            if piece.arguments:
                calls[-1].arguments += piece.arguments
            calls += piece.calls
            whole = len(calls) if piece.finish else max(0, len(calls) - 1)
            piece.calls, calls = calls[:whole], calls[whole:]
            if piece.text or piece.reasoning or piece.calls or piece.logprobs:
                yield line({**base, "created_at": _now(), **form(piece), "done": False})
            if piece.finish and piece.usage:
                end = _end(piece.finish, piece.usage, begin)
                yield line({**base, "created_at": _now(), **form(Piece()), **end})


def _end(finish: str, usage: Spent, begin: float) -> dict[str, Any]:
    return {
        "done": True,
        "done_reason": "length" if finish == "length" else "stop",
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

"""OpenAI's /v1/chat/completions, and what its other endpoints have in common with it."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from tandem import __version__
from tandem.engine.input_processor import MAX_COMPLETIONS
from tandem.engine.output import TokenLogprob
from tandem.errors import RequestError
from tandem.program.step_inputs import MAX_BIASES
from tandem.server.core.output_parser import NO_USAGE, Delta, GenerationResult, GenerationUsage, total_usage
from tandem.server.core.prompt import (
    WHOLE_CONTEXT,
    GenerationRequest,
    given_params,
    sampling_params,
    with_verbosity,
)
from tandem.server.core.serving import Server, get_server
from tandem.server.core.timings import Timings, timings
from tandem.server.core.tool_calls import Message, Tool, ToolCall, named_tools
from tandem.server.http.background import run_inline_if_small
from tandem.server.http.bodies import (
    EVENTS,
    WHOLE,
    AnyObject,
    Int32,
    JSONRoute,
    Natural,
    Positive,
    StrictModel,
    cancel_on_disconnect,
    drop_none,
    json_response,
    sse_event,
    stream_response,
)
from tandem.server.openai.error_body import ERRORS
from tandem.server.openai.parts import (
    AllowedTools,
    FunctionParam,
    NamedTool,
    Part,
    ResponseFormat,
    StructuredOutputs,
    ToolCallParam,
    ToolParam,
    content_of_parts,
)

router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])
# Accepted and ignored: these fields cannot change the response.
IGNORED = frozenset(
    {
        "user",
        "prompt_cache_options",
        "prediction",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "cache_prompt",
        "id_slot",
        "return_progress",
    }
)
# Of llama.cpp and vLLM: accepted with these values, which ask for nothing.
NEUTRAL: tuple[tuple[str, Any], ...] = (
    ("use_beam_search", False),
    ("length_penalty", 1),
    ("mirostat", 0),
    ("typical_p", 1),
    ("tfs_z", 1),
    ("dry_multiplier", 0),
    ("xtc_probability", 0),
    ("dynatemp_range", 0),
    ("top_n_sigma", -1),
    ("skip_special_tokens", True),
    ("spaces_between_special_tokens", True),
    ("echo", False),
    ("truncate_prompt_tokens", -1),
)
FINGERPRINT = f"build-{__version__}"  # of the software that made a response
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64), WHOLE]
TopK = Annotated[int, Field(ge=-1, lt=2**31), WHOLE]
Count = Annotated[int, Field(ge=1, le=MAX_COMPLETIONS), WHOLE]
TopLogprobs = Annotated[int, Field(ge=0, le=20), WHOLE]
StopTexts = str | Annotated[list[str], Field(max_length=64)]

# ---- requests


class MessageParam(StrictModel):
    ignored = frozenset(
        {"refusal", "annotations", "audio", "function_call", "cache_control", "provider_specific_fields"}
    )
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCallParam] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class StreamOptions(StrictModel):
    ignored = frozenset({"include_obfuscation"})
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # the usage so far in every chunk, as in vLLM


class Sampling(StrictModel):
    """Sampling parameters of chat and completions. From `top_k` on they are those of llama.cpp and vLLM."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None
    ) = None
    seed: Seed | None = None
    stop: StopTexts | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    priority: Natural | None = None  # larger: later. Requests cannot be moved before those of priority 0
    structured_outputs: StructuredOutputs | None = None
    guided_json: AnyObject | str | None = None  # vLLM's older names
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=1000)] | None = None
    guided_grammar: str | None = None
    json_schema: AnyObject | None = None  # llama.cpp's names
    grammar: str | None = None
    timings_per_token: bool | None = None  # llama.cpp's: the times of the response, beside its usage

    def constraint(self) -> dict[str, Any]:
        """The constraint of a structured output; SamplingParams refuses several."""
        given = self.structured_outputs or StructuredOutputs(json=None)
        schemas = [one for one in (given.json_, self.guided_json, self.json_schema) if one is not None]
        grammars = [one for one in (given.grammar, self.guided_grammar, self.grammar) if one]
        if len(schemas) > 1 or len(grammars) > 1 or (given.regex and self.guided_regex):
            raise RequestError("the request has several output constraints of a kind: use one")
        return drop_none(
            json_schema=schemas[0] if schemas else None,
            regex=given.regex or self.guided_regex,
            choices=given.choice or self.guided_choice,
            grammar=grammars[0] if grammars else None,
        )

    def sampling(self) -> dict[str, Any]:
        """The parameters as SamplingParams takes them."""
        bias = {_token(token): value for token, value in (self.logit_bias or {}).items()}
        return drop_none(
            **sampling_params(self.temperature, self.top_p, self.top_k, self.min_p),
            repeat_penalty=self.repeat_penalty or self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=bias or None,
            seed=self.seed,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            priority=self.priority,
            **self.constraint(),
        )


class ChatRequest(Sampling):
    ignored = IGNORED
    neutral = (
        *NEUTRAL,
        ("modalities", ["text"]),
        ("functions", []),
        ("function_call", "none"),
        ("function_call", "auto"),
    )
    model: str | None = None
    messages: Annotated[list[MessageParam], Field(fail_fast=True, min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[ToolParam] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: AnyObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # default: True if the last message is the assistant's
    n_predict: Int32 | None = None  # llama.cpp's max_tokens; -1: until the context is full


# ---- responses

Finish = Literal["stop", "length", "tool_calls"]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobBody(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(TypedDict):
    content: list[TokenLogprobBody]


class ToolCallFunction(TypedDict):
    name: str
    arguments: str


class ToolCallBody(TypedDict):
    index: NotRequired[int]
    id: str
    type: Literal["function"]
    function: ToolCallFunction


class MessageBody(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallBody]]


class Choice(TypedDict):
    index: int
    message: MessageBody
    logprobs: Logprobs | None
    finish_reason: Finish


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class TokenDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    reasoning_tokens: int


class UsageBody(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails
    completion_tokens_details: CompletionDetails


class TimingsBody(TypedDict):
    timings: NotRequired[Timings]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: UsageBody
    timings: NotRequired[Timings]


# ---- endpoints


@router.post("/chat/completions", include_in_schema=False)
@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=EVENTS | ERRORS)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Generates a response to a conversation; with `stream`, as server-sent events."""
    server = get_server(request)
    generation = await run_inline_if_small(generation_request, body)
    generation.model = server.model_name(generation.model)
    if body.stream:
        return await stream_response(request, _events(server, generation, body), "text/event-stream")
    results = await cancel_on_disconnect(request, server.generate(generation))
    usage = total_usage([result.usage for result in results])
    return await json_response(
        sum(result.logprob_count for result in results),
        lambda: ChatCompletion(
            id=new_id("chatcmpl-"),
            object="chat.completion",
            created=now(),
            model=server.model_name(generation.model),
            system_fingerprint=FINGERPRINT,
            choices=[_choice(index, result, bool(body.logprobs)) for index, result in enumerate(results)],
            usage=usage_body(usage),
            **timings_body(usage, body.timings_per_token),
        ),
    )


@router.post("/chat/completions/input_tokens", include_in_schema=False)
@router.post("/v1/chat/completions/input_tokens", response_model=InputTokens, responses=ERRORS)
async def chat_input_tokens(request: Request, body: ChatRequest) -> InputTokens:
    """The number of tokens of a conversation, with its tools and chat template."""
    generation = await run_inline_if_small(generation_request, body)
    count = await get_server(request).count(generation)
    return InputTokens(object="response.input_tokens", input_tokens=count)


# ---- translation to and from GenerationRequest, Delta and GenerationResult


def generation_request(body: ChatRequest) -> GenerationRequest:
    params = body.sampling()
    limits = body.max_completion_tokens, body.max_tokens, max(0, body.n_predict or 0)
    params["max_tokens"] = next((limit for limit in limits if limit), WHOLE_CONTEXT)
    continues = body.continue_final_message
    if continues and body.add_generation_prompt:
        raise RequestError("continue_final_message and add_generation_prompt exclude each other: use one")
    if body.add_generation_prompt is False and not continues:
        raise RequestError("add_generation_prompt = false needs continue_final_message = true")
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs = true")
    if body.logprobs:
        params["logprobs"] = body.top_logprobs or 0
    params.update(_constraint(body.response_format))
    template_kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort:
        template_kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
        template_kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    name = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    tools = [tool(one.function) for one in body.tools or []]
    if name is not None:
        tools = named_tools(tools, name)
    choice = "required" if name else str(body.tool_choice or "auto")
    if isinstance(body.tool_choice, AllowedTools):
        allowed = body.tool_choice.allowed_tools
        tools = named_tools(tools, *(each.function.name for each in allowed.tools))
        choice = allowed.mode
    return GenerationRequest(
        body.model,
        messages=with_verbosity([message(one) for one in body.messages], body.verbosity),
        params=params,
        given=given_params(body),
        n=body.n or 1,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False and name is None,
        template_kwargs=template_kwargs,
        continue_final_message=continues is not False and not body.add_generation_prompt,
    )


def _token(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise RequestError("logit_bias: use token ids (integers) as keys")
    return int(text)


def _constraint(format: ResponseFormat | None) -> dict[str, Any]:
    """The sampling parameter of a structured output."""
    if format is None or format.type == "text":
        return {}
    if format.type == "json_object":
        return {"json_schema": {"type": "object"} if format.schema_ is None else format.schema_}
    if format.json_schema is None:
        raise RequestError("response_format.json_schema is missing: add the schema")
    return {"json_schema": format.json_schema.schema_ or {}}


def tool(function: FunctionParam) -> Tool:
    optional = drop_none(parameters=function.parameters, strict=function.strict)
    return Tool(function.name, function.description or "", **optional)


def message(param: MessageParam) -> Message:
    """An API message as a chat template's message."""
    role = "system" if param.role == "developer" else param.role
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in param.tool_calls or []
    ]
    return {
        "role": role,
        "content": content_of_parts(param.content)
        if isinstance(param.content, list)
        else param.content or "",
        **drop_none(
            name=param.name,
            tool_calls=calls or None,
            tool_call_id=param.tool_call_id,
            reasoning_content=param.reasoning_content,
        ),
    }


def _choice(index: int, result: GenerationResult, wants_logprobs: bool) -> Choice:
    body = MessageBody(role="assistant", content=result.text or (None if result.tool_calls else ""))
    if result.reasoning:
        body["reasoning_content"] = result.reasoning
    if result.tool_calls:
        body["tool_calls"] = [_tool_call(call) for call in result.tool_calls]
    logprobs = logprobs_body(result.logprobs) if wants_logprobs else None
    return Choice(index=index, message=body, logprobs=logprobs, finish_reason=result.finish_reason)  # type: ignore[typeddict-item]


def _tool_call(call: ToolCall) -> ToolCallBody:
    return ToolCallBody(
        id=call.id, type="function", function=ToolCallFunction(name=call.name, arguments=call.arguments)
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


def usage_body(usage: GenerationUsage) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=TokenDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionDetails(reasoning_tokens=usage.reasoning_tokens),
    )


def timings_body(usage: GenerationUsage, is_wanted: bool | None) -> TimingsBody:
    """The field `timings`, if the request asks for it."""
    return TimingsBody(timings=timings(usage)) if is_wanted else TimingsBody()


class StreamedUsages:
    """The usage of the responses of a stream so far, as its `stream_options` ask for it. There may be thousands of
    responses, so a delta changes their sum."""

    def __init__(self, options: StreamOptions | None, n: int) -> None:
        """`n`: responses to each prompt, whose tokens count with the first of them."""
        self.is_wanted = bool(options and options.include_usage)
        self._is_continuous = self.is_wanted and bool(options and options.continuous_usage_stats)
        self._n, self._usages = n, dict[int, GenerationUsage]()  # by the index of a response
        self.total = NO_USAGE

    def add(self, delta: Delta) -> None:
        """Counts a delta."""
        before, usage = self._usages.get(delta.index, NO_USAGE), delta.usage
        if usage is None and self._is_continuous:
            count = before.completion_tokens + len(delta.token_ids)
            usage = GenerationUsage(delta.prompt_tokens, count, 0.0, 0.0, delta.cached_tokens)
        if usage is None:
            return
        self._usages[delta.index] = usage
        new, old = (usage, before) if delta.index % self._n == 0 else (NO_USAGE, NO_USAGE)  # of the prompt
        self.total = GenerationUsage(
            self.total.prompt_tokens + new.prompt_tokens - old.prompt_tokens,
            self.total.completion_tokens + usage.completion_tokens - before.completion_tokens,
            self.total.first_token_seconds or usage.first_token_seconds,
            max(self.total.decode_seconds, usage.decode_seconds),
            self.total.cached_tokens + new.cached_tokens - old.cached_tokens,
            self.total.reasoning_tokens + usage.reasoning_tokens - before.reasoning_tokens,
        )

    def in_chunk(self) -> dict[str, Any]:
        """The field `usage` of a chunk: null, or with `continuous_usage_stats` the usage so far."""
        if not self.is_wanted:
            return {}
        return {"usage": usage_body(self.total) if self._is_continuous else None}


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


async def _events(
    server: Server, generation: GenerationRequest, body: ChatRequest
) -> AsyncGenerator[str, None]:
    """The chunks of a stream: the role, the parts of the message, the finish reason. The one before `[DONE]` has the
    usage, if the request asks for it."""
    base = {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion.chunk",
        "created": now(),
        "model": generation.model,
        "system_fingerprint": FINGERPRINT,
    }
    usages = StreamedUsages(body.stream_options, generation.n)
    num_calls = [0] * generation.n  # tool calls so far of each response
    started: set[int] = set()  # indices of responses
    async with aclosing(server.stream(generation)) as deltas:
        async for delta in deltas:
            usages.add(delta)
            logprobs = logprobs_body(delta.logprobs) if body.logprobs and delta.logprobs else None
            parts: list[tuple[dict[str, Any], Logprobs | None, str | None]] = []
            if delta.index not in started:
                started.add(delta.index)
                parts.append(({"role": "assistant", "content": None}, None, None))
            if (content := _delta_body(delta, num_calls[delta.index])) or logprobs:
                parts.append((content, logprobs, None))
            num_calls[delta.index] += len(delta.tool_calls)
            if delta.finish_reason:
                parts.append(({}, None, delta.finish_reason))
            for part, part_logprobs, finish_reason in parts:
                choice = {
                    "index": delta.index,
                    "delta": part,
                    "logprobs": part_logprobs,
                    "finish_reason": finish_reason,
                }
                yield sse_event({**base, "choices": [choice], **usages.in_chunk()})
    if usages.is_wanted:
        end = {"usage": usage_body(usages.total), **timings_body(usages.total, body.timings_per_token)}
        yield sse_event({**base, "choices": [], **end})
    yield "data: [DONE]\n\n"


def _delta_body(delta: Delta, num_calls: int) -> dict[str, Any]:
    calls: list[Any] = [
        {"index": num_calls + i, **_tool_call(call)} for i, call in enumerate(delta.tool_calls)
    ]
    if delta.arguments:
        calls.insert(0, {"index": num_calls - 1, "function": {"arguments": delta.arguments}})
    return drop_none(
        content=delta.text or None, reasoning_content=delta.reasoning or None, tool_calls=calls or None
    )

"""OpenAI's /v1/completions: plain continuation, and the log-probabilities that evaluation harnesses ask for."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from typing_extensions import TypedDict

from tandem.engine.output import TokenLogprob
from tandem.errors import RequestError
from tandem.server.core.generation import GenerationRequest, GenerationResult, GenerationUsage, total_usage
from tandem.server.core.serving import Server, get_server
from tandem.server.http.request_body import JSONRoute, Natural
from tandem.server.http.streaming import cancel_on_disconnect, sse_event, stream_response
from tandem.server.openai.types import (
    ERRORS,
    EVENTS,
    IGNORED,
    Count,
    Finish,
    Prompts,
    Sampling,
    StreamOptions,
    TopLogprobs,
    UsageBody,
    each_prompt,
    new_id,
    now,
    usage_body,
)

router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])
DEFAULT_TOKENS = 16  # OpenAI's
LEAST = -9999.0  # for the logarithm of nothing, which JSON has no number for


class CompletionRequest(Sampling):
    ignored = IGNORED
    neutral = (("best_of", 1), ("suffix", ""))
    model: str | None = None
    prompt: Prompts
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    max_tokens: Natural | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None


class Logprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(TypedDict):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Finish


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody


@router.post("/v1/completions", response_model=Completion, responses=EVENTS | ERRORS)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continues texts or token ids. Control tokens written in a text count as such."""
    server = get_server(request)
    name = server.model_name(body.model)
    generation = generation_requests(body, name)
    if body.stream:
        return await stream_response(request, _events(server, generation, body, name), "text/event-stream")
    answers = await cancel_on_disconnect(request, server.generate(*generation))
    choices = [_choice(index, answer, body) for index, answer in enumerate(answers)]
    return JSONResponse(
        Completion(
            id=new_id("cmpl-"), object="text_completion", created=now(), model=name, choices=choices,
            usage=usage_body(_usage([answer.usage for answer in answers], body.n or 1)),
        )
    )  # fmt: skip


def generation_requests(body: CompletionRequest, model: str) -> list[GenerationRequest]:
    """One for each prompt."""
    params = body.sampling()
    params["max_tokens"] = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens = 0 needs echo: there would be no answer")
    if body.logprobs is not None:
        params["logprobs"] = body.logprobs
    count, echo = body.n or 1, bool(body.echo)
    return [
        GenerationRequest(model, prompt, params=params, count=count, echo=echo)
        for prompt in each_prompt(body.prompt)
    ]


def _choice(index: int, answer: GenerationResult, body: CompletionRequest) -> Choice:
    logprobs = _logprobs(answer.logprobs, 0) if body.logprobs is not None else None
    finish: Any = answer.finish
    return Choice(index=index, text=answer.text, logprobs=logprobs, finish_reason=finish)


def _logprobs(tokens: list[TokenLogprob], offset: int) -> Logprobs:
    """`offset`: how much text came before. The first token of a prompt has no probability."""
    found = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token in tokens:
        known = not math.isnan(token.logprob)
        pairs = [(token.text, token.logprob), *((text, value) for _, text, value in token.top)]
        found["tokens"].append(token.text)
        found["token_logprobs"].append(max(token.logprob, LEAST) if known else None)
        found["top_logprobs"].append({text: max(value, LEAST) for text, value in pairs} if known else None)
        found["text_offset"].append(offset)
        offset += len(token.text)
    return found


def _usage(usages: list[GenerationUsage], count: int) -> GenerationUsage:
    """Of all prompts, each of which has so many answers."""
    each = [total_usage(usages[i : i + count]) for i in range(0, len(usages), count)]
    return GenerationUsage(
        sum(usage.prompt_tokens for usage in each), sum(usage.completion_tokens for usage in each), 0.0, 0.0,
        sum(usage.cached_tokens for usage in each),
    )  # fmt: skip


async def _events(
    server: Server, generation: list[GenerationRequest], body: CompletionRequest, model: str
) -> AsyncGenerator[str, None]:
    base = {"id": new_id("cmpl-"), "object": "text_completion", "created": now(), "model": model}
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    count = body.n or 1
    usages: dict[int, GenerationUsage] = {}
    offsets = [0] * (len(generation) * count)
    async with aclosing(server.stream(*generation)) as deltas:
        async for delta in deltas:
            if delta.usage:
                usages[delta.index] = delta.usage
            if delta.text or delta.logprobs or delta.finish:
                logprobs = (
                    _logprobs(delta.logprobs, offsets[delta.index]) if body.logprobs is not None else None
                )
                offsets[delta.index] += len(delta.text)
                choice = {
                    "index": delta.index,
                    "text": delta.text,
                    "logprobs": logprobs,
                    "finish_reason": delta.finish,
                }
                yield sse_event({**base, "choices": [choice], **({"usage": None} if with_usage else {})})
    if with_usage:
        yield sse_event(
            {**base, "choices": [], "usage": usage_body(_usage([usages[i] for i in sorted(usages)], count))}
        )
    yield "data: [DONE]\n\n"

"""OpenAI's /v1/completions: text completion, and the log-probabilities that evaluation harnesses need."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from tandem.engine.output import TokenLogprob
from tandem.errors import RequestError
from tandem.server.core.output_parser import Delta, GenerationResult, GenerationUsage, total_usage
from tandem.server.core.prompt import WHOLE_CONTEXT, GenerationRequest, given_params
from tandem.server.core.serving import Server, get_server
from tandem.server.core.timings import Timings
from tandem.server.http.background import run_inline_if_small
from tandem.server.http.bodies import (
    EVENTS,
    Int32,
    JSONRoute,
    Natural,
    cancel_on_disconnect,
    encoded,
    json_response,
    sse_event,
    stream_response,
)
from tandem.server.openai.chat import (
    FINGERPRINT,
    IGNORED,
    NEUTRAL,
    Count,
    Finish,
    Sampling,
    StreamedUsages,
    StreamOptions,
    TopLogprobs,
    UsageBody,
    new_id,
    now,
    timings_body,
    usage_body,
)
from tandem.server.openai.error_body import ERRORS

router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])
DEFAULT_TOKENS = 16  # OpenAI's
MIN_LOGPROB = -9999.0  # instead of minus infinity, which JSON does not have
MAX_PROMPTS = 2048  # in one request
TokenIds = Annotated[list[Natural], Field(fail_fast=True, min_length=1)]
Prompts = (
    str
    | TokenIds
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
)


class CompletionRequest(Sampling):
    ignored = IGNORED
    neutral = NEUTRAL
    model: str | None = None
    prompt: Prompts
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    max_tokens: Natural | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    suffix: str | None = None  # fill-in-the-middle
    # The number of responses to generate, of which the `n` likeliest are returned.
    best_of: Count | None = None
    n_predict: Int32 | None = None  # llama.cpp's max_tokens; -1: until the context is full


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
    system_fingerprint: str
    choices: list[Choice]
    usage: UsageBody
    timings: NotRequired[Timings]


@router.post("/v1/completions", response_model=Completion, responses=EVENTS | ERRORS)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Completes texts or token ids. The text of a control token is tokenized as that token."""
    server = get_server(request)
    name = server.model_name(body.model)
    generation = await run_inline_if_small(generation_requests, body, name)
    if body.stream:
        return await stream_response(request, _events(server, generation, body, name), "text/event-stream")
    results = await cancel_on_disconnect(request, server.generate(*generation))
    usage = _usage([result.usage for result in results], generation[0].n)
    results = _likeliest(results, generation[0].n, body.n or 1)
    return await json_response(
        sum(result.logprob_count for result in results), _completion, results, body, name, usage
    )


def generation_requests(body: CompletionRequest, model: str) -> list[GenerationRequest]:
    """One request for each prompt."""
    params = body.sampling()
    if body.n_predict is not None and body.max_tokens is None:
        params["max_tokens"] = body.n_predict if body.n_predict > 0 else WHOLE_CONTEXT
    else:
        params["max_tokens"] = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens = 0 needs echo = true")
    if body.logprobs is not None:
        params["logprobs"] = body.logprobs
    count, echo, suffix = body.n or 1, bool(body.echo), body.suffix or None
    if (best_of := body.best_of or count) < count:
        raise RequestError(f"best_of = {best_of} is less than n = {count}: use n at least")
    if best_of > count:
        if body.stream or body.echo:
            raise RequestError("best_of above n needs the whole response: leave stream and echo out")
        params.setdefault("logprobs", 0)
    return [
        GenerationRequest(
            model, prompt, suffix, params=params, given=given_params(body), n=best_of, echo=echo
        )
        for prompt in each_prompt(body.prompt)
    ]


def each_prompt(prompts: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """A list of prompts, from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    first = prompts[0]
    return [prompts] if isinstance(first, int) else list(prompts)  # type: ignore[list-item, arg-type]


def _likeliest(results: list[GenerationResult], generated: int, count: int) -> list[GenerationResult]:
    """Of the `generated` responses to each prompt, the `count` with the highest mean log-probability of a token."""
    if generated == count:
        return results

    def mean(result: GenerationResult) -> float:
        return sum(token.logprob for token in result.logprobs) / max(1, len(result.logprobs))

    groups = [results[i : i + generated] for i in range(0, len(results), generated)]
    return [best for group in groups for best in sorted(group, key=mean, reverse=True)[:count]]


def _completion(
    results: list[GenerationResult], body: CompletionRequest, model: str, usage: GenerationUsage
) -> Completion:
    return Completion(
        id=new_id("cmpl-"),
        object="text_completion",
        created=now(),
        model=model,
        system_fingerprint=FINGERPRINT,
        choices=[_choice(index, result, body) for index, result in enumerate(results)],
        usage=usage_body(usage),
        **timings_body(usage, body.timings_per_token),
    )


def _choice(index: int, result: GenerationResult, body: CompletionRequest) -> Choice:
    logprobs = _logprobs(result.logprobs, 0) if body.logprobs is not None else None
    finish_reason: Any = result.finish_reason
    return Choice(index=index, text=result.text, logprobs=logprobs, finish_reason=finish_reason)


def _logprobs(tokens: list[TokenLogprob], offset: int) -> Logprobs:
    """`offset`: characters before these tokens. The first token of a prompt has no probability."""
    body = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token in tokens:
        known = not math.isnan(token.logprob)
        pairs = [(token.text, token.logprob), *((text, value) for _, text, value in token.top)]
        body["tokens"].append(token.text)
        body["token_logprobs"].append(max(token.logprob, MIN_LOGPROB) if known else None)
        body["top_logprobs"].append(
            {text: max(value, MIN_LOGPROB) for text, value in pairs} if known else None
        )
        body["text_offset"].append(offset)
        offset += len(token.text)
    return body


def _usage(usages: list[GenerationUsage], count: int) -> GenerationUsage:
    """The usage of all prompts, with `count` responses each."""
    each = [total_usage(usages[i : i + count]) for i in range(0, len(usages), count)]
    return GenerationUsage(
        sum(usage.prompt_tokens for usage in each),
        sum(usage.completion_tokens for usage in each),
        min((usage.first_token_seconds for usage in each), default=0.0),
        max((usage.decode_seconds for usage in each), default=0.0),
        sum(usage.cached_tokens for usage in each),
    )


async def _events(
    server: Server, generation: list[GenerationRequest], body: CompletionRequest, model: str
) -> AsyncGenerator[str, None]:
    base = {"id": new_id("cmpl-"), "object": "text_completion", "created": now(), "model": model}
    base["system_fingerprint"] = FINGERPRINT
    count = body.n or 1
    usages = StreamedUsages(body.stream_options, count)
    offsets = [0] * (len(generation) * count)
    async with aclosing(server.stream(*generation)) as deltas:
        async for delta in deltas:
            usages.add(delta)
            if delta.text or delta.logprobs or delta.finish_reason:
                event = partial(_event, {**base, **usages.in_chunk()}, delta, offsets[delta.index], body)
                offsets[delta.index] += len(delta.text)
                is_prompt = len(delta.logprobs) > 1
                data = f"data: {await encoded(event)}\n\n" if is_prompt else sse_event(event())
                delta.logprobs.clear()  # 4 KB of each token of a prompt, until the client has read
                yield data
    if usages.is_wanted:
        end = {"usage": usage_body(usages.total), **timings_body(usages.total, body.timings_per_token)}
        yield sse_event({**base, "choices": [], **end})
    yield "data: [DONE]\n\n"


def _event(base: dict[str, Any], delta: Delta, offset: int, body: CompletionRequest) -> dict[str, Any]:
    choice = {
        "index": delta.index,
        "text": delta.text,
        "logprobs": _logprobs(delta.logprobs, offset) if body.logprobs is not None else None,
        "finish_reason": delta.finish_reason,
    }
    return {**base, "choices": [choice]}

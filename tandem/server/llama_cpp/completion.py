"""llama-server's /completion and /infill."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from tandem.engine.output import TokenLogprob
from tandem.errors import ModelNotFoundError, RequestError
from tandem.model.tokenizer import Tokenizer
from tandem.program.step_inputs import MAX_BIASES
from tandem.server.core.output_parser import Delta, GenerationResult
from tandem.server.core.prompt import WHOLE_CONTEXT, GenerationRequest, given_params
from tandem.server.core.serving import Server, get_server
from tandem.server.core.timings import Timings, timings
from tandem.server.http.background import run_in_thread
from tandem.server.http.bodies import (
    EVENTS,
    AnyObject,
    Int32,
    JSONRoute,
    Natural,
    StrictModel,
    cancel_on_disconnect,
    drop_none,
    json_response,
    sse_event,
    stream_response,
)
from tandem.server.llama_cpp.error_body import ERRORS
from tandem.server.openai.chat import IGNORED, NEUTRAL, StopTexts, TopK, TopLogprobs, now
from tandem.threads import throttle

router = APIRouter(route_class=JSONRoute, tags=["llama.cpp"])
MAX_PROMPTS = 2048  # in one request
MAX_FILES = 256  # beside the one to complete
# Characters of a stop string, of a grammar and of a field's name in a response, which may be one of thousands.
MAX_STOP, MAX_GRAMMAR, MAX_NAME = 100, 1000, 100
VALUES = 64  # of a response without tokens and log-probabilities
Bias = Annotated[float, Field(ge=-1e6, le=1e6)] | Literal[False]  # False: never


class PromptText(StrictModel):
    """A text, as llama-server takes it beside images."""

    neutral = (("multimodal_data", []),)
    prompt_string: str


Part = Natural | str
Mixed = Annotated[list[Part], Field(min_length=1)]  # token ids and texts of one prompt
OnePrompt = str | PromptText | Mixed
Prompts = str | PromptText | Mixed | Annotated[list[OnePrompt], Field(min_length=1, max_length=MAX_PROMPTS)]


class CommonRequest(StrictModel):
    """Sampling parameters with llama-server's names and defaults."""

    ignored = IGNORED | {
        "timings_per_token", "n_keep", "n_discard", "min_keep", "samplers", "t_max_prompt_ms", "n_indent",
        "n_cache_reuse",
        "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold",
        "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "adaptive_decay", "backend_sampling",
    }  # fmt: skip
    neutral = (
        *NEUTRAL,
        ("repeat_last_n", -1),
        ("repeat_last_n", 64),
        ("lora", []),
        ("t_max_predict_ms", 0),
        ("t_max_predict_ms", -1),
        ("adaptive_target", -1),
    )
    model: str | None = None
    stream: bool | None = None
    n_predict: Int32 | None = None  # -1: until the context is full
    max_tokens: Int32 | None = None  # the same
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: TopK | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    logit_bias: (
        Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)]
        | Annotated[
            list[Annotated[tuple[Natural | str, Bias], Field(strict=False)]], Field(max_length=MAX_BIASES)
        ]
        | None
    ) = None  # token ids or texts, whose tokens all get the bias
    seed: Annotated[int, Field(ge=-1, lt=2**64)] | None = None  # -1: random
    stop: StopTexts | None = None
    ignore_eos: bool | None = None
    json_schema: AnyObject | None = None
    grammar: str | None = None
    n_probs: TopLogprobs | None = None
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    response_fields: (
        Annotated[list[Annotated[str, Field(max_length=MAX_NAME)]], Field(max_length=256)] | None
    ) = None

    def sampling(self) -> dict[str, Any]:
        """The parameters as SamplingParams takes them, without `logit_bias`."""
        limit = self.max_tokens if self.n_predict is None else self.n_predict
        if self.temperature == 0:
            chosen: dict[str, Any] = {"temperature": 0.0}
        else:
            chosen = {
                "temperature": 0.8 if self.temperature is None else self.temperature,
                "top_k": 1 if self.top_p == 0 else max(0, 40 if self.top_k is None else self.top_k),
                "top_p": 0.95 if self.top_p is None else self.top_p or 1.0,
                "min_p": 0.05 if self.min_p is None else self.min_p,
            }
        return drop_none(
            max_tokens=WHOLE_CONTEXT if limit is None or limit < 0 else max(1, limit),
            **chosen,
            repeat_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=None if self.seed == -1 else self.seed,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or None,
            ignore_eos=self.ignore_eos,
            json_schema=self.json_schema,
            grammar=self.grammar or None,
            logprobs=self.n_probs or None,
        )


class CompletionRequest(CommonRequest):
    prompt: Prompts


class ExtraFile(StrictModel):
    filename: str
    text: str


class InfillRequest(CommonRequest):
    input_prefix: str
    input_suffix: str
    prompt: str | None = None  # after the prefix
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_FILES)] | None = None


class CompletionBody(TypedDict, total=False):
    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    generation_settings: dict[str, Any]
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    timings: Timings
    completion_probabilities: list[dict[str, Any]]


# ---- endpoints


@router.post("/completions", include_in_schema=False)
@router.post("/completion", response_model=CompletionBody | list[CompletionBody], responses=EVENTS | ERRORS)
async def completion(request: Request, body: CompletionRequest) -> Response:
    """Completes texts, token ids, or a mixture of them; with `stream`, as server-sent events."""
    server = get_server(request)
    prompts, is_list = _each_prompt(body.prompt)
    params = await _params(server, body)
    given = given_params(body)
    generation = [GenerationRequest(body.model, prompt, params=params, given=given) for prompt in prompts]
    return await _respond(request, server, body, generation, is_list)


@router.post("/infill", response_model=CompletionBody, responses=EVENTS | ERRORS)
async def infill(request: Request, body: InfillRequest) -> Response:
    """Completes the text between a prefix and a suffix, with a model that has tokens for it."""
    server = get_server(request)
    files = [(file.filename, file.text) for file in body.input_extra or []]
    generation = GenerationRequest(
        body.model,
        body.input_prefix + (body.prompt or ""),
        body.input_suffix,
        files,
        params=await _params(server, body),
        given=given_params(body),
    )
    return await _respond(request, server, body, [generation], False)


# ---- translation to and from GenerationRequest, Delta and GenerationResult


def _each_prompt(prompts: Any) -> tuple[list[Any], bool]:
    """(the prompts, whether the request has a list of them). A list with a token id is one prompt."""
    if not isinstance(prompts, list) or any(isinstance(part, int) for part in prompts):
        return [_plain(prompts)], False
    return [_plain(prompt) for prompt in prompts], True


def _plain(prompt: Any) -> Any:
    return prompt.prompt_string if isinstance(prompt, PromptText) else prompt


async def _params(server: Server, body: CommonRequest) -> dict[str, Any]:
    """The sampling parameters; a bias of a text is one of its tokens."""
    params = body.sampling()
    if not body.logit_bias:
        return params
    async with server.models.use(server.model_name(body.model)) as llm:
        return {**params, "logit_bias": await run_in_thread(_biases, llm.llm.tokenizer, body)}


def _biases(tokenizer: Tokenizer, body: CommonRequest) -> dict[int, float]:
    pairs: Any = body.logit_bias.items() if isinstance(body.logit_bias, dict) else body.logit_bias
    bias: dict[int, float] = {}
    for token, value in pairs:
        throttle()
        if isinstance(token, str) and not (token.isascii() and token.isdigit() and len(token) < 10):
            ids = tokenizer.encode(token, bos=False, limit=MAX_BIASES)
        else:
            ids = [int(token)]
        bias |= dict.fromkeys(ids, -math.inf if value is False else float(value))
        if len(bias) > MAX_BIASES:
            raise RequestError(f"logit_bias has more than {MAX_BIASES} tokens: give fewer")
    return bias


async def _respond(
    request: Request,
    server: Server,
    body: CommonRequest,
    generation: list[GenerationRequest],
    is_list: bool,
) -> Response:
    name = server.model_name(body.model)
    for one in generation:
        one.model = name
    if body.stream:
        return await stream_response(request, _events(server, generation, body, name), "text/event-stream")
    results = await cancel_on_disconnect(request, server.generate(*generation))
    context = _context(server, name)

    def build() -> Any:
        bodies = [_final(i, result, body, name, context) for i, result in enumerate(results)]
        chosen = [_chosen(one, body.response_fields) for one in bodies]
        return chosen if is_list else chosen[0]

    sizes = (VALUES + len(result.token_ids) + result.logprob_count for result in results)
    return await json_response(sum(sizes), build)


def _context(server: Server, name: str) -> int:
    """The context of a model that has just been used; 0: it was deleted meanwhile."""
    with suppress(ModelNotFoundError):
        shared = server.models.shared_name(name)
        return next((one.llm.llm.context for one in server.models.loaded() if one.name == shared), 0)
    return 0


def _final(
    index: int, result: GenerationResult, body: CommonRequest, model: str, context: int
) -> CompletionBody:
    usage = result.usage
    is_cut = result.finish_reason == "length"
    is_full = usage.total_tokens >= context > 0
    found = CompletionBody(
        index=index,
        content=result.text,
        tokens=result.token_ids if body.return_tokens else [],
        id_slot=0,
        stop=True,
        model=model,
        tokens_predicted=usage.completion_tokens,
        tokens_evaluated=usage.prompt_tokens,
        tokens_cached=usage.total_tokens,
        generation_settings=settings_body(body),
        has_new_line="\n" in result.text,
        truncated=is_cut and is_full,
        stop_type="limit" if is_cut else "word" if result.stop_string else "eos",
        stopping_word=result.stop_string or "",
        timings=timings(usage),
    )
    if body.n_probs:
        found["completion_probabilities"] = _probabilities(result.logprobs, body)
    return found


def settings_body(body: CommonRequest) -> dict[str, Any]:
    """The sampling parameters that a request gets, by llama-server's names."""
    params = body.sampling()
    limit = params["max_tokens"]
    return {
        "seed": -1 if body.seed is None else body.seed,
        "temperature": params["temperature"],
        "top_k": params.get("top_k", 40),
        "top_p": params.get("top_p", 0.95),
        "min_p": params.get("min_p", 0.05),
        "repeat_penalty": params.get("repeat_penalty", 1.0),
        "presence_penalty": params.get("presence_penalty", 0.0),
        "frequency_penalty": params.get("frequency_penalty", 0.0),
        "n_predict": -1 if limit == WHOLE_CONTEXT else limit,
        "max_tokens": -1 if limit == WHOLE_CONTEXT else limit,
        "stop": [text[:MAX_STOP] for text in params.get("stop", [])],
        "ignore_eos": bool(body.ignore_eos),
        "stream": bool(body.stream),
        "n_probs": body.n_probs or 0,
        "grammar": (body.grammar or "")[:MAX_GRAMMAR],
    }


def _probabilities(tokens: list[TokenLogprob], body: CommonRequest) -> list[dict[str, Any]]:
    """Log-probabilities, or with `post_sampling_probs` probabilities."""

    def one(id: int, text: str, logprob: float) -> dict[str, Any]:
        value = (
            {"prob": math.exp(logprob)} if body.post_sampling_probs else {"logprob": max(logprob, -9999.0)}
        )
        return {"id": id, "token": text, "bytes": list(text.encode()), **value}

    name = "top_probs" if body.post_sampling_probs else "top_logprobs"
    return [
        {**one(token.id, token.text, token.logprob), name: [one(*top) for top in token.top]}
        for token in tokens
    ]


def _chosen(body: CompletionBody, names: list[str] | None) -> dict[str, Any]:
    """The fields that `response_fields` names: `a/b` is b of the object a. All without names."""
    if not names:
        return dict(body)
    found: dict[str, Any] = {}
    for name in names:
        value: Any = body
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found


async def _events(
    server: Server, generation: list[GenerationRequest], body: CommonRequest, model: str
) -> AsyncGenerator[str, None]:
    """One event per token, and one at the end of each response, which has no text of its own."""
    results = [GenerationResult() for _ in generation]
    async with aclosing(server.stream(*generation)) as deltas:
        async for delta in deltas:
            result = results[delta.index]
            result.add(delta)
            result.logprobs.clear()
            if delta.text or delta.token_ids:
                yield sse_event(_part(delta, body))
            if delta.finish_reason:
                end = _final(delta.index, result, body, model, _context(server, model))
                end["content"], end["tokens"] = "", []
                end.pop("completion_probabilities", None)
                yield sse_event(_chosen(end, body.response_fields))


def _part(delta: Delta, body: CommonRequest) -> dict[str, Any]:
    part = {
        "index": delta.index,
        "content": delta.text,
        "tokens": delta.token_ids,
        "stop": False,
        "id_slot": 0,
    }
    part |= {"tokens_evaluated": delta.prompt_tokens, "created": now()}
    if body.n_probs and delta.logprobs:
        part["completion_probabilities"] = _probabilities(delta.logprobs, body)
    return part

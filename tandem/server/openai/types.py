"""Request and response types that several of OpenAI's endpoints share."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from tandem.engine.input_processor import MAX_COMPLETIONS
from tandem.errors import RequestError
from tandem.program.step_inputs import MAX_BIASES
from tandem.server.core.generation import GenerationUsage, sampling_params
from tandem.server.http.request_body import WHOLE, Natural, StrictModel, drop_none
from tandem.server.openai.error_body import ErrorBody

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
    }
)
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The request is invalid or not supported",
        401: "The API key is missing or wrong",
        404: "There is no such model",
        408: "The request timed out",
        413: "The request body is too large",
        429: "Too many requests: try again later",
        503: "The device or the model is not available",
    }.items()
}
EVENT = {
    "description": "A server-sent event with JSON in `data`",
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"schema": EVENT}},
        "description": "The complete response, or a stream",
    }
}
Finish = Literal["stop", "length", "tool_calls"]
MAX_PROMPTS = 2048  # in one request
TokenIds = Annotated[list[Natural], Field(fail_fast=True, min_length=1)]
Prompts = (
    str
    | TokenIds
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
)
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64), WHOLE]
TopK = Annotated[int, Field(ge=-1, lt=2**31), WHOLE]
Count = Annotated[int, Field(ge=1, le=MAX_COMPLETIONS), WHOLE]
TopLogprobs = Annotated[int, Field(ge=0, le=20), WHOLE]
StopTexts = str | Annotated[list[str], Field(max_length=64)]


def each_prompt(prompts: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """A list of prompts, from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    first = prompts[0]
    return [prompts] if isinstance(first, int) else list(prompts)  # type: ignore[list-item, arg-type]


class StreamOptions(StrictModel):
    ignored = frozenset({"include_obfuscation"})
    include_usage: bool | None = None


class StructuredOutputs(StrictModel):
    """vLLM's structured output."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=1000)] | None = None
    grammar: str | None = None


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

    def sampling(self) -> dict[str, Any]:
        """The parameters as SamplingParams takes them."""
        constraint = self.structured_outputs or StructuredOutputs(json=None)
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
            json_schema=constraint.json_,
            regex=constraint.regex,
            choices=constraint.choice,
            grammar=constraint.grammar,
        )


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


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


def usage_body(usage: GenerationUsage) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=TokenDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionDetails(reasoning_tokens=usage.reasoning_tokens),
    )


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


def _token(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise RequestError("logit_bias: use token ids (integers) as keys")
    return int(text)

"""The usage and the times of responses in OpenAI's chat and completions, whole and in streams."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from tandem.server.core.output_parser import NO_USAGE, Delta, GenerationUsage
from tandem.server.core.timings import Timings, timings
from tandem.server.http.bodies import StrictModel


class StreamOptions(StrictModel):
    ignored = frozenset({"include_obfuscation"})
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # the usage so far in every chunk, as in vLLM


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

"""The times of a response, by llama-server's names."""

from __future__ import annotations

from typing_extensions import TypedDict

from tandem.server.core.output_parser import GenerationUsage


class Timings(TypedDict):
    """Milliseconds and rates. The first token comes with the last part of the prompt: it counts for the prompt."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


def timings(usage: GenerationUsage) -> Timings:
    prompt, predicted = usage.first_token_seconds * 1e3, usage.decode_seconds * 1e3
    computed, steps = usage.prompt_tokens - usage.cached_tokens, max(0, usage.completion_tokens - 1)
    return Timings(
        cache_n=usage.cached_tokens,
        prompt_n=computed,
        prompt_ms=prompt,
        prompt_per_token_ms=prompt / max(1, computed),
        prompt_per_second=computed / prompt * 1e3 if prompt else 0.0,
        predicted_n=usage.completion_tokens,
        predicted_ms=predicted,
        predicted_per_token_ms=predicted / steps if steps else 0.0,
        predicted_per_second=steps / predicted * 1e3 if predicted else 0.0,
    )

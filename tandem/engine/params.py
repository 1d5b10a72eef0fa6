"""How a request is sampled: one frozen dataclass, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tandem.errors import RequestError

MOST_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """Names and meanings as OpenAI's and llama.cpp's users know them.

    The chain is: penalties and bias, top-k, top-p, min-p, temperature, draw. Temperature 0 takes the likeliest token.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: a new one each time
    logprobs: int | None = None  # None: none; 0: the chosen token's; n: and the n likeliest
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        _check(self.max_tokens >= 1, "max_tokens must be 1 or more")
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repeat_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            _check(math.isfinite(getattr(self, name)), f"{name} must be a finite number")
        _check(self.temperature >= 0, "temperature must be 0 or more")
        _check(self.top_k >= 0, "top_k must be 0 (off) or more")
        _check(0 < self.top_p <= 1, "top_p must be above 0 and at most 1")
        _check(0 <= self.min_p <= 1, "min_p must be between 0 and 1")
        _check(self.repeat_penalty > 0, "repeat_penalty must be above 0")
        _check(
            self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS,
            f"logprobs must be 0 to {MOST_LOGPROBS}",
        )
        _check(all(isinstance(s, str) and s for s in stop), "stop strings must not be empty")
        _check(all(not math.isnan(bias) for bias in self.logit_bias.values()), "logit_bias must be numbers")

    @property
    def uses_history(self) -> bool:
        return self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise RequestError(problem)

"""Sampling parameters and other options of a request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, NamedTuple

from tandem.errors import RequestError
from tandem.kernels.kernel import Array

MAX_LOGPROBS = 20  # most likely tokens with log-probabilities
MAX_FLOAT = 3.4e38  # largest float32
MAX_STOPS = 128  # stop strings; each is searched for in every new text
CONSTRAINTS = ("json_schema", "regex", "grammar", "choices")  # parameters of structured output
POOLINGS = ("mean", "last", "cls")  # of embeddings
NO_RANKER = "this model has no scores of pairs: use a reranker, or rank by the cosines of embeddings"


# A function of the tokens so far and the logits of the next, float32 [vocab]. It changes the logits in place, or
# returns new ones. It is slow: logits are copied to the host for each token, NumPy samples, and no other step runs.
LogitsProcessor = Callable[[list[int], Array], Array | None]


class TextTokens(NamedTuple):
    """A text to embed, or a pair to rank."""

    ids: list[int]
    second: int | None = None  # where the second text of a pair begins


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and limits of a request. Names follow OpenAI and llama.cpp. Penalties count the prompt's
    tokens too, as in llama.cpp, but all of them, not only the last 64.

    A value outside its range raises RequestError. Sampling applies logit bias and penalties, then top-k, top-p, min-p
    and temperature. At most one of `json_schema`, `regex`, `grammar` and `choices` constrains the output.
    """

    # Maximum number of tokens to generate; 1 or more.
    max_tokens: int = 256
    # Number of tokens before which no stop token is sampled; 0 or more.
    min_tokens: int = 0
    # Sampling temperature, 0 or more; 0 is greedy sampling.
    temperature: float = 0.0
    # Top-k sampling: keep the k most likely tokens; 0 disables it.
    top_k: int = 0
    # Top-p (nucleus) sampling: keep the most likely tokens up to this total probability, above 0 to 1; 1 disables it.
    top_p: float = 1.0
    # Min-p sampling: keep tokens with at least this fraction of the highest probability, 0 to 1; 0 disables it.
    min_p: float = 0.0
    # Repetition penalty, above 0: values above 1 make tokens of the prompt and output less likely; 1 disables it.
    repeat_penalty: float = 1.0
    # Number subtracted from the logit of each token of the prompt and output; 0 disables it.
    presence_penalty: float = 0.0
    # Number subtracted from the logit of a token for each occurrence in prompt and output; 0 disables it.
    frequency_penalty: float = 0.0
    # Numbers added to logits, by token id; -inf bans a token.
    logit_bias: dict[int, float] = field(default_factory=dict)
    # Seed of the random numbers; None chooses a random seed.
    seed: int | None = None
    # Log-probabilities to return: 0 for the sampled token only, n up to 20 for the n most likely too; None for none.
    logprobs: int | None = None
    # Log-probabilities of prompt tokens, like `logprobs`. These tokens are not taken from the prefix cache.
    prompt_logprobs: int | None = None
    # Function that changes the logits of each token, called with the tokens so far and the logits; slow.
    logits_processor: LogitsProcessor | None = None
    # Strings that end the output, at most 128; the output does not include them.
    stop: tuple[str, ...] = ()
    # Whether to continue after a stop token of the model.
    ignore_eos: bool = False
    # JSON schema that the output follows; {} allows any JSON, None disables it.
    json_schema: dict[str, Any] | str | None = None
    # Regular expression that the whole output matches; None disables it.
    regex: str | None = None
    # Grammar that the output matches: Lark's, from the rule `start`, or GBNF, from `root`; None disables it.
    grammar: str | None = None
    # Texts of which the output is exactly one; () disables it.
    choices: tuple[str, ...] = ()
    # Priority: requests with lower values are served first, and preempt running requests.
    priority: int = 0
    # Seconds after which the request fails, above 0; None: no limit.
    timeout: float | None = None

    def __post_init__(self) -> None:
        self._check_types()
        _check(self.max_tokens >= 1, "max_tokens must be 1 or more")
        _check(self.min_tokens >= 0, "min_tokens must be 0 or more")
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repeat_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            _check(_number(getattr(self, name)), f"{name} must be a finite number")
        _check(self.temperature >= 0, "temperature must be 0 or more")
        _check(self.top_k >= 0, "top_k must be 0 (off) or more")
        _check(0 < self.top_p <= 1, "top_p must be above 0 and at most 1")
        _check(0 <= self.min_p <= 1, "min_p must be between 0 and 1")
        _check(self.repeat_penalty > 0, "repeat_penalty must be above 0")
        _check(
            self.timeout is None or (_number(self.timeout) and self.timeout > 0), "timeout must be above 0"
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or 0 <= value <= MAX_LOGPROBS, f"{name} must be 0 to {MAX_LOGPROBS}")
        processor = self.logits_processor
        _check(processor is None or callable(processor), "logits_processor must be a function")

    def _check_types(self) -> None:
        """Checks types, since values may come from JSON. Empty values count as none, as in other engines."""
        stop, bias = _or(self.stop, ()), _or(self.logit_bias, {})
        _check(isinstance(stop, (str, list, tuple)), "stop must be a text or a list of texts")
        stop = (stop,) if isinstance(self.stop, str) else tuple(stop)
        _check(all(isinstance(s, str) and s for s in stop), "stop strings must be texts that are not empty")
        _check(len(stop) <= MAX_STOPS, f"stop has {len(stop)} texts: give {MAX_STOPS} at most")
        _check(
            isinstance(bias, Mapping) and all(map(_whole, bias)),
            "logit_bias must be a dict from token ids (whole numbers) to numbers that are added to their logits",
        )
        _check(
            all(_number(value) or value in (math.inf, -math.inf) for value in bias.values()),
            "logit_bias must be numbers",
        )
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "logit_bias", dict(bias))
        for name in ("max_tokens", "min_tokens", "top_k", "priority"):
            _check(_whole(getattr(self, name)), f"{name} must be a whole number")
        for name in ("seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or _whole(value), f"{name} must be a whole number or None")
        _check(isinstance(self.ignore_eos, bool), "ignore_eos must be True or False")
        self._check_constraint()

    def _check_constraint(self) -> None:
        choices = _or(self.choices, ())
        _check(
            isinstance(choices, (list, tuple))
            and all(isinstance(choice, str) and choice for choice in choices),
            "choices must be a list of texts that are not empty",
        )
        object.__setattr__(self, "choices", tuple(choices))
        schema = self.json_schema
        _check(schema is None or isinstance(schema, (dict, str)), "json_schema must be a dict or its JSON")
        for name in ("regex", "grammar"):
            _check(
                getattr(self, name) is None or isinstance(getattr(self, name), str), f"{name} must be a text"
            )
        _check(len(self._constraints) <= 1, f"give one of {' and '.join(self._constraints)}")

    @property
    def _constraints(self) -> list[str]:
        given = {
            "json_schema": self.json_schema is not None,
            "regex": self.regex is not None,
            "grammar": self.grammar is not None,
            "choices": bool(self.choices),
        }
        return [name for name, is_given in given.items() if is_given]

    @property
    def constraint(self) -> str | None:
        """The name of the parameter that constrains the output, or None."""
        return next(iter(self._constraints), None)

    @property
    def uses_history(self) -> bool:
        """Whether logits depend on the tokens so far (penalties)."""
        return self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _or(value: Any, none: Any) -> Any:
    """Returns the value, or `none` if it is empty."""
    return none if isinstance(value, (int, str, list, tuple, dict, type(None))) and not value else value


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and bool(-MAX_FLOAT <= value <= MAX_FLOAT)


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise RequestError(problem)

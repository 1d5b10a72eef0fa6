"""A request as the engine sees it: its tokens, how many of them are computed, and what has been sampled."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.kv_cache import BlockTable
from tandem.engine.params import SamplingParams


@dataclass(frozen=True)
class Sampled:
    """One sampled token."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their log-probabilities


@dataclass(eq=False)
class Sequence:
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    tables: list[BlockTable]
    tokens: list[int] = field(default_factory=list)  # prompt and generated
    computed: int = 0  # tokens whose keys and values are in the cache
    slot: int = -1  # row of the block tables while running
    generated: list[Sampled] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "cancelled"
    history: dict[int, int] = field(default_factory=dict)  # token -> count, where penalties need it
    param_row: Any = None  # the sampling parameters as StepInputs has them, made once
    submitted: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0
    finished: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed & (2**64 - 1)
        if self.params.uses_history:
            for token in self.prompt:
                self.history[token] = self.history.get(token, 0) + 1

    def append(self, sampled: Sampled) -> None:
        if not self.generated:
            self.first_token = time.perf_counter()
        self.generated.append(sampled)
        self.tokens.append(sampled.id)
        if self.params.uses_history:
            self.history[sampled.id] = self.history.get(sampled.id, 0) + 1
        if sampled.id in self.stop_ids and not self.params.ignore_eos:
            self.finish("stop")
        elif len(self.generated) >= self.params.max_tokens:
            self.finish("length")

    def finish(self, reason: str) -> None:
        if self.finish_reason is None:
            self.finish_reason = reason
            self.finished = time.perf_counter()

"""A snapshot of the engine's counters, for metrics and live views."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVStats:
    """Blocks of one KV group."""

    window: int  # attention window, in tokens; 0: global
    blocks: int
    used: int  # with references
    cached: int  # in the prefix cache, used or not


@dataclass(frozen=True)
class StateStats:
    """State slots of a model with recurrent layers."""

    slots: int
    used: int  # with references
    cached: int  # checkpoints in the prefix cache
    slot_bytes: int


@dataclass(frozen=True)
class SpeculationStats:
    steps: int  # with draft tokens
    drafted: int  # draft tokens
    accepted: int  # accepted draft tokens
    saved_seconds: float  # estimated from the times of steps without draft tokens


@dataclass(frozen=True)
class EngineStats:
    running: int  # sequences
    waiting: int  # sequences in the queue
    steps: int  # since the start, like the counts below
    preemptions: int
    prompt_tokens: int  # tokens of the prompts of admitted requests
    cached_prompt_tokens: int  # prompt tokens that were in the prefix cache
    kv: tuple[KVStats, ...]
    speculation: SpeculationStats | None  # None: speculative decoding is off
    states: StateStats | None = None  # None: the model has no recurrent layers

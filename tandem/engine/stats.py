"""A snapshot of the engine's counters, for metrics and live views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.engine.engine import Engine


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
    # Since the start, by why there is a checkpoint (REASONS of kv_cache.py).
    kept: dict[str, int]  # checkpoints
    hits: dict[str, int]  # requests that began with one
    evicted: int  # checkpoints that made room
    recomputed_tokens: int  # prompt tokens with cached KV blocks, computed again for want of a checkpoint


@dataclass(frozen=True)
class DiskCacheStats:
    """The prefix cache on disk."""

    budget: int  # maximum bytes of the folder
    used: int  # bytes of the folder, with the files of other models, when something was last written
    hits: int  # requests that it had more of than memory
    restored_tokens: int  # of their prompts
    read_bytes: int
    written_bytes: int
    evicted: int  # files that made room for others
    damaged: int  # files that were not as they were written
    dropped: int  # blocks that were not saved, since the disk was full, slow or failed


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
    disk: DiskCacheStats | None = None  # None: there is no prefix cache on disk


def read_stats(engine: Engine) -> EngineStats:
    scheduler, cache, speculation = engine.scheduler, engine.cache, None
    if speculator := scheduler.speculator:
        saved = speculator.statistics["saved_seconds"]
        speculation = SpeculationStats(speculator.steps, speculator.drafted, speculator.accepted, saved)
    return EngineStats(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        steps=engine.num_steps,
        preemptions=scheduler.preemptions,
        prompt_tokens=scheduler.prompt_tokens,
        cached_prompt_tokens=scheduler.cached_prompt_tokens,
        kv=tuple(
            KVStats(window, blocks, blocks - pool.num_free, len(pool.cached))
            for window, blocks, pool in zip(cache.windows, cache.blocks, cache.pools, strict=True)
        ),
        speculation=speculation,
        states=_state_stats(engine),
        disk=engine.disk.stats() if engine.disk else None,
    )


def _state_stats(engine: Engine) -> StateStats | None:
    if not (pool := engine.cache.states):
        return None
    slots = len(pool.references)
    tensors = {launch.buffers.get("state") for launch in engine.program.launches} - {None}
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor)
    return StateStats(
        slots=slots,
        used=slots - pool.num_free,
        cached=len(pool.cached),
        slot_bytes=nbytes // slots,
        kept=dict(pool.kept),
        hits=dict(pool.hits),
        evicted=pool.evictions,
        recomputed_tokens=engine.scheduler.stateless_prompt_tokens,
    )

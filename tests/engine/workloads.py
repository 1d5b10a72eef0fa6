"""Random workloads: requests that come at any step, begin alike, wait for blocks, are cut into chunks and cancelled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tandem.engine.engine import Engine
from tandem.engine.kv_cache import KVCache
from tandem.engine.params import SamplingParams
from tandem.engine.scheduler import PrefillBudget, Scheduler
from tandem.engine.sequence import Sequence
from tandem.kernels.abi import KV_BLOCK
from tests.engine.simulation import FixedCost
from tests.engine.tiny_models import VOCAB

CONTEXT = 256


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    cancelled: int | None  # steps after its arrival


@dataclass(frozen=True)
class Workload:
    arrivals: list[Arrival]
    tokens: int  # of a step at most
    spare: int  # KV blocks beyond those that one sequence may need
    prefill_budget: bool


def random_workload(
    rng: np.random.Generator,
    requests: int,
    prompt: int,
    answer: int,
    penalties: float = 0.15,
    prefill_budget: float = 0.5,
) -> Workload:
    """`prompt` and `answer`: tokens at most; `penalties`: the fraction of requests with them; twice as many
    have a bias for a few tokens. `prefill_budget`: the fraction of workloads
    with one, where steps depend on the time they take."""
    heads = [rng.integers(0, VOCAB, rng.integers(KV_BLOCK, prompt)).tolist() for _ in range(2)]
    arrivals = []
    for _ in range(int(rng.integers(1, requests + 1))):
        head = heads[rng.integers(2)][: rng.integers(prompt)] if rng.random() < 0.7 else []
        tail = rng.integers(0, VOCAB, rng.integers(1, prompt)).tolist() if rng.random() < 0.8 else [1]
        few = (
            {int(token): 60.0 for token in rng.integers(0, VOCAB, 4)} if rng.random() < 2 * penalties else {}
        )
        params = SamplingParams(
            logit_bias=few,
            max_tokens=int(rng.integers(1, answer + 1)),
            ignore_eos=bool(rng.random() < 0.5),
            priority=int(rng.random() < 0.2),
            repeat_penalty=1.2 if rng.random() < penalties else 1.0,
        )
        cancelled = int(rng.integers(0, 12)) if rng.random() < 0.2 else None
        arrivals.append(Arrival(int(rng.integers(0, 30)), (*head, *tail)[:prompt], params, cancelled))
    tokens = int(rng.choice([7, 16, 40, 100, CONTEXT]))
    return Workload(arrivals, tokens, int(rng.integers(0, 9)), bool(rng.random() < prefill_budget))


def prepare(engine: Engine, workload: Workload) -> None:
    """An engine with as little room as the workload says, and nothing in it."""
    tokens = min(workload.tokens, engine.scheduler.limits.tokens)
    limits, windows = replace(engine.scheduler.limits, tokens=tokens), engine.cache.windows
    one = [(window + tokens) // KV_BLOCK + 2 if window else limits.blocks for window in windows]
    blocks = tuple(min(n, limits.blocks) + workload.spare for n in one)
    states = len(engine.cache.states.references) if engine.cache.states else 0
    engine.cache = KVCache(windows, blocks, states)
    speculator = engine.scheduler.speculator
    if speculator:
        speculator.cost_model = FixedCost(0.01)
    engine.scheduler = Scheduler(
        limits,
        engine.cache,
        prefill_budget=PrefillBudget() if workload.prefill_budget else None,
        speculator=speculator,
        stages=engine.scheduler.stages,
    )


def serve(engine: Engine, workload: Workload, eos_ids: frozenset[int]) -> list[Sequence]:
    """Each arrival's sequence, when all have ended."""
    prepare(engine, workload)
    return serve_prepared(engine, workload, eos_ids)


def serve_prepared(engine: Engine, workload: Workload, eos_ids: frozenset[int]) -> list[Sequence]:
    sequences: dict[int, Sequence] = {}
    step = 0
    while len(sequences) < len(workload.arrivals) or any(s.finish_reason is None for s in sequences.values()):
        for i, arrival in enumerate(workload.arrivals):
            if arrival.step == step:
                sequences[i] = engine.submit(list(arrival.prompt), arrival.params, eos_ids)
            if arrival.cancelled is not None and arrival.step + arrival.cancelled == step:
                engine.cancel(sequences[i])
        engine.step()
        step += 1
        assert step < 5000, "requests wait, and nothing runs"
    return [sequences[i] for i in range(len(workload.arrivals))]

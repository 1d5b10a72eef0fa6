"""Timed rounds of prefill and decode workloads, for any batch size and context depth.

A round measures what users get: requests go through the scheduler, and host time counts. Every request has random
tokens of its own, so that the prefix cache saves no work. The tokens before `depth` are not computed, only marked as
computed: attention reads their KV blocks, whatever these contain, as it reads any others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from tandem.bench.roofline import computes_on_cpu
from tandem.bench.statistics import median_interval
from tandem.bench.step_cost import Step, added, min_cost
from tandem.devices.device import Device
from tandem.engine.engine import Engine
from tandem.engine.params import SamplingParams
from tandem.engine.sequence import Sequence
from tandem.errors import DoesNotFitError
from tandem.kernels.abi import KV_BLOCK
from tandem.kernels.kernel import Cost
from tandem.model.model import Model

WARM_UP = 1.0  # minimum seconds
# The same on a GPU, after its shaders are compiled: it waits for that, and an idle GPU runs 1.3 to 4 times slower until
# it has been busy for up to a second. Then rounds are run until they are steady, for as long as the maximum at most.
GPU_WARM_UP, MAX_GPU_WARM_UP = 2.0, 8.0
STEADY = 0.02  # relative gain of the last quarter of the rounds below which they are steady
ROUNDS = 5


@dataclass(frozen=True)
class Workload:
    """What a round does: prefill a prompt of `tokens`, or generate `tokens` in each of `batch` sequences."""

    kind: str  # "prefill" or "decode"
    tokens: int
    batch: int = 1
    depth: int = 0  # tokens already in the KV cache

    @property
    def label(self) -> str:
        batch = f", batch {self.batch}" if self.kind == "decode" else ""
        return f"{self.kind} {self.tokens}{batch}" + (f" at {self.depth}" if self.depth else "")

    @property
    def end(self) -> int:
        return self.depth + self.tokens + 1

    @property
    def total(self) -> int:
        return self.tokens * self.batch


@dataclass(frozen=True)
class Round:
    seconds: float  # from the requests' arrival to their last token
    first: float  # until each has its first token
    steps: list[float]  # of each step


@dataclass(frozen=True)
class Measured:
    workload: Workload
    rounds: list[Round]
    cost: Cost  # of a round: the bytes that any engine must read, and the operations
    steps: int

    @property
    def seconds(self) -> list[float]:
        return [each.seconds for each in self.rounds]

    @property
    def samples(self) -> list[float]:
        """Tokens a second of each round."""
        return [self.workload.total / seconds for seconds in self.seconds]

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return float(np.median(self.seconds))

    @property
    def tokens_per_s(self) -> float:
        return self.workload.total / self.median

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of tokens per second."""
        return median_interval(self.samples)

    @property
    def gb_per_s(self) -> float:
        return self.cost.bytes / self.median / 1e9

    @property
    def tflop_per_s(self) -> float:
        return self.cost.ops / self.median / 1e12


def steady(seconds: list[float]) -> bool:
    """Whether rounds no longer get faster: the last quarter of them, compared with the quarter before."""
    quarter = max(1, len(seconds) // 4)
    before, last = seconds[-2 * quarter : -quarter], seconds[-quarter:]
    return bool(before) and float(np.median(last)) >= (1 - STEADY) * float(np.median(before))


class Bench:
    """A model on a device, with a KV cache for all of `workloads`."""

    def __init__(self, model: Model, device: Device, workloads: Iterable[Workload], kv: str = "f16") -> None:
        workloads = list(workloads)
        blocks = -(-max(w.end for w in workloads) // KV_BLOCK)
        batch = max(w.batch for w in workloads)
        self._use(
            Engine.load(model, device, context=blocks * KV_BLOCK, batch=batch, kv=kv, prefix_caching=False)
        )

    @classmethod
    def on(cls, engine: Engine) -> Self:
        """A Bench on an existing engine."""
        bench = cls.__new__(cls)
        bench._use(engine)
        return bench

    def _use(self, engine: Engine) -> None:
        self.engine, self._random = engine, np.random.default_rng(0)

    def measure(self, workload: Workload, rounds: int = ROUNDS) -> Measured:
        self.warm_up(workload)
        return self.measured(workload, [self.round(workload) for _ in range(rounds)])

    def warm_up(self, workload: Workload) -> None:
        begun = time.perf_counter()
        self.round(workload)
        if computes_on_cpu(self.engine.device):
            while time.perf_counter() - begun < WARM_UP:
                self.round(workload)
            return
        begun, seconds, elapsed = time.perf_counter(), list[float](), 0.0
        while elapsed < GPU_WARM_UP or (elapsed < MAX_GPU_WARM_UP and not steady(seconds)):
            seconds.append(self.round(workload).seconds)
            elapsed = time.perf_counter() - begun

    def measured(self, workload: Workload, rounds: list[Round]) -> Measured:
        steps = list(self.steps(workload))
        cost = added(min_cost(self.engine.program, step) for step in steps)
        return Measured(workload, rounds, cost, len(steps))

    def round(self, workload: Workload) -> Round:
        engine, made = self.engine, workload.tokens if workload.kind == "decode" else 1
        params = SamplingParams(max_tokens=made, temperature=0, ignore_eos=True)
        sequences: list[Sequence] = []
        try:
            for _ in range(workload.batch):
                sequences.append(self.sequence(workload, params))
        except DoesNotFitError:
            for sequence in sequences:
                engine.cache.free(sequence.kv.tables)
            raise
        times, first = [time.perf_counter()], 0.0
        for sequence in sequences:
            engine.enqueue(sequence)
        while any(sequence.finish_reason is None for sequence in sequences):
            engine.step()
            times.append(time.perf_counter())
            if not first and all(sequence.generated for sequence in sequences):
                first = times[-1]
            if engine.scheduler.waiting:  # some were not admitted, or preempted
                for sequence in sequences:
                    engine.cancel(sequence)
                raise self._too_many(workload)
        return Round(times[-1] - times[0], first - times[0], [b - a for a, b in pairwise(times)])

    def sequence(self, workload: Workload, params: SamplingParams) -> Sequence:
        """A sequence whose first `depth` tokens are marked as computed."""
        new = 1 if workload.kind == "decode" else workload.tokens
        ids = self._random.integers(0, self.engine.model.config.vocab, workload.depth + new).tolist()
        sequence, cache = self.engine.new_sequence(ids, params), self.engine.cache
        while sequence.state.computed < workload.depth:
            sequence.state.computed = min(workload.depth, sequence.state.computed + KV_BLOCK)
            if not cache.reserve(sequence.kv.tables, sequence.state.computed):
                cache.free(sequence.kv.tables)
                raise self._too_many(workload)
            cache.free_outside_window(sequence.kv.tables, sequence.state.computed)
        return sequence

    def _too_many(self, workload: Workload) -> DoesNotFitError:
        return DoesNotFitError(
            f"the KV cache of {workload.batch} sequences of {workload.end} tokens does not fit beside the model: use a "
            "smaller batch, depth or model"
        )

    def steps(self, workload: Workload) -> Iterable[Step]:
        if workload.kind == "decode":
            for i in range(workload.tokens):
                yield [(workload.depth + i, 1)] * workload.batch
            return
        most = self.engine.scheduler.limits.tokens
        for i in range(math.ceil(workload.tokens / most)):
            yield [(workload.depth + i * most, min(most, workload.tokens - i * most))]

"""200 random workloads: each request gets bit for bit the tokens it gets alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem.devices.cpu.device import CPUDevice
from tandem.engine.engine import Engine
from tandem.engine.kv_cache import BlockTable, KVCache
from tandem.engine.params import SamplingParams
from tandem.engine.prompt_lookup import PromptLookup
from tandem.engine.scheduler import Scheduler
from tandem.engine.sequence import Sequence
from tandem.kernels.abi import KV_BLOCK
from tests.engine.tiny_models import opened, write_model
from tests.engine.workloads import CONTEXT, random_workload, serve

WORKLOADS = 50  # for each of four engines
KV = {("llama", 1): "f16", ("llama", 2): "q8", ("gemma3", 1): "q8", ("gemma3", 2): "f16"}
STOPS = frozenset(range(0, 320, 20))


class Events:
    """Counts preemptions and attached blocks, which a workload should have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.preempted = self.shared = 0
        preempt, attach = Scheduler._preempt, KVCache.attach_prefix

        def counted_preempt(scheduler: Scheduler, sequence: Sequence) -> None:
            self.preempted += 1
            preempt(scheduler, sequence)

        def counted_attach(cache: KVCache, tables: list[BlockTable], hashes: list[bytes]) -> None:
            self.shared += len(hashes)
            attach(cache, tables, hashes)

        monkeypatch.setattr(Scheduler, "_preempt", counted_preempt)
        monkeypatch.setattr(KVCache, "attach_prefix", counted_attach)


class Alone:
    """The tokens of a request that is alone, without prefix caching."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.known = engine, dict[object, list[int]]()

    def tokens(self, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        key = (prompt, repr(params))
        if key not in self.known:
            sequence = self.engine.submit(list(prompt), params, STOPS)
            while sequence.finish_reason is None:
                self.engine.step()
            self.known[key] = [sampled.id for sampled in sequence.generated]
        return self.known[key]


@pytest.mark.parametrize("step_slots", [1, 2])
@pytest.mark.parametrize(("architecture", "prompt_lookup"), [("llama", False), ("gemma3", True)])
def test_tokens_are_those_of_the_request_alone(
    architecture: str, prompt_lookup: bool, step_slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "tiny.gguf", "Q4_0", architecture)
    rng, events = np.random.default_rng(step_slots), Events(monkeypatch)
    kv = KV[architecture, step_slots]
    with opened(path, threads=1, context=CONTEXT, prefix_caching=False, kv=kv) as one:
        monkeypatch.setattr(CPUDevice, "step_slots", step_slots)
        with opened(
            path,
            threads=2,
            context=CONTEXT,
            batch=6,
            kv=kv,
            proposer=PromptLookup() if prompt_lookup else None,
        ) as engine:
            alone, compared, room = Alone(one), 0, engine.cache.blocks
            for _ in range(WORKLOADS):
                workload = random_workload(rng, requests=9, prompt=100, answer=60)
                sequences = serve(engine, workload, STOPS)
                for sequence, arrival in zip(sequences, workload.arrivals, strict=True):
                    ids = [sampled.id for sampled in sequence.generated]
                    expected = alone.tokens(arrival.prompt, arrival.params)
                    assert ids == (expected if arrival.cancelled is None else expected[: len(ids)])
                    compared += len(ids)
                assert engine.cache.free_blocks == engine.cache.blocks <= room
            if engine.scheduler.speculator:
                assert engine.scheduler.speculator.drafted > 50
    what = f"{compared} tokens, {events.shared} blocks shared, {events.preempted} preemptions"
    print(f"{architecture}, {kv}, {step_slots} in flight: {what}")
    assert compared > 1000 and events.shared * KV_BLOCK > 1600 and events.preempted > 5

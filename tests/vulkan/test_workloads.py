"""Random workloads on a GPU: every token is the one that the logits of its own step say.

Sums depend on the batch there, so a request's tokens may differ from those it gets alone where two are almost equal.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.devices.vulkan.device import VulkanDevice
from tandem.engine.engine import Engine
from tandem.engine.prompt_lookup import PromptLookup
from tandem.engine.sequence import Sequence
from tandem.model.model import open_model
from tests.engine.tiny_models import write_model
from tests.engine.workloads import CONTEXT, random_workload, serve

WORKLOADS = 2


class Checked(Engine):
    """Notes how far each token's logit is below the highest."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.below: list[float] = []

    def _collect(self) -> list[Sequence]:
        sampled = [chunk for chunk in self._in_flight[0].chunks if chunk.samples_next]
        known = [len(chunk.sequence.generated) for chunk in sampled]
        served = super()._collect()
        logits = iter(self._read("logits", sum(1 + len(chunk.draft_tokens) for chunk in sampled)))
        for chunk, before in zip(sampled, known, strict=True):
            rows = list(islice(logits, 1 + len(chunk.draft_tokens)))
            for row, token in zip(rows, chunk.sequence.generated[before:], strict=False):
                self.below.append(float(row.max() - row[token.id]))
        return served


@pytest.mark.parametrize(
    ("architecture", "kv", "prompt_lookup"), [("llama", "q8", False), ("gemma3", "f16", True)]
)
def test_every_token_is_that_of_its_logits(
    lavapipe: str,
    architecture: str,
    kv: str,
    prompt_lookup: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One step at a time, so that its logits are still there; two in flight give the same tokens. A draft has the
    logits of the step that verified it."""
    path = write_model(tmp_path / "tiny.gguf", "Q4_0", architecture)
    rng = np.random.default_rng(6)
    workloads = [
        random_workload(rng, requests=4, prompt=60, answer=16, penalties=0, prefill_budget=0)
        for _ in range(WORKLOADS)
    ]
    found = []
    for step_slots in (1, 2):
        model, device = open_model(path), VulkanDevice(lavapipe)
        monkeypatch.setattr(VulkanDevice, "step_slots", step_slots)
        kind, proposer = Checked if step_slots == 1 else Engine, PromptLookup() if prompt_lookup else None
        engine = kind.load(model, device, context=CONTEXT, batch=4, kv=kv, proposer=proposer)
        found.append(
            [
                [sampled.id for sampled in sequence.generated]
                for workload in workloads
                for sequence, arrival in zip(
                    serve(engine, workload, frozenset()), workload.arrivals, strict=True
                )
                if arrival.cancelled is None
            ]
        )
        if isinstance(engine, Checked):
            assert len(engine.below) > 20 and max(engine.below) == 0.0
        if speculator := engine.scheduler.speculator:
            assert 0 < speculator.accepted < speculator.drafted
        device.close()
        model.gguf.close()
    same = [one == other for one, other in zip(*found, strict=True)]
    assert np.mean(same) > 0.8, "more requests differ than roundings explain"

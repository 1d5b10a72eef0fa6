"""A model's layers on the CPU and on a Vulkan device: the tokens of one, both at work, and failures that are told."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem import LLM, AsyncLLM
from tandem.devices.backends import open_device
from tandem.devices.vulkan.binding import DEVICE_LOST
from tandem.engine.engine import Engine
from tandem.engine.params import SamplingParams
from tandem.engine.sequence import Sequence
from tandem.errors import DeviceLostError
from tandem.model.model import open_model
from tandem.model.synthetic import SyntheticModel
from tests.engine.test_split import check_overlap, let_meet, tokens_of
from tests.engine.tiny_models import opened, write_model
from tests.engine.workloads import CONTEXT, random_workload, serve
from tests.models.test_reference import GOLDENS
from tests.vulkan.test_faults import Balance, balance  # noqa: F401  (a fixture)
from tests.vulkan.test_workloads import Checked

GOLDEN = GOLDENS / "gemma3-pattern3.gguf"
NEAR = 0.02  # of a logit: int8 activations round differently where sums do


@pytest.mark.parametrize(("order", "mapped"), [("cpu,{}", True), ("{},cpu", False)])
def test_the_same_tokens(lavapipe: str, order: str, mapped: bool, tmp_path: Path) -> None:
    """Requests that come and go, in float32; activations in memory that the host sees, or does not."""
    path = write_model(tmp_path / "tiny.gguf", "F32", "gemma3")
    rng = np.random.default_rng(5)
    workloads = [random_workload(rng, requests=6, prompt=60, answer=8, prefill_budget=0) for _ in range(2)]
    model, device = open_model(path), open_device(order.format(lavapipe), threads=1)
    with opened(path, context=CONTEXT, batch=8, kv="f32") as one:
        engine = Engine.load(model, device, context=CONTEXT, batch=8, kv="f32")
        for _, block in [] if mapped else device.devices[0].arenas["activations"].parts:  # type: ignore[attr-defined]
            block.mapped = None
        for workload in workloads:
            found, expected = (tokens_of(serve(e, workload, frozenset()), workload) for e in (engine, one))
            assert found == expected
    device.close()
    model.gguf.close()


def test_both_are_at_work(lavapipe: str) -> None:
    """When the stages began and ended is measured; neither begins a step without the other, however fast it is."""
    device = open_device(f"{lavapipe},cpu", threads=1)
    engine = Engine.load(SyntheticModel("smollm2-135m", layers=6), device, context=64, batch=8)
    stages = device.chain  # type: ignore[attr-defined]

    def answer(count: int) -> None:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        sequences = [engine.submit([i], params) for i in range(8)]
        while any(sequence.finish_reason is None for sequence in sequences):
            engine.step()

    let_meet(stages)
    answer(14)
    check_overlap(stages)
    assert all(len(stage.times) >= 28 for stage in stages), "two steps for each token of all"
    device.close()


@pytest.mark.parametrize("order", ["cpu,{}", "{},cpu"])
def test_quantised_tokens_are_those_of_one_devices_logits(lavapipe: str, order: str, tmp_path: Path) -> None:
    """Each is the likeliest by the step that drew it, and near enough by the CPU alone; one step at a time, so that its
    logits are still there."""
    path = write_model(tmp_path / "tiny.gguf", "Q4_0", "gemma3")
    workload = random_workload(
        np.random.default_rng(3), requests=4, prompt=60, answer=8, penalties=0, prefill_budget=0
    )
    model, device = open_model(path), open_device(order.format(lavapipe), threads=1, split=[2, 1])
    device.step_slots = 1  # type: ignore[misc]
    engine = Checked.load(model, device, context=CONTEXT, batch=8)
    sequences = serve(engine, workload, frozenset())
    assert len(engine.below) > 5 and max(engine.below) == 0.0
    with opened(path, context=CONTEXT, batch=8) as one:
        assert max(below(one, sequence) for sequence in sequences if sequence.generated) < NEAR
    device.close()
    model.gguf.close()


def below(engine: Engine, sequence: Sequence) -> float:
    """By how much the logits of a request's tokens are less than the highest, at most."""
    logits = engine.logits(sequence.tokens)[len(sequence.request.prompt) - 1 : -1]
    chosen = logits[np.arange(len(logits)), [sampled.id for sampled in sequence.generated]]
    return float((logits.max(axis=1) - chosen).max())


@pytest.mark.parametrize("order", ["cpu,{}", "{},cpu"])
def test_a_lost_device_fails_the_requests(lavapipe: str, order: str, balance: Balance) -> None:  # noqa: F811
    threads, options = set(threading.enumerate()), {"threads": 1, "context": 128, "batch": 4}
    device = order.format(lavapipe)
    with LLM(GOLDEN, device=device, **options) as llm:  # type: ignore[arg-type]
        expected = llm.generate([1, 2, 3], max_tokens=4).token_ids
    llm_of_many = AsyncLLM(GOLDEN, device=device, **options)

    async def ask() -> list[Any]:
        first = await llm_of_many.generate([1, 2, 3], max_tokens=4)
        assert first.token_ids == expected
        balance.failing["QueueSubmit"] = 5, DEVICE_LOST
        found = await asyncio.gather(
            *(llm_of_many.generate([i, 2], max_tokens=60) for i in range(6)), return_exceptions=True
        )
        await llm_of_many.close()
        return found

    found = asyncio.run(asyncio.wait_for(ask(), 120))
    assert all(isinstance(one, DeviceLostError) and "load the model again" in str(one) for one in found)
    assert set(threading.enumerate()) <= threads and balance.nothing_is_alive()

"""The prefix cache on disk: tokens are those of a run without it, whatever is on the disk."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem import LLM, AsyncLLM
from tandem.devices.cpu.device import CPUDevice
from tandem.engine import disk_cache
from tandem.engine.disk_cache import DiskCache
from tandem.engine.engine import Engine
from tandem.engine.model_manager import ModelManager
from tandem.kernels.abi import KV_BLOCK
from tests.cli.tiny_model import write_tiny_model
from tests.engine.disk_caches import (  # noqa: F401
    OPTIONS,
    PROMPT,
    USABLE,
    answer,
    cache_home,
    disk_stats,
    files_of,
    open_llm,
    prefixes,
    size_of,
)
from tests.engine.test_workloads import STOPS, Alone
from tests.engine.tiny_models import opened, write_model
from tests.engine.workloads import CONTEXT, Workload, prepare, random_workload, serve_prepared
from tests.models.test_reference import GOLDENS

# ---- restarts


@pytest.mark.parametrize(
    ("name", "kv"),
    [("gemma3-pattern3", "f16"), ("llama", "f32"), ("qwen2", "q8"), ("gemma3-pattern3", "q8"), ("qwen35", "f16"),
     ("gemma4", "f16"), ("mamba2", "f16"), ("falcon-h1", "f16"), ("deepseek-v3", "f16"), ("glm4moe-lite", "q8"),
     ("deepseek-v2-lite", "f16")],
)  # fmt: skip
def test_a_restart_computes_a_prompt_no_second_time(name: str, kv: str) -> None:
    with open_llm(name, kv=kv, disk_cache=None) as llm:
        expected, longer = answer(llm), answer(llm, PROMPT[:100] + [5] * 30)
    for restart in range(3):
        with open_llm(name, kv=kv, context=256 - 16 * restart) as llm:
            assert answer(llm) == expected
            stats = llm.stats()
            assert stats.cached_prompt_tokens == (USABLE if restart else 0)
            assert stats.disk and stats.disk.restored_tokens == (USABLE if restart else 0)
            assert stats.disk.hits == min(restart, 1) and not stats.disk.damaged and not stats.disk.dropped
            if stats.states:
                assert stats.states.kept["restored"] == stats.states.hits["restored"] == min(restart, 1)
                assert max(llm.engine.cache.states._saves) == USABLE // KV_BLOCK, "it saves all of its prefix"
            assert answer(llm, PROMPT[:100] + [5] * 30) == longer
            assert answer(llm) == expected
            assert llm.engine.cache.free_blocks == llm.engine.cache.blocks


def test_what_is_evicted_from_memory_comes_back_from_the_disk() -> None:
    """A KV cache that holds one prompt, and four prompts in turn."""
    prompts = [[(k * i) % 250 + 3 for i in range(200)] for k in (3, 7, 11, 13)]
    with open_llm("llama", disk_cache=None) as llm:
        expected = [answer(llm, prompt) for prompt in prompts]
        one = llm.engine.program.arena_bytes["kv"] / llm.engine.cache.blocks[0] * 17
    with open_llm("llama", kv_memory=one) as llm:
        for turn in range(3):
            for prompt, ids in zip(prompts, expected, strict=True):
                before = llm.stats().cached_prompt_tokens
                assert answer(llm, prompt) == ids
                cached = llm.stats().cached_prompt_tokens - before
                assert cached >= 160 if turn else cached == 0
                wait_until_written(llm)
        assert disk_stats(llm).hits == 8


def wait_until_written(llm: LLM) -> None:
    disk = llm.engine.disk
    assert disk
    until(lambda: not disk._writer.is_busy)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def test_blocks_of_others_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model, another layout, another version: each has its own folder."""
    path = tmp_path / "one.gguf"
    shutil.copy(GOLDENS / "llama.gguf", path)

    def restored(path: Path, **options: Any) -> int:
        with LLM(path, **{**OPTIONS, **options}) as llm:
            answer(llm)
            return int(disk_stats(llm).restored_tokens)

    assert restored(path) == 0 and restored(path) == USABLE
    assert restored(path, kv="q8") == 0 and restored(path, kv="f32") == 0
    assert restored(GOLDENS / "qwen2.gguf") == 0
    with monkeypatch.context() as patch:
        patch.setattr(disk_cache, "__version__", "0.0.0")
        assert restored(path) == 0
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # a weight that no sample of the matrices has
    path.write_bytes(data)
    assert restored(path) == 0 and restored(path) == USABLE


def test_the_next_turn_of_a_chat_starts_from_the_answer() -> None:
    with open_llm("qwen35") as llm:
        ids = llm.generate(PROMPT, max_tokens=40, temperature=0.0, ignore_eos=True).token_ids
    prompt = [*PROMPT, *ids, *[9] * 20]
    with open_llm("qwen35", disk_cache=None) as llm:
        expected = answer(llm, prompt)
    with open_llm("qwen35") as llm:
        assert answer(llm, prompt) == expected
        assert llm.stats().cached_prompt_tokens >= len(PROMPT) + len(ids) - 2 * KV_BLOCK


# ---- random workloads


def within(workload: Workload, vocab: int) -> Workload:
    """With tokens that a model has."""
    arrivals = [
        replace(
            arrival,
            prompt=tuple(token % vocab for token in arrival.prompt),
            params=replace(
                arrival.params, logit_bias={t % vocab: b for t, b in arrival.params.logit_bias.items()}
            ),
        )
        for arrival in workload.arrivals
    ]
    return replace(workload, arrivals=arrivals)


@contextmanager
def with_disk(engine: Engine, folder: Path, budget: int) -> Iterator[DiskCache]:
    disk = DiskCache.open(engine, folder, budget, None)
    try:
        yield disk
    finally:
        disk.close()
        engine.disk = engine.scheduler.disk = None


@pytest.mark.parametrize(
    ("architecture", "kv", "step_slots", "count"),
    [
        ("llama", "f16", 2, 3),
        ("gemma3", "q8", 1, 3),
        ("qwen35", "f32", 1, 3),
        *(pytest.param(*case, 60, marks=pytest.mark.soak) for case in (
            ("llama", "f16", 1), ("llama", "q8", 2), ("gemma3", "f32", 2), ("gemma3", "f16", 1), ("qwen35", "f16", 2)
        )),
    ],
)  # fmt: skip
def test_random_workloads_have_the_tokens_of_each_request_alone(
    architecture: str, kv: str, step_slots: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is small, and each workload is a restart: the files of those before it are there."""
    golden = GOLDENS / f"{architecture}.gguf"
    path = golden if golden.exists() and architecture == "qwen35" else write_model(
        tmp_path / "tiny.gguf", "Q4_0", architecture
    )  # fmt: skip
    rng, budgets = np.random.default_rng(step_slots), [20_000_000, 200_000]
    restored = evicted = compared = 0
    with opened(path, threads=1, context=CONTEXT, prefix_caching=False, kv=kv) as one:
        monkeypatch.setattr(CPUDevice, "step_slots", step_slots)
        vocab = one.model.config.vocab
        with opened(path, threads=2, context=CONTEXT, batch=6, kv=kv) as engine:
            alone = Alone(one)
            for _ in range(count):
                workload = within(random_workload(rng, requests=9, prompt=100, answer=40), vocab)
                for budget in (*budgets, *budgets):  # once more after a restart
                    prepare(engine, workload)
                    with with_disk(engine, tmp_path / f"{budget}", budget) as disk:
                        sequences = serve_prepared(engine, workload, STOPS)
                        assert engine.cache.free_blocks == engine.cache.blocks
                    restored += disk.restored_tokens
                    evicted += disk.files.evicted
                    assert not disk.files.damaged and not disk.files.failed
                    assert size_of(tmp_path / f"{budget}") <= budget
                    for sequence, arrival in zip(sequences, workload.arrivals, strict=True):
                        ids = [sampled.id for sampled in sequence.generated]
                        expected = alone.tokens(arrival.prompt, arrival.params)
                        assert ids == (expected if arrival.cancelled is None else expected[: len(ids)])
                        compared += len(ids)
    print(f"{architecture}, {kv}: {compared} tokens, {restored} restored, {evicted} files evicted")
    assert compared > 500 and restored > 500 and evicted > 80 // KV_BLOCK


# ---- servers


def test_an_idle_model_is_saved_before_it_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So kill -9 loses little."""
    monkeypatch.setattr("tandem.engine.async_llm.IDLE_SECONDS", 0.01)

    async def run() -> None:
        async with AsyncLLM(GOLDENS / "llama.gguf", **OPTIONS) as llm:
            await llm.generate(PROMPT, max_tokens=4)
            end = time.monotonic() + 60
            while len(files_of(folder)) < USABLE // KV_BLOCK:
                assert time.monotonic() < end, "nothing was saved"
                await asyncio.sleep(0.01)
            again = await llm.generate(PROMPT, max_tokens=4)
            assert again.usage.cached_tokens == USABLE and not disk_stats(llm).hits

    asyncio.run(run())


def test_a_model_that_was_unloaded_does_not_read_its_prompt_again(tmp_path: Path) -> None:
    """Two models in turn. They leave no thread behind."""
    specs = {name: write_tiny_model(tmp_path / f"{name}.gguf") for name in ("one", "two")}
    prompt = [3 + i % 60 for i in range(200)]

    async def run() -> None:
        models = ModelManager(specs, device="cpu", threads=1, context=256, batch=2, disk_cache="10M")
        cached, texts = [], set()
        for name in ("one", "two", "one", "two"):
            async with models.use(name) as llm:
                result = await llm.generate(prompt, max_tokens=5, temperature=0)
                cached.append(result.usage.cached_tokens)
                texts.add((name, result.text))
            await models.unload(name)
        await models.close()
        assert cached == [0, 0, 192, 192] and len(texts) == 2

    threads = set(threading.enumerate())
    asyncio.run(run())
    assert set(threading.enumerate()) <= threads


def test_it_costs_nothing_when_it_is_off(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf")
    script = """
import sys, threading
from tandem import LLM
with LLM(sys.argv[1], device="cpu", threads=1, context=64, batch=1) as llm:
    llm.generate("x", max_tokens=2)
    print([name for name in sys.modules if "disk_cache" in name or "block_files" in name],
        [thread.name for thread in threading.enumerate() if "disk" in thread.name])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["[]", "[]"]


def test_a_decode_step_costs_a_few_calls_more() -> None:
    """Of Python functions, over a whole KV block; a count does not depend on the machine."""

    def calls(**options: Any) -> int:
        count = 0

        def trace(_: Any, event: str, __: Any) -> None:
            nonlocal count
            count += event == "call"

        with open_llm("llama", **options) as llm:
            stream = iter(llm.stream([5, 6, 7], max_tokens=100, ignore_eos=True))
            for _ in range(KV_BLOCK):
                next(stream)
            sys.setprofile(trace)
            try:
                for _ in range(2 * KV_BLOCK):
                    next(stream)
            finally:
                sys.setprofile(None)
            return count

    off, on = calls(disk_cache=None), calls()
    print(f"{off / 2 / KV_BLOCK:.1f} calls a step without, {on / 2 / KV_BLOCK:.1f} with the disk cache")
    assert on <= off + 2 * (2 * KV_BLOCK)


@pytest.mark.parametrize("placement", ["layers", "columns"])
def test_several_devices(placement: str) -> None:
    options = {"device": "cpu,cpu", "placement": placement, "threads": 1}
    with open_llm(disk_cache=None, **options) as llm:
        expected = answer(llm)
    for restart in range(2):
        with open_llm(**options) as llm:
            assert answer(llm) == expected
            assert disk_stats(llm).restored_tokens == (USABLE if restart else 0)

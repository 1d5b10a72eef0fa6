"""Many requests at once under asyncio: all are served, none is lost or leaves anything behind."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem import LLM, AsyncLLM
from tandem.engine import async_llm
from tandem.engine.output import OutputReader
from tandem.errors import DeadlineError, DeviceLostError, QueueFullError, RequestError
from tests.cli.tiny_model import write_tiny_model
from tests.engine.test_memory import memory

PROMPTS = [f"{'shared ' * 8}{i}" for i in range(12)] + ["x", "other"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("async") / "tiny.gguf")


@pytest.fixture
def llm(path: Path) -> Iterator[AsyncLLM]:
    threads = set(threading.enumerate())
    llm = AsyncLLM(path, threads=1, context=256, batch=4, queue=20)
    yield llm
    asyncio.run(llm.close())
    check_idle(llm)
    assert set(threading.enumerate()) <= threads


@pytest.fixture
def gate(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Steps wait until it is set, so that nobody is done too soon."""
    gate, step = threading.Event(), llm.llm.engine.step
    gate.set()
    monkeypatch.setattr(llm.llm.engine, "step", lambda: (gate.wait(60), step()))
    return gate


def check_idle(llm: AsyncLLM) -> None:
    engine = llm.llm.engine
    assert not llm._outboxes and not llm._streams and not llm._embeddings
    assert not engine.scheduler.running and not engine.scheduler.waiting
    assert engine.cache.free_blocks == engine.cache.blocks


@pytest.mark.fast
def test_answers_are_those_of_llm(llm: AsyncLLM, path: Path) -> None:
    with LLM(path, threads=1, context=256, batch=1) as one:
        expected = [one.generate(prompt, max_tokens=20).text for prompt in PROMPTS]
        said = one.chat([{"role": "user", "content": "hi"}], max_tokens=9).text

    async def read(prompt: str) -> str:
        return "".join([token.text async for token in llm.stream(prompt, max_tokens=20)])

    async def run() -> None:
        whole = asyncio.gather(*(llm.generate(prompt, max_tokens=20) for prompt in PROMPTS[:8]))
        assert await asyncio.gather(*(read(prompt) for prompt in PROMPTS)) == expected
        assert [result.text for result in await whole] == expected[:8]
        chat = await llm.chat([{"role": "user", "content": "hi"}], max_tokens=9)
        assert (chat.text, chat.finish_reason, chat.usage.completion_tokens) == (said, "length", 9)

    asyncio.run(run())


@pytest.mark.fast
def test_a_stream_left_early_and_a_cancelled_task_end_their_requests(
    llm: AsyncLLM, gate: threading.Event
) -> None:
    async def run() -> None:
        stream = llm.stream("x", max_tokens=200)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        assert not llm._outboxes, "it ends at once, not when somebody collects it"
        gate.clear()
        task = asyncio.create_task(llm.generate("y", max_tokens=200))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        await llm.generate("z", max_tokens=3)  # those before it are gone by now
        check_idle(llm)

    asyncio.run(run())


@pytest.mark.fast
def test_what_is_refused(llm: AsyncLLM, gate: threading.Event) -> None:
    async def run() -> None:
        for prompt, params in (
            ("", {}),
            ("x" * 300, {}),
            ("x", {"temperature": -1}),
            ("x", {"colour": 1}),
            (5, {}),
        ):
            with pytest.raises(RequestError):
                await llm.generate(prompt, **params)  # type: ignore[arg-type]
        with pytest.raises(DeadlineError, match=r"timed out after 1e-06 s, with \d+ tokens"):
            await llm.generate("x", max_tokens=200, timeout=1e-6)
        gate.clear()
        tasks = [asyncio.create_task(llm.generate("x", max_tokens=200)) for _ in range(40)]
        while sum(task.done() for task in tasks) < 40 - (20 + 4):
            await asyncio.wait(
                [task for task in tasks if not task.done()], timeout=60, return_when="FIRST_COMPLETED"
            )
        gate.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        full = [error for error in done if isinstance(error, QueueFullError)]
        assert len(full) == 40 - (20 + 4) and "try again later" in str(full[0])
        assert len({result.text for result in done if not isinstance(result, BaseException)}) == 1

    asyncio.run(run())


@pytest.mark.fast
@pytest.mark.parametrize("queue", [-1, None, 1.5, "x"])
def test_not_a_queue(path: Path, queue: Any) -> None:
    with pytest.raises(RequestError, match="queue="):
        AsyncLLM(path, queue=queue)


@pytest.mark.fast
def test_embeddings_while_others_are_served(llm: AsyncLLM, path: Path) -> None:
    texts, long = ["one", "another " * 12], "z" * 200
    with LLM(path, threads=1, context=256, batch=4) as one:
        expected = [one.embed(text, pooling=pooling) for text in texts for pooling in ("mean", "last", "cls")]
        said = one.generate("x", max_tokens=100).text

    async def run() -> None:
        answers = [asyncio.create_task(llm.generate("x", max_tokens=100)) for _ in range(6)]
        embeds = [llm.embed(text, pooling=pooling) for text in texts for pooling in ("mean", "last", "cls")]
        for vector, wanted in zip(await asyncio.gather(*embeds), expected, strict=True):
            np.testing.assert_allclose(vector, wanted, atol=1e-6)
        given_up = asyncio.create_task(llm.embed(long))
        await asyncio.sleep(0.002)
        given_up.cancel()
        for prompt, pooling, problem in (
            ("", "mean", "empty"),
            ("x", "most", "use mean"),
            ([9**9], "mean", "outside"),
        ):
            with pytest.raises(RequestError, match=problem):
                await llm.embed(prompt, pooling=pooling)
        assert {answer.text for answer in await asyncio.gather(*answers)} == {said}
        assert (await llm.embed(long)).shape == (64,)

    asyncio.run(run())


@pytest.mark.fast
def test_a_lost_device_fails_every_request(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        llm = AsyncLLM(path, threads=1, context=256, batch=4)
        step, calls = llm.llm.engine.step, []

        def failing() -> Any:
            calls.append(1)
            if len(calls) > 5:
                raise DeviceLostError("the GPU stopped: load the model again")
            return step()

        monkeypatch.setattr(llm.llm.engine, "step", failing)
        tasks = [llm.generate("x", max_tokens=100) for _ in range(9)]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, DeviceLostError) for error in errors)
        with pytest.raises(DeviceLostError, match="load the model again"):
            await llm.generate("x")
        await llm.close()

    asyncio.run(run())


@pytest.mark.fast
def test_closing_ends_what_is_left(path: Path) -> None:
    async def run() -> None:
        llm = AsyncLLM(path, threads=1, context=20_000, batch=2)
        task = asyncio.create_task(llm.generate("x", max_tokens=19_000))
        await asyncio.sleep(0.01)
        await llm.close()
        for request in (task, llm.generate("x")):
            with pytest.raises(RequestError, match="the model is closed"):
                await request

    asyncio.run(run())


async def one_request(llm: AsyncLLM, rng: random.Random, known: dict[str, list[int]]) -> str:
    """A request as they come: most are good, some are nonsense, some are given up."""
    prompt, count = rng.choice(PROMPTS), rng.randrange(1, 12)
    kind = rng.choice(["whole", "whole", "stream", "left", "cancelled", "wrong"])
    if kind == "wrong":
        params: dict[str, Any] = rng.choice([{"top_p": 7}, {"max_tokens": 0}, {"stop": [""]}, {"x": 1}])
        with pytest.raises(RequestError):
            await llm.generate(prompt, **params)
        return kind
    ids: list[int] = []
    if kind == "cancelled":
        task = asyncio.create_task(llm.generate(prompt, max_tokens=100))
        await asyncio.sleep(rng.random() * 0.002)
        task.cancel()
        done = (await asyncio.gather(task, return_exceptions=True))[0]
        return kind if isinstance(done, asyncio.CancelledError) else "done anyway"
    if kind == "whole":
        result = await llm.generate(prompt, max_tokens=count)
        ids = result.token_ids
        assert len(ids) == count and result.finish_reason == "length"
    else:
        stream = llm.stream(prompt, max_tokens=count if kind == "stream" else 100)
        async for token in stream:
            ids.append(token.id)
            if kind == "left" and len(ids) == count:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        assert len(ids) == count
    longest = known.setdefault(prompt, ids)
    assert ids[: len(longest)] == longest[: len(ids)], "tokens were lost, doubled or mixed up"
    return kind


@pytest.mark.parametrize("requests", [500, pytest.param(20_000, marks=pytest.mark.soak)])
def test_requests_come_and_go(path: Path, requests: int) -> None:
    """At 64 in flight, with a cache too small for all of them."""

    async def run() -> None:
        rng, known = random.Random(0), dict[str, list[int]]()
        async with AsyncLLM(path, threads=1, context=256, batch=16, kv_memory=500_000) as llm:
            slots, kinds = asyncio.Semaphore(64), list[str]()

            async def limited() -> None:
                async with slots:
                    kinds.append(await one_request(llm, rng, known))

            resident, threads = 0, 0
            for part in range(4):
                await asyncio.gather(*(limited() for _ in range(requests // 4)))
                if part == 0:
                    resident, threads = memory("VmRSS"), threading.active_count()
            assert len(kinds) == requests and set(kinds) >= {"whole", "stream", "left", "cancelled", "wrong"}
            await llm.generate("x", max_tokens=2)
            check_idle(llm)
            grown = memory("VmRSS") - resident
            print(f"{requests} requests: {grown / 1e6:.1f} MB more resident since the first quarter")
            assert grown < 5e6 and threading.active_count() <= threads + 8  # of asyncio's own pool

    asyncio.run(run())


@pytest.mark.fast
@pytest.mark.parametrize("logprobs", [None, 20])
def test_a_stream_that_nobody_reads_ends(path: Path, logprobs: int | None) -> None:
    """Its tokens do not fill the memory, its KV blocks are free at once, and its reader learns why."""

    async def run() -> None:
        async with AsyncLLM(path, threads=1, context=50_000, batch=1, max_unread=500) as llm:
            stream = llm.stream("x", max_tokens=40_000, logprobs=logprobs)
            await anext(stream)  # type: ignore[arg-type]
            while llm.llm.engine.scheduler.running:
                await asyncio.sleep(0.01)
            read = 0
            with pytest.raises(DeadlineError, match="not read as fast as it was generated"):
                async for _ in stream:
                    read += 1
            assert read * (1 + (logprobs or 0)) > 450
            assert len((await llm.generate("x", max_tokens=2000, logprobs=logprobs)).token_ids) == 2000
            check_idle(llm)

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.fast
def test_a_stream_does_not_keep_log_probabilities(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 of each token would take 2 KB, until the end of a response of any length."""
    outputs, prepare = list[OutputReader](), llm.llm.prepare

    def noted(*args: Any, **params: Any) -> OutputReader:
        outputs.append(prepare(*args, **params))
        return outputs[-1]

    async def run() -> None:
        params = {"max_tokens": 50, "logprobs": 20, "prompt_logprobs": 20, "ignore_eos": True}
        read = [token.logprob async for token in llm.stream("x y z", **params)]
        assert read == (await llm.generate("x y z", **params)).logprobs
        assert read == [token.logprob for token in llm.llm.stream("x y z", **params)]
        assert all(one and len(one.top) == 20 for one in read)

    monkeypatch.setattr(llm.llm, "prepare", noted)
    asyncio.run(run())
    for kind in ("generated", "prompt_scores"):
        kept = [any(sampled.top for sampled in getattr(output.sequence, kind)) for output in outputs]
        assert kept == [False, True, False], kind
    assert [bool(output._prompt_scores) for output in outputs] == [False, True, False]


@pytest.mark.fast
def test_all_unread_streams_together_have_a_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is above its own limit."""
    monkeypatch.setattr(async_llm, "TOTAL_FACTOR", 1)
    monkeypatch.setattr(async_llm, "READ_TIMEOUT", 0.05)

    async def run() -> None:
        async with AsyncLLM(path, threads=1, context=25_000, batch=8, max_unread=20_000) as llm:
            streams = [llm.stream("x", max_tokens=20_000, ignore_eos=True) for _ in range(8)]
            for stream in streams:
                await anext(stream)  # type: ignore[arg-type]
            while llm.llm.engine.scheduler.running:
                await asyncio.sleep(0.01)
            assert llm._unread < 3 * 20_000
            for stream in streams:
                with pytest.raises(DeadlineError, match="not read as fast as it was generated"):
                    async for _ in stream:
                        pass
            assert llm._unread == 0
            assert len((await llm.generate("x", max_tokens=20_000, ignore_eos=True)).token_ids) == 20_000
            check_idle(llm)

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.fast
def test_a_reader_that_is_behind_does_not_hold_the_loop(llm: AsyncLLM) -> None:
    async def run() -> None:
        order: list[str] = []

        async def read() -> None:
            async for _ in llm.stream("x", max_tokens=200):
                order.append("token")
                if len(order) == 1:
                    while llm.llm.engine.scheduler.running:  # the loop does nothing else meanwhile
                        time.sleep(0.01)
                    beside.append(asyncio.create_task(count()))

        async def count() -> None:
            while order.count("token") < 200:
                order.append("other")
                await asyncio.sleep(0)

        beside: list[asyncio.Task[None]] = []
        await read()
        await beside[0]
        assert order[:180].count("other") > 30

    asyncio.run(run())

"""Several models: each is loaded once, frees all of its memory, and is never closed while in use."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem import AsyncLLM
from tandem.devices.cpu import device as cpu
from tandem.engine import model_manager as module
from tandem.engine.kv_size import HEADROOM
from tandem.engine.model_manager import ModelManager, ModelSpec
from tandem.errors import DeviceLostError, DoesNotFitError, ModelFileError, ModelNotFoundError, RequestError
from tests.cli.tiny_model import write_tiny_model
from tests.engine.test_memory import memory
from tests.packages import model_path

fast = pytest.mark.fast
CLOCKS = 0.01  # seconds that two of them may differ by

OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "context": 256, "batch": 2, "kv_memory": 70_000}


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "damaged.gguf").write_bytes(b"GGUF" + bytes(20))
    files = {name: write_tiny_model(folder / f"{name}.gguf") for name in ("one", "two", "three")}
    return files | {"damaged": folder / "damaged.gguf", "absent": folder / "absent.gguf"}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are loaded, slowly enough for others to come meanwhile."""
    begun: list[Path] = []

    class SlowLLM(AsyncLLM):
        def __init__(self, model: Any, **options: Any) -> None:
            begun.append(model)
            time.sleep(0.02)
            super().__init__(model, **options)

    monkeypatch.setattr(module, "AsyncLLM", SlowLLM)
    return begun


def with_models(
    specs: dict[str, Path], test: Callable[[ModelManager], Awaitable[None]], **options: Any
) -> None:
    async def run() -> None:
        models = ModelManager(specs, **OPTIONS | options)
        try:
            await test(models)
        finally:
            await models.close()
        assert not models.loaded() and not models._tasks
        with pytest.raises(RequestError, match="are closed"):
            await answer(models, "one")

    threads = set(threading.enumerate())
    asyncio.run(run())
    assert set(threading.enumerate()) <= threads and not cpu.CPUDevice._open


async def answer(models: ModelManager, name: str, tokens: int = 5, **options: Any) -> str:
    async with models.use(name, **options) as llm:
        return (await llm.generate("x", max_tokens=tokens)).text


def names(models: ModelManager) -> list[str]:
    return [each.name for each in models.loaded()]


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that is about to happen; a busy machine may take its time."""
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(0.005)
    assert condition()


@fast
def test_concurrent_requests_load_each_model_once(specs: dict[str, Path], loads: list[Path]) -> None:
    async def test(models: ModelManager) -> None:
        assert models.names() == list(specs) and not models.loaded()
        texts = await asyncio.gather(*(answer(models, name) for name in ("one", "two") * 6))
        assert len(set(texts)) == 1 and len(texts[0]) == 5
        assert sorted(loads) == sorted([specs["one"], specs["two"]])
        for each in models.loaded():
            assert each.nbytes > 1000 and each.device == "cpu" and not each.users and each.expires is None
        async with models.use("one"):
            assert [(each.name, each.users) for each in models.loaded()] == [("one", 1), ("two", 0)]

    with_models(specs, test)


@fast
def test_all_waiters_get_the_error_of_a_failed_load(specs: dict[str, Path], loads: list[Path]) -> None:
    async def test(models: ModelManager) -> None:
        async with models.use("one") as llm:
            answering = asyncio.create_task(llm.generate("x", max_tokens=100))
            for name, kind in (("damaged", ModelFileError), ("absent", ModelNotFoundError)):
                waiting = [answer(models, name) for _ in range(3)]
                errors = await asyncio.gather(*waiting, return_exceptions=True)
                assert all(isinstance(error, kind) for error in errors)
            assert len(loads) == 3 and names(models) == ["one"]
            assert len((await answering).token_ids) == 100
            with pytest.raises(ModelNotFoundError, match="no model is called four: there is one, two"):
                await answer(models, "four")
        with pytest.raises(ModelFileError):  # it is tried again: the file may be another by now
            await answer(models, "damaged")
        assert len(loads) == 4

    with_models(specs, test)


@fast
def test_a_model_stays_for_a_while_after_its_last_use(specs: dict[str, Path]) -> None:
    async def test(models: ModelManager) -> None:
        async with models.use("one"):
            assert models.loaded()[0].expires is None
            await answer(models, "one")
            await asyncio.sleep(0.15)
            assert names(models) == ["one"], "someone uses it"
            before = time.time()
        expires, after = models.loaded()[0].expires, time.time()
        assert expires and before < expires - 0.1 + CLOCKS and expires - 0.1 < after + CLOCKS
        await until(lambda: not models.loaded())
        await answer(models, "one", keep_alive=math.inf)
        await answer(models, "two", keep_alive=0)
        await until(lambda: names(models) == ["one"])
        await asyncio.sleep(0.15)
        assert names(models) == ["one"] and models.loaded()[0].expires is None
        await answer(models, "one")
        assert models.loaded()[0].expires, "as usual again"
        await models.unload("one")
        await models.unload("two")  # which is gone
        assert not models.loaded()
        async with models.use("one") as llm:
            await models.unload("one")
            assert names(models) == ["one"] and (await llm.generate("x", max_tokens=1)).text
        await until(lambda: not models.loaded())

    with_models(specs, test, keep_alive=0.1)


@contextmanager
def limited(monkeypatch: pytest.MonkeyPatch, nbytes: float) -> Iterator[None]:
    """A machine with this much memory for models."""
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "host_memory", lambda: HEADROOM + nbytes)
        patch.setattr(cpu, "touched_memory", lambda: 0)
        yield


@fast
def test_idle_models_are_closed_least_recently_used_first(
    specs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(models: ModelManager) -> None:
        await answer(models, "one")
        need = models.loaded()[0].nbytes
        with limited(monkeypatch, 2 * need):
            for name in ("two", "one"):
                await answer(models, name)
            assert names(models) == ["one", "two"]
            await answer(models, "three")
            assert names(models) == ["three", "one"], "two was used before one"
            async with models.use("one"), models.use("three"):
                with pytest.raises(
                    DoesNotFitError, match=r"GB that are free: .*; being used meanwhile: .*three"
                ):
                    await answer(models, "two")
                assert {each.name for each in models.loaded()} == {"one", "three"}
                assert await answer(models, "one")
            async with models.use("three"):
                await answer(models, "two")
                assert names(models) == ["three", "two"]
        models._options["kv_memory"] = 1000
        with pytest.raises(DoesNotFitError, match="allow more"):
            await answer(models, "one")
        with limited(monkeypatch, -HEADROOM), pytest.raises(DoesNotFitError):
            await answer(models, "one")
        assert names(models) == ["three", "two"], "nobody was asked to go in vain"

    with_models(specs, test)


@fast
def test_models_that_do_not_fit_together_have_time_slices(
    specs: dict[str, Path], loads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients send one request after the other, each to its own model, with memory for one of them."""
    answers = {"one": 0, "two": 0}

    async def client(models: ModelManager, name: str, end: float) -> None:
        while time.monotonic() < end:
            await answer(models, name, 1)
            answers[name] += 1

    async def test(models: ModelManager) -> None:
        await answer(models, "one")
        with limited(monkeypatch, models.loaded()[0].nbytes * 1.1):
            begin, first = time.monotonic(), len(loads)
            await asyncio.gather(*(client(models, name, begin + 1.5) for name in answers))
            seconds, loading = time.monotonic() - begin, 0.02 * (len(loads) - first)
        print(answers, f"{loading / seconds:.0%} of the time are loads, at least")
        assert min(answers.values()) > 0 and len(loads) > first
        # Each load is tried, found not to fit and done, and then followed by a time slice of four times as long.
        assert loading < 0.5 * seconds

    with_models(specs, test, max_wait=60)


@fast
def test_a_request_waits_for_memory_in_use(specs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(models: ModelManager) -> None:
        reports: list[str] = []
        models.report = reports.append
        await answer(models, "one")
        with limited(monkeypatch, models.loaded()[0].nbytes * 1.1):
            async with models.use("one"):
                waiting = asyncio.create_task(answer(models, "two"))
                given_up = asyncio.create_task(answer(models, "three"))
                await asyncio.sleep(0.3)
                late = asyncio.create_task(answer(models, "one"))
                await asyncio.sleep(0.05)
                assert names(models) == ["one"] and not waiting.done() and not late.done(), (
                    "its time slice is over"
                )
                given_up.cancel()
            assert len(await waiting) == len(await late) == 5
            assert "one is unloaded: two needs its memory" in reports
            async with models.use("one"):
                models._max_wait = 0.1
                with pytest.raises(DoesNotFitError, match="being used meanwhile: one"):
                    await answer(models, "two")

    with_models(specs, test, max_wait=60)


@fast
def test_a_pinned_model_stays(specs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(models: ModelManager) -> None:
        models.add("stays", ModelSpec(specs["one"], pinned=True))
        models.add("other", ModelSpec(specs["one"], {"batch": 1}))
        assert models.shared_name("stays") == "one" and models.shared_name("other") == "other"
        await answer(models, "stays", keep_alive=0)
        await models.unload("one")
        assert names(models) == ["one"] and models.loaded()[0].pinned
        room = models.loaded()[0].nbytes * 1.1
        with limited(monkeypatch, room), pytest.raises(DoesNotFitError, match="pinned: one"):
            await answer(models, "two")
        models.remove("one")
        assert names(models) == ["stays"] and "one" not in models.names()
        models.remove("stays")
        await until(lambda: not models.loaded())

    with_models(specs, test, max_wait=60)


@fast
def test_a_name_that_is_given_again_stands_for_its_new_model(specs: dict[str, Path]) -> None:
    async def test(models: ModelManager) -> None:
        models.add("name", specs["two"])
        async with models.use("name") as before:
            models.remove("name")
            models.add("name", specs["three"])
            async with models.use("name") as now:
                assert now is not before and now.llm.nbytes
            models.add("again", specs["two"])
            async with models.use("again") as same:
                assert same is before, "it is in memory"
            assert sorted(names(models)) == ["three", "two"]
        assert (await answer(models, "name")) == (await answer(models, "three"))
        for name in ("name", "again", "two", "three"):
            models.remove(name)
        await until(lambda: not models.loaded())

    with_models(specs, test)


@fast
def test_a_cancelled_load_leaves_nothing_behind(specs: dict[str, Path], loads: list[Path]) -> None:
    async def test(models: ModelManager) -> None:
        gone, stays = (asyncio.create_task(answer(models, "one")) for _ in range(2))
        alone = asyncio.create_task(answer(models, "two"))
        await until(lambda: bool(loads))
        gone.cancel()
        alone.cancel()
        assert await stays
        await until(lambda: len(loads) == 2)
        await until(lambda: not models.loaded())

    with_models(specs, test, keep_alive=0.05)


@fast
def test_closing_waits_for_loads_and_ends_requests(specs: dict[str, Path], loads: list[Path]) -> None:
    async def test(models: ModelManager) -> None:
        tasks = [asyncio.create_task(answer(models, name, 200)) for name in ("one", "two", "three")]
        await until(lambda: bool(loads))
        await models.close()
        for task in tasks:
            with pytest.raises(RequestError, match="closed"):
                await task
        assert loads == [specs["one"]], "those that wait for their turn are not loaded any more"

    with_models(specs, test)


@fast
def test_a_model_whose_device_was_lost_is_loaded_again(specs: dict[str, Path], loads: list[Path]) -> None:
    async def test(models: ModelManager) -> None:
        await answer(models, "two")
        async with models.use("one") as llm:

            def lost() -> None:
                raise DeviceLostError("the GPU stopped: load the model again")

            llm.llm.engine.step = lost  # type: ignore[method-assign, assignment]
            with pytest.raises(DeviceLostError):
                await llm.generate("x")
            assert await answer(models, "one"), "with the first still in use"
        assert await answer(models, "one") == await answer(models, "two")
        assert len(loads) == 3

    with_models(specs, test)


@fast
def test_users_come_and_go(specs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two of three models: users keep theirs, others get an error, none hangs."""
    kinds: list[str] = []

    async def person(models: ModelManager, rng: random.Random) -> None:
        await asyncio.sleep(rng.random() * 0.3)
        name, keep = rng.choice(["one", "two", "three"]), rng.choice([None, 0.0, 0.01, math.inf])
        try:
            async with asyncio.timeout(rng.choice([0.002, 5])), models.use(name, keep_alive=keep) as llm:
                await asyncio.sleep(rng.random() * 0.02)
                kinds.append((await llm.generate("x", max_tokens=2)).text)
        except (TimeoutError, DoesNotFitError) as error:
            kinds.append(type(error).__name__)
        if rng.random() < 0.2:
            await models.unload(name)

    async def test(models: ModelManager) -> None:
        await answer(models, "one")
        with limited(monkeypatch, 2 * models.loaded()[0].nbytes):
            await asyncio.gather(*(person(models, random.Random(i)) for i in range(100)))
            assert len(models.loaded()) <= 2 and not any(each.users for each in models.loaded())
        answers = set(kinds) - {"TimeoutError", "DoesNotFitError"}
        assert len(kinds) == 100 and len(answers) == 1, kinds

    with_models(specs, test)


def use_of_machine() -> dict[str, int]:
    gc.collect()
    return {
        "resident": memory("VmRSS"),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
    }


@fast
def test_fifty_loads_leave_nothing_behind(specs: dict[str, Path]) -> None:
    async def test(models: ModelManager) -> None:
        def load_and_unload() -> Awaitable[Any]:
            return answer(models, "one", 2)

        for _ in range(5):
            await load_and_unload()
            await models.unload("one")
        before = use_of_machine()
        for _ in range(50):
            await load_and_unload()
            assert names(models) == ["one"]
            await models.unload("one")
        after = use_of_machine()
        print(before, after)
        assert after["threads"] <= before["threads"] + 4  # of asyncio's own pool
        assert after["files"] <= before["files"] and after["maps"] <= before["maps"] + 20
        assert after["resident"] < before["resident"] + 3e6

    with_models(specs, test)


def test_a_real_model_frees_its_memory() -> None:
    """Weights, keys and values, and the vocabulary's own."""

    async def test(models: ModelManager) -> None:
        await answer(models, "smollm2")
        await models.unload("smollm2")
        before = use_of_machine()["resident"]
        async with models.use("smollm2") as llm:
            await asyncio.gather(*(llm.generate(f"{i} and", max_tokens=4) for i in range(4)))
            loaded = use_of_machine()["resident"]
        await models.unload("smollm2")
        del llm
        left = use_of_machine()["resident"] - before
        print(f"{(loaded - before) / 1e6:.0f} MB more while loaded, {left / 1e6:.1f} MB after")
        assert loaded - before > 90e6 and left < 15e6

    with_models({"smollm2": model_path("smollm2")}, test, kv_memory=None)

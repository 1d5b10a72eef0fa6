"""A process that may have no more memory refuses what does not fit, and lives: every request gets an answer."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import re
import resource
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tandem import LLM, AsyncLLM
from tandem.devices.host_memory import require_memory
from tandem.errors import OutOfMemoryError, TandemError
from tandem.server.http.background import THREADS, start_threads
from tandem.server.http.middleware import Middleware, Refusal
from tandem.server.settings import ServerSettings
from tests.cli.tiny_model import write_tiny_model
from tests.hostile.generated import run_cases
from tests.models.test_bad_files import little_memory
from tests.models.test_reference import GOLDENS
from tests.server.servers import Running, serving, wait_until

CHAT = "/v1/chat/completions"
LIMIT = 60_000_000  # bytes above what the server has
SCHEMA = {"properties": {f"p{i}": {"enum": [f"v{i} {j}" for j in range(40)]} for i in range(200)}}

SMALL: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 3}),
    ("/tokenize", {"content": "a"}),
    ("/v1/embeddings", {"input": ["a b"]}),
]


def attacks(server: Running) -> list[tuple[str, dict[str, Any]]]:
    """Requests that need much memory: long texts, many values, many messages, large constraints, many inputs."""
    text = "word " * 300_000
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", **SCHEMA}}}
    return [
        (CHAT, server.chat("short", max_tokens=20)),
        (CHAT, server.chat(text)),
        ("/tokenize", {"prompt": text}),
        (CHAT, server.chat("json", max_tokens=20, response_format=schema)),
        (CHAT, {"messages": [{"role": "user", "content": "x"}] * 5_000}),
        ("/detokenize", {"tokens": [5] * 1_000_000}),
        ("/v1/embeddings", {"input": ["some words"] * 200}),
        (CHAT, server.chat("json", max_tokens=20, response_format={"type": "json_object"})),
        ("/v1/completions", {"prompt": [[5, 6, 7]] * 100, "max_tokens": 20, "logprobs": 5}),
    ]


def limit_memory(server: Running, spare: int | None) -> None:
    size = re.search(r"VmSize:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    assert size
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = most if spare is None else int(size[1]) * 1024 + spare
    resource.prlimit(server.process.pid, resource.RLIMIT_AS, (limit, most))


def attack(server: Running, rounds: int) -> Counter[tuple[str, int]]:
    """Sends all attacks at the same time; returns how often each status came."""
    found: Counter[tuple[str, int]] = Counter()
    problems: list[str] = []

    def send(path: str, body: dict[str, Any]) -> None:
        for _ in range(rounds):
            try:
                status, _, answer = server.ask(path, body)
            except OSError as error:
                problems.append(f"{path}: {error}")
                return
            found[path, status] += 1
            if status not in (200, 400) and not (status == 503 and "not enough memory" in str(answer)):
                problems.append(f"{path}: {status} {str(answer)[:200]}")

    threads = [threading.Thread(target=send, args=one) for one in attacks(server)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems
    return found


@pytest.mark.parametrize("rounds", [1, pytest.param(50, marks=pytest.mark.soak)])
def test_a_server_without_memory_refuses_and_lives(rounds: int, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf", context=2048)
    with serving(tmp_path, model, "--device", "cpu", context=2048, batch=8, shutdown=1) as server:
        assert server.ask(CHAT, server.chat(max_tokens=3))[0] == 200
        limit_memory(server, LIMIT)
        found = attack(server, rounds)
        assert sum(count for (_, status), count in found.items() if status == 503), found
        assert server.process.poll() is None and server.ask("/health")[0] == 200
        server.wait_idle()
        for path, body in SMALL:  # free memory is given back
            wait_until(lambda path=path, body=body: server.ask(path, body)[0] == 200)
        assert server.ask("/health")[2]["message"] == ""
        limit_memory(server, -LIMIT)
        assert "little memory" in server.ask("/health")[2]["message"]
        limit_memory(server, None)
        for path, body in attacks(server)[:1] + attacks(server)[7:]:
            assert server.ask(path, body)[0] == 200
        assert "Traceback" not in server.log.read_text()


def test_memory_is_required_in_advance() -> None:
    require_memory(1 << 20)
    # More than a process that ran other tests can give back.
    with little_memory(), pytest.raises(OutOfMemoryError, match="not enough memory"):
        require_memory(8 << 30)
    for impossible in (1 << 50, 1 << 80):
        with pytest.raises(OutOfMemoryError):
            require_memory(impossible)


def test_memory_that_requests_left_behind_is_given_back() -> None:
    """In a new process: what other tests left on the heap decides how much of it can be given back."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as new:
        new.submit(leave_memory_behind).result()


def leave_memory_behind() -> None:
    gc.collect()
    gc.disable()
    for _ in range(3):
        left: list[Any] = [bytearray(100_000) for _ in range(500)]
        left.append(left)  # a cycle
        del left
    with little_memory(8 << 20):
        require_memory(1 << 20)


def test_loading_with_little_memory() -> None:
    """From nothing to enough: each time an error, or the same tokens. A case that kills its process is a problem."""
    with LLM(GOLDENS / "llama.gguf", device="cpu", threads=3, context=64) as llm:
        expected = llm.generate([5, 6, 7], max_tokens=4).token_ids

    def case(number: int) -> None:
        try:
            with (
                little_memory(number << 22),
                LLM(GOLDENS / "llama.gguf", device="cpu", threads=3, context=64, kv_memory=1e6) as llm,
            ):
                assert llm.generate([5, 6, 7], max_tokens=4).token_ids == expected
        except (TandemError, MemoryError):
            assert number < 16

    assert not run_cases(case, range(18))


def test_a_step_without_memory_fails_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in a step memory is missing, the next requests are served, and no KV block is lost."""

    async def run() -> None:
        async with AsyncLLM(GOLDENS / "llama.gguf", device="cpu", threads=1, context=64) as llm:
            engine = llm.llm.engine
            expected = (await llm.generate([5, 6, 7], max_tokens=6)).token_ids
            places = (
                (engine.scheduler, "schedule"),
                (engine.scheduler, "complete"),
                (engine.step_slots[0].batch, "write"),
                (engine.step_slots[0].batch, "read"),
                (engine.device, "run"),
                (engine.cache, "reserve"),
                (engine.cache, "publish"),
                (engine.cache, "find_prefix"),
                (engine.cache, "attach_prefix"),
            )
            for nth, (owner, name) in enumerate(places):
                calls, whole = iter(range(100)), getattr(owner, name)

                def failing(*args: Any, calls: Any = calls, whole: Any = whole, **options: Any) -> Any:
                    if next(calls) == 2:
                        raise MemoryError
                    return whole(*args, **options)

                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, failing)
                    many = [llm.generate([i, 20 + nth, 7] * 9, max_tokens=6, temperature=0) for i in range(5)]
                    results = await asyncio.gather(*many, return_exceptions=True)
                assert any(isinstance(result, OutOfMemoryError) for result in results), name
                assert (await llm.generate([5, 6, 7], max_tokens=6)).token_ids == expected, name
                assert engine.cache.free_blocks == engine.cache.blocks, name

    asyncio.run(run())


def test_a_step_without_memory_fails_the_requests_of_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(GOLDENS / "llama.gguf", device="cpu", threads=1, context=64) as llm:
        expected = llm.generate([5, 6, 7], max_tokens=6).token_ids
        other = llm.stream([5, 6, 7], max_tokens=6)
        next(other)

        def failing(*_: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch, pytest.raises(OutOfMemoryError):
            patch.setattr(llm.engine.step_slots[0].batch, "read", failing)
            llm.generate([8, 9], max_tokens=6)
        with pytest.raises(OutOfMemoryError):
            list(other)
        assert llm.generate([5, 6, 7], max_tokens=6).token_ids == expected
        assert llm.engine.cache.free_blocks == llm.engine.cache.blocks


@pytest.mark.parametrize("name", ["tandem-engine", "tandem-constraints_0"])
def test_a_model_whose_thread_cannot_start_is_closed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, closed = threading.Thread.start, list[LLM]()

    def fail(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    options: dict[str, Any] = {"device": "cpu", "threads": 1, "context": 64}
    with LLM(GOLDENS / "llama.gguf", **options) as llm:
        monkeypatch.setattr(threading.Thread, "start", fail)
        monkeypatch.setattr(LLM, "close", lambda llm: closed.append(llm))
        with pytest.raises(OutOfMemoryError, match="not enough memory"):
            AsyncLLM(llm)
        assert not closed  # it was open
        with pytest.raises(OutOfMemoryError, match="not enough memory"):
            AsyncLLM(GOLDENS / "llama.gguf", **options)
        monkeypatch.undo()
        [own] = closed
        own.close()
        assert llm.generate([5, 6, 7], max_tokens=1).token_ids


def test_the_threads_of_requests_start_before_memory_is_scarce() -> None:
    """A thread that has no memory for its start would leave its request unanswered."""

    async def start() -> list[str]:
        start_threads()
        return [thread.name for thread in threading.enumerate()]

    names = asyncio.run(start())
    assert sum(name.startswith("tandem-request") for name in names) == THREADS
    assert sum(name.startswith("tandem-large") for name in names) == 1


def test_a_request_refused_after_its_body_leaves_nothing_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted down but never up, the estimate became negative, and every later request was refused."""
    results = iter((None, Refusal(429, "busy")))

    def check(counts: bool) -> None:
        if refusal := next(results):
            raise refusal

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"content": "Hi"}', "more_body": False}

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    async def app(*_: Any) -> None:
        raise AssertionError("it was refused")

    statuses: list[int | None] = []
    middleware = Middleware(app, ServerSettings())
    monkeypatch.setattr(middleware, "check_capacity", check)
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "tandem.abort": lambda: None,
    }  # fmt: skip
    asyncio.run(middleware(scope, receive, send))
    assert statuses[0] == 429
    assert middleware.parsed_bytes == middleware.body_bytes == 0

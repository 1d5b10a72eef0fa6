"""Many requests at once, each small enough to be served, do not stall streams or other requests."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from tandem import LLM
from tandem.engine.grammar_checker import GrammarChecker
from tandem.engine.params import SamplingParams
from tandem.engine.structured_output import grammar_text, is_simple
from tandem.errors import QueueFullError, RequestError
from tandem.gguf.file import GGUF
from tandem.model.chat_template import ChatTemplate
from tandem.model.tokenizer import Tokenizer
from tandem.server.app import ROUTERS
from tandem.server.http import background
from tandem.server.http.bodies import _validated, cancel_on_disconnect
from tandem.server.http.middleware import MAX_RESPONSES, MODEL_PATHS, READS, REFUSALS, Middleware
from tandem.server.ollama import models
from tandem.server.openai.chat import ChatRequest
from tandem.server.settings import ServerSettings
from tandem.threads import CREDIT_SECONDS, set_share, throttle
from tests.cli.tiny_model import write_tiny_model
from tests.hostile.attacks import (
    CHAT,
    MAX_HEALTH,
    MAX_LOG,
    MAX_MEMORY,
    attacking,
    check_streams,
    resident,
    watched,
)
from tests.hostile.stall_attacks import ATTACKS, FLOODS, slow_grammar
from tests.hostile.streams import Streams
from tests.packages import model_path
from tests.server.servers import Running, read_all, wait_until

SECONDS = 1.0  # of each attack
CHOICE = {"choice": ["yes", "no"]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


@pytest.mark.parametrize("name", FLOODS)
def test_others_are_served_during_a_flood(server: Running, name: str) -> None:
    with watched(server) as harm, attacking(server, name):
        time.sleep(SECONDS)
        for constraint in (CHOICE, {"json": SCHEMA}):
            begin = time.perf_counter()
            status, _, body = server.ask(CHAT, server.chat(max_tokens=2, structured_outputs=constraint))
            assert status == 200, body
            assert time.perf_counter() - begin < 3  # 58 s when grammars were checked in one queue
    print(harm)
    assert harm.health < MAX_HEALTH and harm.memory < MAX_MEMORY and harm.log < MAX_LOG, harm


@pytest.mark.soak
@pytest.mark.parametrize("name", FLOODS)
def test_streams_do_not_stall_during_a_flood(streaming: Running, name: str) -> None:
    check_streams(streaming, name)


# ---- preparation


@pytest.mark.parametrize("size", [1 << 10, 63 << 10, 1 << 20])
def test_requests_of_one_size_are_prepared_one_at_a_time(size: int) -> None:
    """Several threads would take the GIL and the processors from the engine."""
    running, most = 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        running -= 1

    async def request() -> None:
        background.set_size(size)
        await background.run_in_thread(work)

    async def requests() -> None:
        await asyncio.gather(*(request() for _ in range(8)))

    asyncio.run(requests())
    assert most == 1


def test_a_request_does_not_wait_for_larger_ones() -> None:
    busy = threading.Event()

    async def request(size: int) -> None:
        background.set_size(size)
        await background.run_in_thread(busy.wait if size > 64 << 10 else bool)

    async def requests() -> None:
        large = [asyncio.create_task(request(1 << 20)) for _ in range(16)]
        try:
            await asyncio.wait_for(asyncio.gather(request(1 << 10), request(32 << 10)), 5)
        finally:
            busy.set()
            await asyncio.gather(*large)

    asyncio.run(requests())


def test_a_thread_is_throttled_after_it_worked() -> None:
    assert seconds_of_two(busy_for) > 0.9 * (0.1 - CREDIT_SECONDS) / background.SHARE - 0.1


def test_a_thread_is_throttled_while_it_works() -> None:
    """A long preparation does not take a processor from the engine for as long as several steps."""

    def work(seconds: float) -> None:
        for _ in range(10):
            busy_for(seconds / 10)
            throttle()

    assert seconds_of_two(work) > 0.9 * (0.18 - CREDIT_SECONDS) / background.SHARE


def busy_for(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def seconds_of_two(work: Callable[[float], None]) -> float:
    """How long it takes to prepare two requests of medium size with 0.1 s of work each."""

    async def requests() -> float:
        background.set_size(32 << 10)
        begin = time.perf_counter()
        for _ in range(2):
            await background.run_in_thread(work, 0.1)
        return time.perf_counter() - begin

    return asyncio.run(requests())


def test_long_preparations_are_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of each kind: tokenizing, validation, templates."""
    sleeps: list[float] = []
    monkeypatch.setattr("tandem.threads.CREDIT_SECONDS", 0.0)

    def check(work: Callable[[], object]) -> None:
        def run() -> None:
            set_share(0.5)
            work()

        sleeps.clear()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        worked = [after - before for before, after in itertools.pairwise(sleeps)]  # s between them
        assert len(worked) > 3 and statistics.median(worked) < 0.01, worked

    with LLM(model_path("smollm2"), device="cpu", context=2048, batch=1, kv_memory=2e8) as llm:
        monkeypatch.setattr(time, "sleep", lambda _: sleeps.append(time.thread_time()))
        check(lambda: llm.tokenizer.encode("word " * 200_000))
        check(lambda: llm.tokenizer.encode("<|im_end|>" * 50_000, special=True))
    check(lambda: _validated(ATTACKS["messages"][1](), ChatRequest))
    template = ChatTemplate("{% for i in range(20000) %}{{ i }}{% endfor %}")
    check(lambda: template.render([{"role": "user", "content": "Hi"}]))


def test_a_long_merge_is_throttled() -> None:
    """SentencePiece merges a run of letters in one call."""
    tokenizer, ratios = Tokenizer.from_gguf(GGUF.open(model_path("gemma-3-270m"))), list[float]()

    def run() -> None:
        set_share(0.25)
        begin, worked = time.perf_counter(), time.thread_time()
        tokenizer.encode("a" * 300_000)  # not spaces: runs of them are tokens that need no merge
        ratios.append((time.perf_counter() - begin) / (time.thread_time() - worked))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ratios[0] > 2  # 1 without sleeps


# ---- grammars


def test_an_ordinary_grammar_does_not_wait_for_slow_ones() -> None:
    async def check() -> float:
        checker = GrammarChecker()
        try:
            await checker.check(_text(regex="a+"))  # starts the process
            slow = [asyncio.create_task(checker.check(_text(**slow_grammar(i)))) for i in range(16)]
            await asyncio.sleep(0.1)
            begin = time.perf_counter()
            await checker.check(_text(regex="b+"))
            seconds = time.perf_counter() - begin
            results = await asyncio.gather(*slow, return_exceptions=True)
            assert all(isinstance(result, RequestError) for result in results)
            assert any(isinstance(result, QueueFullError) for result in results)  # 16 s of work
            return seconds
        finally:
            await checker.close()

    assert asyncio.run(check()) < 2


def test_requests_share_the_check_of_a_grammar() -> None:
    async def check() -> None:
        checker = GrammarChecker()
        try:
            checks = [asyncio.create_task(checker.check(_text(**slow_grammar(0)))) for _ in range(50)]
            for result in await asyncio.gather(*checks, return_exceptions=True):
                assert isinstance(result, RequestError) and not isinstance(result, QueueFullError), result
        finally:
            await checker.close()

    asyncio.run(check())


def test_results_are_remembered_by_hash() -> None:
    """1,024 grammars of 128 KiB would be 128 MiB."""

    async def check() -> None:
        checker = GrammarChecker()
        try:
            await checker.check(_text(choices=[f"word {i}" for i in range(5000)]))
            assert all(len(key) == 32 for key in checker._results) and checker._results
        finally:
            await checker.close()

    asyncio.run(check())


def test_the_limit_of_a_constraint_counts_bytes() -> None:
    with pytest.raises(RequestError, match="give 131072 at most"):
        grammar_text(SamplingParams(grammar=f'start: "{chr(0x4E2D) * 50_000}"'))


@pytest.mark.parametrize(
    ("constraint", "simple"),
    [
        ({"choices": ["yes", "no"]}, True),
        ({"choices": ["x" * 5000]}, False),
        ({"json_schema": SCHEMA}, True),
        ({"json_schema": {"type": "array", "items": SCHEMA}}, True),
        ({"json_schema": {"type": "array", "items": {"pattern": "a"}}}, False),
        ({"json_schema": {"properties": {"pattern": {"type": "string", "pattern": "a"}}}}, False),
        ({"json_schema": {"properties": {"pattern": {"type": "string"}}}}, True),
        ({"json_schema": {"additionalProperties": {"anyOf": []}}}, False),
        ({"json_schema": {"x-guidance": {"whitespace_pattern": "a&b"}}}, False),
        ({"json_schema": '{"type": "object"}'}, False),
        ({"regex": "a+"}, False),
        ({"grammar": 'start: "a"'}, False),
    ],
)
def test_only_plain_constraints_are_not_checked(constraint: dict[str, object], simple: bool) -> None:
    assert is_simple(SamplingParams(**constraint)) is simple  # type: ignore[arg-type]


def _text(**constraint: object) -> str:
    return grammar_text(SamplingParams(**constraint))  # type: ignore[arg-type]


# ---- refusals


def test_an_address_that_is_refused_often_waits_while_others_are_served(server: Running) -> None:
    def refusals(count: int) -> float:
        begin = time.perf_counter()
        assert {server.ask("/wrong")[0] for _ in range(count)} == {404}
        return time.perf_counter() - begin

    assert refusals(12 * REFUSALS) < 10  # nobody else is served
    done = threading.Event()

    # Again and again: the model is so small that a long response takes less than a second.
    def others() -> None:
        while not done.is_set():
            assert server.ask(CHAT, server.chat(max_tokens=1500, ignore_eos=True))[0] == 200

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(others) for _ in range(3)]
        try:
            wait_until(lambda: server.running() == 3)
            assert refusals(2 * REFUSALS) > 0.8
            begin = time.perf_counter()
            assert server.ask("/health")[0] == 200 and server.ask("/v1/models")[0] == 200
            assert time.perf_counter() - begin < 0.5
        finally:
            done.set()
    assert not [each.exception() for each in waiting if each.exception()]


def test_an_address_that_reads_often_waits_while_others_are_served(server: Running) -> None:
    def reads(count: int) -> float:
        begin = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            assert {status for status, *_ in pool.map(lambda _: server.ask("/v1/models"), range(count))} == {
                200
            }
        return time.perf_counter() - begin

    with Streams(server.url, 1):
        assert reads(2 * READS) > 0.9
        begin = time.perf_counter()
        assert server.ask("/health")[0] == 200
        assert time.perf_counter() - begin < 0.5


def test_posts_that_run_no_model_are_reads() -> None:
    """Their number is limited while others are served, and so are their lines in the log. A new route is one of them
    until it is added to MODEL_PATHS."""
    posts = {
        route.path
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and "POST" in route.methods
    }
    assert posts >= MODEL_PATHS
    tokens = (
        "/v1/responses/input_tokens",
        "/v1/chat/completions/input_tokens",
        "/chat/completions/input_tokens",
    )
    stored = ("/v1/conversations", "/v1/conversations/{conversation_id}/items")
    others = (
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/v1/messages/count_tokens",
        "/api/show",
        "/api/pull",
        "/api/create",
        "/api/copy",
        "/mcp/{name}",
    )
    assert posts - MODEL_PATHS == {*tokens, *stored, *others}


def test_a_request_that_fails_as_its_client_leaves_logs_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Leaving:
        async def receive(self) -> dict[str, str]:
            return {"type": "http.disconnect"}

    async def failing() -> None:
        try:
            await asyncio.sleep(9)
        finally:
            raise RequestError("x")

    async def run() -> None:
        request: Any = Leaving()
        with pytest.raises(ClientDisconnect):
            await cancel_on_disconnect(request, failing())
        gc.collect()

    asyncio.run(run())
    assert not caplog.records


# ---- large responses


def test_large_responses_that_nobody_reads_do_not_fill_the_memory(server: Running) -> None:
    """Each client reads too much to be disconnected, and too little to be done."""
    metadata = {"a": "x" * 4_000_000}
    stored = server.ask("/v1/responses", {"input": "Hi", "max_output_tokens": 1, "metadata": metadata})[2]
    request = f"GET /v1/responses/{stored['id']} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()
    before, count = resident(server), 2 * MAX_RESPONSES // 4_000_000
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(count)]
    for client in clients:
        client.sendall(request)
        assert client.recv(1024).startswith(b"HTTP/1.1 200 OK")
    assert resident(server) - before < 1.5 * MAX_RESPONSES
    assert len(read_all(clients[0])) < 4_000_000, "the oldest was cut"
    last = b""
    while len(last) < 4_000_000:
        last += clients[-1].recv(1 << 20)
    for client in clients:
        client.close()


# ---- documents that are built once


def test_metadata_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened, read = write_tiny_model(tmp_path / "m.gguf"), list[Path](), GGUF.open

    def noted(path: Path) -> GGUF:
        opened.append(path)
        return read(path)

    monkeypatch.setattr(GGUF, "open", noted)
    first = models._model_info("m", path)
    assert models._model_info("m", path) == first and len(opened) == 1
    os.utime(path, (1, 1))
    assert models._model_info("m", path)["modified_at"] != first["modified_at"] and len(opened) == 2


# ---- clients that are slowed down


def refused(middleware: Middleware, address: str) -> Coroutine[Any, Any, None]:
    """A request that the app refuses."""
    headers = [(b"host", b"localhost")]
    scope = {
        "type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers,
        "client": (address, 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        pass

    return middleware(scope, receive, send)


async def refusing(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 400, "headers": []})
    await send({"type": "http.response.body"})


def test_refusals_that_wait_keep_nobody_out() -> None:
    async def run() -> None:
        middleware = Middleware(refusing, ServerSettings(access_log=False))
        middleware.working = 1  # another client's
        for _ in range(3 * REFUSALS):
            tasks.append(asyncio.create_task(refused(middleware, "192.0.2.7")))
        await asyncio.sleep(0.1)
        assert sum(not task.done() for task in tasks) > REFUSALS and middleware.working == 1
        await asyncio.gather(*tasks)
        assert middleware.working == 1

    tasks: list[asyncio.Task[None]] = []
    asyncio.run(run())


@pytest.mark.parametrize("address", ["2001:db8::{:x}", "an-address-made-up-{}"])
def test_addresses_of_one_network_wait_together(address: str) -> None:
    async def run() -> None:
        middleware = Middleware(refusing, ServerSettings(access_log=False))
        middleware.working = 1
        tasks = [asyncio.create_task(refused(middleware, address.format(i))) for i in range(2 * REFUSALS)]
        await asyncio.sleep(0.1)
        assert sum(not task.done() for task in tasks) > REFUSALS // 2 and len(middleware._due) == 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())

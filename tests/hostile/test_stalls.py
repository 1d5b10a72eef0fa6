"""One client cannot stall the others: under each attack, streams go on and /health answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from tandem import LLM
from tandem.engine import grammar_checker, job_process
from tandem.engine.grammar_checker import GrammarChecker
from tandem.engine.output import TokenLogprob
from tandem.engine.params import SamplingParams
from tandem.engine.structured_output import grammar_text
from tandem.errors import OutOfMemoryError, QueueFullError, RequestError, TandemError
from tandem.gguf.file import GGUF
from tandem.model.tokenizer import Tokenizer
from tandem.model.wordpiece import MAX_CHARACTERS, MAX_WORD
from tandem.server.anthropic import messages
from tandem.server.core.prompt import build_prompt
from tandem.server.http.bodies import _validated, pieces
from tandem.server.http.uvicorn_server import SWITCH_INTERVAL, shorten_collections
from tandem.server.llama_cpp import completion as llama_cpp
from tandem.server.openai import chat, completions, responses
from tandem.server.utility_routes import DetokenizeRequest, TokenizeRequest, _detokenized, _ids, _tokenized
from tests.hostile.attacks import (
    ATTEMPTS,
    CHAT,
    EXHAUSTION,
    attacking,
    check_harm,
    check_streams,
)
from tests.hostile.stall_attacks import ATTACKS, INTERSECTION, PATTERNS, send
from tests.models.test_encoders import GOLDENS
from tests.packages import model_path
from tests.server.servers import Running, post, wait_until

SECONDS = 1.0  # of each attack
MAX_HOLD = 0.05  # s of the GIL: two steps of the streams below
CONTEXT = 2048


PREPARATION: dict[str, tuple[type[BaseModel], Callable[[LLM, Any], Any]]] = {
    "/tokenize": (
        TokenizeRequest,
        lambda llm, body: _tokenized(llm, _ids(llm, body), with_pieces=bool(body.with_pieces)),
    ),
    "/detokenize": (DetokenizeRequest, _detokenized),
    CHAT: (chat.ChatRequest, lambda llm, body: build_prompt(llm, chat.generation_request(body), CONTEXT)),
    "/v1/completions": (
        completions.CompletionRequest,
        lambda llm, body: build_prompt(llm, completions.generation_requests(body, "m")[0], CONTEXT),
    ),
    "/v1/responses": (
        responses.ResponsesRequest,
        lambda llm, body: build_prompt(llm, responses.generation_request(body), CONTEXT),
    ),
    "/v1/messages/count_tokens": (
        messages.CountRequest,
        lambda llm, body: build_prompt(llm, messages.generation_request(body)),
    ),
}
NOT_PREPARED = ("text of 15 MB", "spaces of 15 MB", "inputs", "Ollama's messages")


@pytest.fixture(scope="module")
def holds() -> dict[str, float]:
    """Measured in a process of its own: threads that other tests have left would count."""
    command = [sys.executable, "-m", "tests.hostile.test_stalls"]
    found: dict[str, float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return found


@pytest.mark.parametrize("name", ATTACKS)
def test_health_is_answered_under_an_attack(server: Running, name: str) -> None:
    check_harm(server, name, SECONDS)


PREPARED = [name for name in ATTACKS if name not in NOT_PREPARED]


@pytest.mark.parametrize("name", PREPARED)
def test_preparation_lets_other_threads_run(holds: dict[str, float], name: str) -> None:
    """Threads wait for the GIL. Their wait is measured in processor time, so that other processes do not count."""
    assert holds[name] < MAX_HOLD


def preparation_holds() -> dict[str, float]:
    """Seconds by attack; of several attempts the last, which is the first below the bound."""
    found = {}
    with LLM(model_path("smollm2"), device="cpu", context=CONTEXT, batch=1, kv_memory=2e8) as llm:
        shorten_collections()  # as the server does
        for name in PREPARED:
            path, make = ATTACKS[name]
            model, work = PREPARATION[path]
            found[name] = first_short_hold(partial(_prepare, llm, make(), model, work))
    return found


def _prepare(llm: LLM, body: Any, model: type[BaseModel], work: Callable[[LLM, Any], Any]) -> None:
    with suppress(TandemError, RequestValidationError):
        work(llm, _validated(body, model))


def test_word_pieces_let_other_threads_run() -> None:
    """Marks of accents took the square of their number, hours for 4 MB; and the caches are bounded."""
    tokenizer = Tokenizer.from_gguf(GGUF.open(GOLDENS / "bert.gguf"))
    for text in ("\u0301\u0316" * 250_000, "!" * 500_000, "Ä각 " * 150_000, "x" * 1_000_000):
        assert first_short_hold(lambda text=text: tokenizer.encode(text)) < MAX_HOLD  # type: ignore[misc]
    tokenizer.encode("".join(map(chr, range(0x10000, 0x50000))))
    assert tokenizer._word_piece
    assert len(tokenizer._word_piece._characters) <= MAX_CHARACTERS
    assert max(map(len, tokenizer._word_piece._words)) <= MAX_WORD


def large_embeddings() -> Any:
    vector = [0.0123456789 * i for i in range(1024)]
    return {"data": [{"index": i, "embedding": vector} for i in range(1000)], "model": "m"}


def large_logprobs() -> Any:
    tokens = [
        TokenLogprob(i, "text", -1.5, tuple((j, f"t{j}", -2.5) for j in range(20))) for i in range(4000)
    ]
    return {"choices": [{"index": 0, "logprobs": make(tokens)} for make in LOGPROBS]}


LOGPROBS: tuple[Callable[[Any], Any], ...] = (
    chat.logprobs_body,
    lambda tokens: completions._logprobs(tokens, 0),
)


@pytest.mark.parametrize("build", [large_embeddings, large_logprobs])
def test_a_large_response_lets_other_threads_run(build: Callable[[], Any]) -> None:
    """`json` alone would hold the GIL for a second."""
    value = build()
    assert json.loads("".join(pieces(value))) == value
    assert first_short_hold(lambda: deque(pieces(value), 0)) < MAX_HOLD


def first_short_hold(call: Callable[[], Any]) -> float:
    for _ in range(ATTEMPTS):
        hold = longest_hold(call)
        if hold < MAX_HOLD:
            break
    return hold


def longest_hold(call: Callable[[], Any]) -> float:
    """The longest time that `call` does not let another thread run."""
    holds, done, before = [0.0], threading.Event(), sys.getswitchinterval()

    def watch() -> None:
        last = time.process_time()
        while not done.wait(0.001):
            now = time.process_time()
            holds.append(now - last)
            last = now

    sys.setswitchinterval(SWITCH_INTERVAL)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
        sys.setswitchinterval(before)
    return max(holds)


TOGETHER = list(zip(ATTACKS, itertools.cycle(EXHAUSTION), strict=False))


def test_a_small_request_does_not_wait_for_large_ones(server: Running) -> None:
    """Those take turns in a thread of their own."""
    with attacking(server, "messages", "spaces to tokenize", "an intersection"):
        time.sleep(SECONDS)
        for _ in range(5):
            begin = time.perf_counter()
            assert server.ask(CHAT, server.chat(max_tokens=1))[0] == 200
            assert time.perf_counter() - begin < 5  # the large ones take longer, one after the other
            assert server.ask("/tokenize", {"content": "Hi"})[2]["count"] > 0


@pytest.mark.soak
@pytest.mark.parametrize(
    "attacks",
    [
        *(pytest.param(pair, id=pair[0]) for pair in TOGETHER),
        pytest.param(tuple(EXHAUSTION), id="all of test_exhaustion.py"),
    ],
)
def test_streams_do_not_stall_under_an_attack(streaming: Running, attacks: tuple[str, ...]) -> None:
    """Each attack at the same time as one of test_exhaustion.py, and all of those."""
    check_streams(streaming, *attacks)


def test_large_requests_of_clients_that_have_left_are_not_prepared(server: Running) -> None:
    """Others wait for them, or are refused. /health is answered even then."""
    request = post("/tokenize", {"content": "word " * 700_000})
    before = server.cpu_seconds()
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
    for client in clients:
        client.sendall(request)
    assert server.ask("/health")[0] == 200
    for client in clients:
        client.close()
    wait_until(lambda: server.ask("/tokenize", {"content": "x" * 100_000})[0] == 200)
    assert server.cpu_seconds() - before < 2.5  # 8 of them take 4 s


# ---- what is refused, and what is not


def test_a_text_beyond_the_context_is_refused_at_once(server: Running) -> None:
    assert server.ask("/tokenize", {"content": "x" * 100_000})[0] == 200  # after those of attacks before
    for text in (" " * 3_000_000, "a" * 3_000_000, "<|im_end|>" * 300_000):
        before = server.cpu_seconds()
        status, _, body = server.ask(CHAT, server.chat(text))
        assert status == 400 and "maximum context length is 2048 tokens" in body["error"]["message"]
        assert server.cpu_seconds() - before < 1  # 3 MB would take several seconds


def test_too_many_messages_are_refused_before_they_are_rendered(server: Running) -> None:
    status, _, body = server.ask(CHAT, {"messages": [{"role": "user", "content": ""}] * 2050})
    assert status == 400 and "it has 2050 messages" in body["error"]["message"]


def test_too_many_values_are_refused_before_they_are_parsed(server: Running) -> None:
    status, _, body = server.ask("/detokenize", {"tokens": [1] * 300_000})
    assert status == 400 and "300009 values" in body["error"]["message"]
    text = 'a,b[c{"' * 100_000  # in a text they are no values
    assert server.ask("/tokenize", {"content": text})[0] == 200


def test_too_many_values_in_a_text_are_refused_before_they_are_parsed(server: Running) -> None:
    """Arguments of tool calls and schemas are texts in JSON."""
    values = f"[{'[],' * 1_000_000}1]"
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": values}}],
    }
    for body, message in (
        ({"messages": [called, *server.chat()["messages"]]}, "more than 262144 values"),
        (server.chat(structured_outputs={"json": values}), "it has 3000003 characters: give 131072 at most"),
        (server.chat(structured_outputs={"regex": "a" * 1_000_000}), "it has 1000000 characters"),
    ):
        before = server.cpu_seconds()
        status, _, answer = server.ask(CHAT, body)
        assert status == 400 and message in answer["error"]["message"]
        assert server.cpu_seconds() - before < 0.3


def test_a_number_beyond_all_floats_is_refused(server: Running) -> None:
    for field in (
        '"metadata": {"a": 1e999}',
        '"tools": [{"type": "function", "name": "f", "parameters": {"maximum": [-1e999]}}]',
        '"text": {"format": {"type": "json_schema", "schema": {"maximum": 1e999}}}',
    ):
        status, answer = send(server.url, "/v1/responses", f'{{"input": "Hi", {field}}}'.encode())[:2]
        assert status == 400 and b"a number is larger than 1.8e308" in answer, answer


def test_errors_repeat_little_of_a_request(server: Running) -> None:
    name = "x" * 1_000_000
    tool = {"type": "function", "function": {"name": "f"}}
    choice = {"type": "function", "function": {"name": name}}
    for body in (server.chat(model=name), server.chat(tools=[tool], tool_choice=choice)):
        status, _, answer = server.ask(CHAT, body)
        assert status in (400, 404) and len(answer["error"]["message"]) < 1100


def test_large_requests_are_answered_like_small_ones(server: Running) -> None:
    text = "The quick brown fox, the lazy dog; 12,345 \u00e9\u4e2d\U0001f600 \n\n  " * 3000
    status, _, body = server.ask("/tokenize", {"content": text})
    assert status == 200 and body["count"] == len(body["tokens"]) and body["max_model_len"] == 2048
    assert server.ask("/detokenize", {"tokens": body["tokens"]})[2] == {"prompt": text, "content": text}
    counted = server.ask("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]})[2]
    assert counted["input_tokens"] > body["count"]
    padded = server.chat(max_tokens=1, user="x" * 100_000)
    assert server.ask(CHAT, padded)[2]["choices"] == server.ask(CHAT, server.chat(max_tokens=1))[2]["choices"]


def test_errors_of_large_requests_name_the_field(server: Running) -> None:
    filler = "x" * 100_000
    for body, message in (
        ({"messages": [{"role": "x", "content": filler}]}, "messages.0.role: "),
        ({"messages": [{"role": "x", "content": filler}] * 3}, "messages.0.role: "),
        (server.chat(filler, colour="red"), "`colour` is not supported"),
        (server.chat(filler, logit_bias={str(i): "x" for i in range(200)}), "200 errors"),
    ):
        status, _, answer = server.ask(CHAT, body)
        assert status == 400 and message in answer["error"]["message"]
    assert send(server.url, CHAT, b"[" * 100_000)[0] == 400


def test_responses_repeat_little_of_a_request(server: Running) -> None:
    """2,048 responses with 4 MB of stop strings each would take 8 GB."""
    stops, grammar = ["x" * 10_000 + str(i) for i in range(64)], 'root ::= "a" # ' + "x" * 100_000
    for more in ({"stop": stops}, {"grammar": grammar}):
        body = {"prompt": ["a"] * 16, "n_predict": 1, **more}
        status, _, answer = server.ask("/completion", body)
        assert status == 200 and len(json.dumps(answer)) < 16 * 10_000
    names = ["/" * 50_000] * 10
    assert server.ask("/completion", {"prompt": "a", "response_fields": names})[0] == 400


def test_texts_of_biases_are_tokenized_in_a_thread() -> None:
    """A thousand long texts would hold the event loop for a tenth of a second."""
    threads: list[str] = []

    class Recorder:
        def encode(self, text: str, **options: Any) -> list[int]:
            threads.append(threading.current_thread().name)
            return [3]

    @asynccontextmanager
    async def use(name: str) -> AsyncIterator[Any]:
        yield SimpleNamespace(llm=SimpleNamespace(tokenizer=Recorder()))

    server: Any = SimpleNamespace(models=SimpleNamespace(use=use), model_name=str)
    body = llama_cpp.CompletionRequest.model_validate({"prompt": "a", "logit_bias": [["text", 1.0]]})
    assert asyncio.run(llama_cpp._params(server, body))["logit_bias"] == {3: 1.0}
    assert threads == ["tandem-small_0"]


@pytest.mark.parametrize(
    "grammar", ["root ::= a", 'a ::= "x"', "root ::= (", "::=", "root ::= [", 'root ::= "x"{9']
)
def test_a_grammar_of_llama_cpp_that_is_wrong_is_refused(grammar: str) -> None:
    with pytest.raises(RequestError, match="cannot be used"):
        grammar_text(SamplingParams(grammar=grammar))


def test_a_long_chain_of_rules_is_translated_in_time() -> None:
    """Each rule names the next: llguidance's translation alone would take 7 s."""
    rules = [f"a{i} ::= a{i + 1} a{i + 1}" for i in range(4000)]
    begin = time.process_time()
    text = grammar_text(SamplingParams(grammar="\n".join(["root ::= a0", *rules, 'a4000 ::= "x"'])))
    assert time.process_time() - begin < 2 and "start: A0" in text and 'A4000: "x"' in text


def test_too_many_responses_are_refused(server: Running) -> None:
    status, _, body = server.ask("/v1/completions", {"prompt": ["a"] * 2048, "n": 128, "max_tokens": 1})
    assert status == 400 and "more than 4096 responses" in body["error"]["message"]


# ---- grammars


ENDLESS: dict[str, dict[str, Any]] = {
    "intersection": {"grammar": f"start: T\nT: {INTERSECTION}\n"},
    "patterns": {"json_schema": PATTERNS},
}


def with_process(check: Callable[[GrammarChecker, str, str], Coroutine[Any, Any, None]], name: str) -> None:
    """Calls `check` with a process, a grammar that does not end and one that does."""

    async def run() -> None:
        process = GrammarChecker()
        try:
            bad, good = (grammar_text(SamplingParams(**one)) for one in (ENDLESS[name], {"regex": "a+"}))
            await check(process, bad, good)
        finally:
            await process.close()

    asyncio.run(run())


@pytest.mark.parametrize("name", ENDLESS)
def test_a_grammar_that_does_not_end_is_ended(name: str) -> None:
    async def check(process: GrammarChecker, bad: str, good: str) -> None:
        with pytest.raises(RequestError, match="too complex"):
            await process.check(bad)
        await process.check(good)  # in a new process
        with pytest.raises(RequestError, match="too complex"):
            await process.check(bad)  # remembered

    with_process(check, name)


def test_a_cancelled_check_does_not_answer_the_next() -> None:
    async def check(process: GrammarChecker, bad: str, good: str) -> None:
        await process.check(good)  # the process has started
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.check(bad), 0.1)
        await process.check(good + "\n")

    with_process(check, "intersection")


def test_a_killed_process_is_not_the_grammars_fault() -> None:
    """It is not remembered: the next request starts another process."""

    async def check(process: GrammarChecker, bad: str, good: str) -> None:
        checking = asyncio.create_task(process.check(bad))
        while process._slow._process is None:
            await asyncio.sleep(0.01)
        os.kill(process._slow._process.pid, signal.SIGKILL)
        with pytest.raises(OutOfMemoryError, match="try again"):
            await checking
        await process.check(good)
        with pytest.raises(RequestError, match="too complex"):
            await process.check(bad)

    with_process(check, "intersection")


def test_a_stopped_process_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_process, "ANSWER", 0.3 - grammar_checker.WALL)

    async def check(process: GrammarChecker, bad: str, good: str) -> None:
        await process.check(good)
        assert process._quick._process
        os.kill(process._quick._process.pid, signal.SIGSTOP)
        other = grammar_text(SamplingParams(regex="b+"))
        with pytest.raises(QueueFullError, match="could not be checked in time: try again"):
            await process.check(other)
        monkeypatch.setattr(job_process, "ANSWER", 60)
        await process.check(other)

    with_process(check, "intersection")


def test_a_large_grammar_is_refused() -> None:
    with pytest.raises(RequestError, match="give 131072 at most"):
        grammar_text(SamplingParams(grammar="start: " + " | ".join(f'"w{i}"' for i in range(60_000))))


if __name__ == "__main__":
    print(json.dumps(preparation_holds()))

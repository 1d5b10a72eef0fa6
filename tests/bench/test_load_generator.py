"""The comparison of servers and `tandem bench serve`: what clients count and time, against servers made up for it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import tracemalloc
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from benchmarks import serving_clients as clients
from benchmarks.serving import MEASURES, table
from tandem import cli
from tandem.bench import load_generator
from tandem.bench.http_client import Client, Refused
from tandem.bench.load_generator import (
    Load,
    ServeRow,
    ServerTarget,
    closed_loop,
    percentiles,
    poisson,
    summary,
)
from tandem.errors import RequestError

pytestmark = pytest.mark.fast

STEP = 0.002  # seconds between its tokens


async def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: list[dict[str, Any]]
) -> None:
    """Two tokens at a time, and events without a text, as servers send them; the first comes after the prompt."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.partition("Content-Length: ")[2].split()[0])
    request = json.loads(await reader.readexactly(length))
    seen.append(request)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    try:
        await asyncio.sleep(1e-5 * len(request["prompt"]))
        for i in range(request["max_tokens"]):
            writer.write(b'data: {"choices": [{"text": "a", "index": 0}]}\n\n')
            if i % 2:
                await writer.drain()
                await asyncio.sleep(STEP)
        writer.write(b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n')
    except ConnectionError:
        pass
    finally:
        writer.close()


def run(measure: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
    seen: list[dict[str, Any]] = []

    async def main() -> dict[str, float]:
        server = await asyncio.start_server(lambda *both: answer(*both, seen), "127.0.0.1", 0)
        async with server:
            found: dict[str, float] = await measure(server.sockets[0].getsockname()[1])
            return found

    return asyncio.run(main()), seen


def test_a_load_has_the_same_requests_for_both_sides() -> None:
    texts = clients.Texts(range(1000, 1300))
    found, first = run(lambda port: clients.load(port, texts, 3, 6, seed=1))
    _, second = run(lambda port: clients.load(port, texts, 3, 6, seed=1))

    def sizes(requests: list[dict[str, Any]]) -> list[tuple[int, int]]:
        return sorted((len(request["prompt"]), request["max_tokens"]) for request in requests)

    assert sizes(first) == sizes(second) and len(first) == 6
    assert len({request["prompt"][0] for request in first + second}) == 12, "no prompt begins like another"
    assert all(
        request["temperature"] == 0 and request["ignore_eos"] and request["stream"] for request in first
    )
    tokens = sum(request["max_tokens"] for request in first)
    longest = max(request["max_tokens"] for request in first) / 2 * STEP
    assert 0 < found["tokens_per_s"] < tokens / longest
    assert 0 < found["first_token_s"] <= found["first_token_p99_s"] < 5


def test_streams_are_timed_before_and_while_a_prompt_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "QUIET", 0.1)
    found, seen = run(lambda port: clients.disturbed(port, clients.Texts(range(300))))
    assert sorted(len(request["prompt"]) for request in seen) == [clients.TAIL] * clients.STREAMS + [
        clients.LONG
    ]
    assert found["p99_of_quiet"] == pytest.approx(found["during_p99_s"] / found["quiet_s"])
    shared, seen = run(lambda port: clients.shared(port, clients.Texts(range(3000))))
    prompts = [request["prompt"] for request in seen]
    assert prompts[0][: clients.PREFIX] == prompts[1][: clients.PREFIX] != prompts[2][: clients.PREFIX]
    assert shared["warm_of_cold"] == pytest.approx(shared["warm_s"] / shared["cold_s"])


def test_the_table_says_what_was_reached() -> None:
    keys = (
        "tokens_per_s",
        "first_token_p99_s",
        "p99_of_during",
        "p99_of_quiet",
        "first_token_s",
        "cold_s",
        "warm_of_cold",
        "others",
    )
    values = {
        "ours": (1000.0, 0.1, 1.5, 2.5, 2.0, 0.5, 0.04, 0.01),
        "peer": (300.0, 1.0, 6.0, 9.0, 8.0, 2.0, 0.5, 0.2),
    }

    def both(scale: float) -> dict[str, dict[str, float]]:
        return {side: dict(zip(keys, np.array(row) * scale, strict=True)) for side, row in values.items()}

    rounds = [{name: both(scale) for name in MEASURES} for scale in (0.99, 1.0, 1.01)]
    text = table(
        {
            "models": [{"name": "m", "rounds": rounds}],
            "settings": {"rounds": 3, "threads": 2},
            "machine": {"cpu": "a CPU", "cores": 2},
            "date": "today",
            "versions": {"tandem": "Tandem", "peer": "1"},
        }
    )
    assert text.count("| met") == 4 and "missed" not in text
    assert "3.33 (3.33-3.33)" in text and "Warning: other processes took up to 20% of the machine" in text


# ---- tandem bench serve

FIRST, GAP = 0.1, 0.02  # seconds of the made-up server: until the first token, and between tokens
LOAD = Load(rate=50.0, requests=12, prompt=10, generate=4, timeout=10.0)


class MadeUp:
    """A server with OpenAI's API that takes the time it is told to. Every `bad`th request it answers with `how`."""

    def __init__(self, bad: int = 0, how: str = "") -> None:
        self.bad, self.how, self.bodies = bad, how, list[dict[str, Any]]()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET"):
            await self._send(writer, 200, b'{"data": [{"id": "one"}, {"id": "two"}]}')
            return
        length = int(head.partition("Content-Length: ")[2].split()[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        wrong = self.how if self.bad and len(self.bodies) % self.bad == 0 else ""
        if self.how == "strict" and "ignore_eos" in body:
            await self._send(writer, 400, b'{"error": {"message": "what is ignore_eos?"}}')
        elif wrong == "full":
            await self._send(writer, 429, b'{"error": {"message": "come back later"}}')
        elif wrong == "gone":
            writer.close()
        elif wrong == "babble":
            await self._send(writer, 200, b"data: {1}\n\n")
        else:
            await self._stream(writer, body["max_tokens"], wrong)

    async def _send(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(f"HTTP/1.1 {status} \r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, tokens: int, wrong: str) -> None:
        """In chunks that end in the middle of events, as proxies make them."""
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        text = {"choices": [{"delta": {"content": "word "}}]}
        end = {"choices": [], "usage": {"prompt_tokens": 15, "completion_tokens": tokens}}
        for i in range(tokens):
            await asyncio.sleep(FIRST if i == 0 else GAP)
            data = f"data: {json.dumps(text)}\n\n".encode()
            for part in (data[:20], data[20:]):
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            if wrong == "cut":
                writer.close()
                return
        last = f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n".encode()
        writer.write(f"{len(last):x}\r\n".encode() + last + b"\r\n0\r\n\r\n")
        writer.close()


def drive(made_up: MadeUp, load: Load = LOAD, model: str | None = None) -> tuple[ServeRow, ServerTarget]:
    async def main() -> tuple[ServeRow, ServerTarget]:
        async with await asyncio.start_server(made_up, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            server = ServerTarget(f"http://127.0.0.1:{port}/v1", model, None)
            await server.probe(load)
            return await poisson(server, load), server

    return asyncio.run(main())


def test_known_delays_are_measured() -> None:
    for _ in range(3):  # other processes can only add to them
        row, server = drive(made_up := MadeUp())
        assert row["ttft"] and row["between_tokens"] and row["whole"]
        if row["ttft"]["p50"] < FIRST + 0.3 and row["between_tokens"]["p50"] < GAP + 0.1:
            break
    assert server.model == "one" and row["answered"] == 12 and not row["errors"] and not server.notes
    assert FIRST < row["ttft"]["p50"] < FIRST + 0.3 and row["ttft"]["p50"] <= row["ttft"]["p99"]
    assert GAP / 2 < row["between_tokens"]["p50"] < GAP + 0.1
    assert row["whole"]["p50"] > row["ttft"]["p50"]
    wanted = made_up.bodies[1:]  # after the one that warms up
    assert row["tokens"] == sum(body["max_tokens"] for body in wanted) and row["prompt_tokens"] == 12 * 15
    assert {2, 6} >= {min(b["max_tokens"] for b in wanted), max(b["max_tokens"] for b in wanted)} - {3, 4, 5}
    texts = [body["messages"][0]["content"] for body in wanted]
    assert len(set(texts)) == 12 and all(5 <= len(text.split()) <= 15 for text in texts)
    assert all(body["stream"] and body["ignore_eos"] and body["model"] == "one" for body in wanted)


def test_arrivals_are_poissons() -> None:
    """Gaps are those of an exponential distribution, and the next run has the same."""
    asked: list[float] = []

    class Silent(ServerTarget):
        async def stream(self, text: str, tokens: int, due: float | None = None) -> Any:
            asked.append(due or 0.0)
            raise ConnectionRefusedError(111, "refused")

    load = Load(rate=2000.0, requests=400, prompt=1, generate=1, timeout=1.0, seed=3)
    server = Silent("http://127.0.0.1:1", "m", None)
    row = asyncio.run(poisson(server, load))
    assert row["errors"] == {"no connection: refused": 400} and row["answered"] == 0 and row["ttft"] is None
    gaps = np.diff(sorted(asked))
    assert np.mean(gaps) == pytest.approx(1 / 2000, rel=0.15) and np.std(gaps) == pytest.approx(
        1 / 2000, rel=0.25
    )
    first = list(asked)
    asked.clear()
    asyncio.run(poisson(server, load))
    assert np.diff(sorted(asked)) == pytest.approx(np.diff(sorted(first)), abs=1e-9)


@pytest.mark.parametrize(
    ("how", "said"),
    [("full", "HTTP 429"), ("gone", "closed"), ("cut", "cut off"), ("babble", "not the OpenAI API")],
)
def test_errors_are_counted(how: str, said: str) -> None:
    row, _ = drive(MadeUp(3, how))
    assert row["errors"] == {said: 4} and row["answered"] == 8 and len(row["ttft_seconds"]) == 8


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
NESTED = b"[" * 200_000
ENDLESS = 64  # MiB, more than any client should keep


async def hostile(part: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends a part of a response again and again."""
    await reader.readuntil(b"\r\n\r\n")
    with suppress(ConnectionError):
        writer.write(HEAD)
        for _ in range((ENDLESS << 20) // len(part)):
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
    writer.close()


@pytest.mark.parametrize(
    ("part", "model"),
    [
        *((part, model) for part in (b"x" * 65536, b"data:" * 9999, NESTED) for model in (None, "m")),
        (b"\n" * 65536, None),  # as a stream, it ends at --timeout
    ],
)
def test_a_response_without_end_is_cut(part: bytes, model: str | None) -> None:
    async def main() -> None:
        async with await asyncio.start_server(partial(hostile, part), "127.0.0.1", 0) as listening:
            server = ServerTarget(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", model, None)
            await server.probe(LOAD)

    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as raised:
            asyncio.run(main())
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    "event",
    [
        b'{"choices": [], "usage": {"prompt_tokens": "1", "completion_tokens": [2]}}',
        b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1e400}}',
        b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": -1}}',
        b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1%b}}' % (b"0" * 4000),
        b'{"choices": [], "usage": 5}', b'{"choices": null}', b'{"choices": [3]}', b"[]", b"3", b"null", NESTED,
        b'{"error": null}', b'{"error": "x"}', b'{"error": {"code": {}, "message": []}}', b"\xff", b"{",
    ],
)  # fmt: skip
def test_events_of_any_kind_are_counted_as_errors(event: bytes) -> None:
    class Odd(MadeUp):
        async def _stream(self, writer: asyncio.StreamWriter, tokens: int, wrong: str) -> None:
            if len(self.bodies) == 1:  # the probe
                return await super()._stream(writer, tokens, wrong)
            good = b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\n'
            return await self._send(writer, 200, good + b"data: " + event + b"\n\n")

    load = Load(rate=0.0, requests=2, prompt=2, generate=1, timeout=10.0, clients=1)

    async def main() -> ServeRow:
        async with await asyncio.start_server(Odd(), "127.0.0.1", 0) as listening:
            server = ServerTarget(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", None, None)
            await server.probe(load)
            return await closed_loop(server, load)

    row = asyncio.run(main())
    assert sum(row["errors"].values()) == 2 and len(row["errors"]) == 1


@pytest.mark.parametrize("listed", [b'{"data": [{"id": 5}]}', b'{"data": [{"id": [1]}]}', NESTED])
def test_a_list_of_models_without_names(listed: bytes) -> None:
    class Odd(MadeUp):
        async def _send(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
            await super()._send(writer, status, listed)

    with pytest.raises(RequestError, match="lists no models"):
        drive(Odd())


def test_a_server_that_wants_a_key() -> None:
    assert "--api-key" in str(Refused(401, b'{"error": {"message": "send a header"}}'))


def test_a_server_that_is_strict_about_options() -> None:
    made_up = MadeUp(how="strict")
    row, server = drive(made_up, model="two")
    assert row["answered"] == 12 and server.model == "two"
    assert server.notes == ["the server does not support ignore_eos: answers may be shorter than requested"]


def test_a_server_that_does_not_keep_up_or_sends_pieces() -> None:
    def answers(waits: list[float], tokens: int) -> list[Any]:
        return [clients.StreamTimes(0.0, [wait, wait + 1], tokens, 5, wait + 1) for wait in waits]

    row = summary(LOAD, answers([0.1, 0.1, 0.5, 1.0, 2.0, 2.5], 2), {}, 0.0, 0.2)
    assert [warning.partition(":")[0] for warning in row["warnings"]] == [
        "requests arrived faster than they were answered",
        "this client sent requests up to 0.20 s late",
    ]
    assert row["tokens_per_s"] == pytest.approx(12 / 3.5) and row["requests_per_s"] == pytest.approx(6 / 3.5)
    assert not summary(LOAD, answers([0.1, 0.1, 0.5], 2), {}, 0.0, 0.0)["warnings"], "three tell nothing"
    row = summary(LOAD, answers([0.1] * 6, 9), {}, 0.0, 0.0)
    assert row["warnings"] == ["54 tokens came in 12 events: the inter-token latency is that between events"]
    assert percentiles([1.0, 2.0, 3.0]) == {
        "p50": 2.0,
        "p90": pytest.approx(2.8),
        "p99": pytest.approx(2.98),
        "max": 3.0,
    }


@pytest.mark.parametrize(
    ("said", "options", "message"),
    [
        (b"", ["--timeout", "0.2"], "did not answer a first request in 0.2 s: check the server, or"),
        (b"", ["--timeout", "0.2", "--model", "m"], "did not answer a first request in 0.2 s"),
        (b"220 mail.example ESMTP\r\n", [], "is not of the OpenAI API: check the address"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", [], "lists no models: name one with --model"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * (2 << 20), [], "(a head of more than 1048576 bytes)"),
    ],
)
def test_a_server_that_is_none(
    said: bytes, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes connections, and says one thing at most."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with listening.accept()[0] as taken, suppress(ConnectionError):
                taken.sendall(said)
                taken.recv(1 << 16)  # the request, or that the client has gone
                taken.recv(1)

        threading.Thread(target=answer, daemon=True).start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert cli.main(["bench", "serve", address, *options]) == 1
    assert message in capsys.readouterr().err


def test_what_bench_serve_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["localhost:8000"], "is not the address of a server"),
        (["http://127.0.0.1:1"], "there is no server at http://127.0.0.1:1 (Connection refused): start"),
        (
            ["http://127.0.0.1:1", "--model", "m"],
            "there is no server at http://127.0.0.1:1 (Connection refused)",
        ),
        (["http://127.0.0.1:99999"], "is not the address of a server"),
        (["http://[::1"], "is not the address of a server"),
    ):
        assert cli.main(["bench", "serve", *arguments]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(RequestError, match="not the address"):
        Client("ftp://somewhere")
    assert "\n" not in str(Refused(404, b"<html>\n<p>nothing here\n")), "one sentence"
    assert str(Refused(500, b"one\ntwo")) == "the server answered 500: one"
    assert len(set(load_generator.WORDS.split())) == len(load_generator.WORDS.split())

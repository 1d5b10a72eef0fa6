"""The comparison of servers: what clients count and time, against a server made up for it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from benchmarks import clients
from benchmarks.serving import MEASURES, table

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
        "p99_of_quiet",
        "first_token_s",
        "cold_s",
        "warm_of_cold",
        "others",
    )
    values = {"ours": (1000.0, 0.1, 2.5, 2.0, 0.5, 0.04, 0.01), "peer": (300.0, 1.0, 9.0, 8.0, 2.0, 0.5, 0.2)}

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
    assert text.count("| met") == 3 and "missed" not in text
    assert "3.33 (3.33-3.33)" in text and "Careful: others took up to 20% of the machine" in text

"""Requests like clients' own, with odd parts: each gets a response in valid JSON, or an error in a sentence."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest

from tests.hostile.api_requests import Requests
from tests.hostile.attacks import MiB, resident
from tests.models.test_vision import GOLDENS
from tests.server.servers import Running, serving, wait_until

COUNT, CLIENTS = 100_000, 8  # in a soak; `make test` sends a part
SECONDS = 30.0  # for a response
MODEL = "gemma3"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that takes images, with a file of stored responses and a prefix cache on disk."""
    folder = tmp_path_factory.mktemp("api")
    for name in (f"{MODEL}.gguf", f"mmproj-{MODEL}.gguf"):
        (folder / name).write_bytes((GOLDENS / name).read_bytes())
    options = ("--device", "cpu", "--threads", "1", "--responses", folder / "responses", "--disk-cache", "1M")
    with serving(
        folder, folder / f"{MODEL}.gguf", *options, batch=8, context=128, timeout=20, shutdown=2
    ) as running:
        yield running


def not_in_json(text: str) -> NoReturn:
    raise AssertionError(f"{text} is not valid in JSON")


def parsed(text: str | bytes) -> Any:
    """JSON as strict clients read it."""
    return json.loads(text, parse_constant=not_in_json)


def check_response(kind: str, data: bytes) -> None:
    """Every part of a response is valid; no stream ends in an error of the server."""
    if kind.startswith("text/event-stream"):
        found = [
            line[6:] for line in data.split(b"\n") if line.startswith(b"data: ") and line != b"data: [DONE]"
        ]
    elif kind.startswith("application/x-ndjson"):
        found = data.splitlines()
    else:
        found = [data] if kind.startswith("application/json") else []
    for part in map(parsed, found):
        error = part.get("error") if isinstance(part, dict) else None
        assert "unexpected" not in str(error) and "nternal" not in str(error), part


def attack(server: Running, count: int, seed: int) -> Counter[int]:
    """Sends requests; returns how many got each status."""
    chance, statuses = random.Random(seed), Counter[int]()
    made = Requests(chance, MODEL)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
    for number in range(count):
        method, path, body = made.one()
        data = None if body is None else json.dumps(body).encode()
        what = f"request {number} of seed {seed}: {method} {path} {data!r:.3000}"
        begun, leaves = time.monotonic(), chance.random() < 0.04
        try:
            connection.request(method, path, data)
            if leaves:
                time.sleep(chance.choice((0, 0.001, 0.01, 0.05)))
                connection.close()
                continue
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise AssertionError(f"{what} -> {error!r}") from None
        assert time.monotonic() - begun < SECONDS, what
        statuses[response.status] += 1
        assert response.status < 500, f"{what} -> {response.status} {answer[:500]!r}"
        try:
            check_response(response.headers.get("content-type", ""), answer)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"{what} -> {error}: {answer[:500]!r}") from None
        is_object = response.status == 200 and path.startswith("/v1/") and answer.startswith(b"{")
        if is_object and str(id := parsed(answer).get("id")).startswith(("resp_", "conv_")):
            made.ids.append(id)
    connection.close()
    return statuses


def check(server: Running, count: int, seed: int, clients: int = 1) -> None:
    attack(server, 100, seed)  # what is loaded at first use
    memory, statuses = resident(server), Counter[int]()
    with ThreadPoolExecutor(clients) as threads:
        for found in threads.map(
            attack, *zip(*((server, count // clients, seed + i) for i in range(1, clients + 1)), strict=True)
        ):
            statuses += found
    print(f"seed {seed}: {dict(sorted(statuses.items()))}")
    assert statuses[200] > count / 4 and statuses[400] and statuses[404]
    server.wait_idle()
    text = server.log.read_text()
    assert "Traceback" not in text and "Exception" not in text, text[-5000:]
    wait_until(lambda: resident(server) - memory < 200 * MiB)  # of what reads images, for a moment


def test_odd_requests(seeing: Running) -> None:
    check(seeing, 500, seed=16)


@pytest.mark.soak
def test_odd_requests_for_long(seeing: Running) -> None:
    check(seeing, COUNT, seed=random.randrange(1 << 30), clients=CLIENTS)

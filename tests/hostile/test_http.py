"""Random HTTP, valid and broken, in random pieces: the server answers or closes, and keeps nothing."""

from __future__ import annotations

import random
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.cli.tiny_model import write_tiny_model
from tests.hostile.attacks import CHAT, resident, status_of
from tests.server.servers import Running, read_all, serving, wait_until

MiB = 1 << 20
CLIENTS = 8  # at a time, in a soak
SECONDS = 5.0  # for an answer or the end of a connection
METHODS = (
    b"GET",
    b"POST",
    b"HEAD",
    b"OPTIONS",
    b"PUT",
    b"DELETE",
    b"CONNECT",
    b"PATCH",
    b"PRI",
    b"get",
    b"",
    b"\x00",
)
PATHS = (
    *(b"/", b"/health", b"/metrics", b"/live", b"/docs", b"/openapi.json", b"/page/../settings.toml", b"*"),
    *(
        b"/v1/models",
        b"/v1/chat/completions",
        b"/v1/completions",
        b"/v1/responses",
        b"/v1/messages",
        b"/v1/embeddings",
    ),
    *(
        b"/api/chat",
        b"/api/tags",
        b"/api/show",
        b"/api/ps",
        b"/tokenize",
        b"/detokenize",
        b"http://evil.example/v1/models",
    ),
    *(
        b"//",
        b"/%00",
        b"/%ff%fe",
        b"/v1/models/" + b"%2e%2e%2f" * 50,
        b"/?" + b"a=b&" * 1000,
        b"/\xff",
        b"/a b",
        b"",
    ),
)
VERSIONS = (b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTPS/1.1", b"")
HEADERS = (
    *(b"host: 127.0.0.1", b"host: evil.example", b"host: ", b"host: [::1", b"host: a\x00b", b"origin: null"),
    *(
        b"content-length: 0",
        b"content-length: 2",
        b"content-length: -1",
        b"content-length: 99999999999999999999",
    ),
    *(b"content-length: 2, 2", b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked"),
    *(
        b"transfer-encoding: x",
        b"connection: upgrade\r\nupgrade: h2c",
        b"connection: upgrade\r\nupgrade: websocket",
    ),
    *(
        b"connection: close",
        b"connection: keep-alive",
        b"x-request-id: a\tb",
        b"x-forwarded-for: " + b"1," * 500,
    ),
    *(
        b"content-type: application/json",
        b"content-type: text/html",
        b"expect: 100-continue",
        b"no colon",
        b": x",
    ),
    *(
        b" folded: a\r\n b",
        b"x: \xff\xfe",
        b"x: \x0b",
        b"x-long: " + b"a" * 9000,
        b"sec-fetch-site: cross-site",
    ),
    *(
        b"authorization: " + b"x" * 5000,
        b"if-none-match: *",
        b"cookie: " + b"a=b; " * 500,
        b"range: bytes=0-",
    ),
)
BODIES = (
    *(
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"prompt": "Hi", "max_tokens": 2}',
        b'{"content": "Hi"}',
        b'{"tokens": [1, 2]}',
    ),
    *(
        b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}',
        b"\xff\xfe",
        b"{" * 1000,
        b'{"a":' * 500,
    ),
    *(b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": true}', b"a" * 70_000),
    *(
        b'{"input": "Hi"}',
        b'{"model": "x", "messages": []}',
        b'{"prompt": [[1], [2]], "max_tokens": 1}',
        b"\x00" * 100,
    ),
)
CHAT_BODY = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}'
VALID = (
    *(
        (path, b"")
        for path in (b"/", b"/health", b"/metrics", b"/live", b"/docs", b"/v1/models", b"/api/tags")
    ),
    *((path, CHAT_BODY) for path in (b"/v1/chat/completions", b"/v1/messages", b"/tokenize")),
    (b"/v1/chat/completions", CHAT_BODY[:-1] + b', "stream": true}'),
    (b"/api/chat", b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}'),
    (b"/v1/completions", b'{"prompt": "Hi", "max_tokens": 2}'),
    (b"/detokenize", b'{"tokens": [1, 2]}'),
)
STATUS = re.compile(rb"HTTP/1\.[01] (\d\d\d)")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("http")
    model = write_tiny_model(folder / "tiny.gguf")
    limits = {
        "context": 128,
        "batch": 8,
        "read_timeout": 2,
        "write_timeout": 2,
        "idle_timeout": 1,
        "shutdown": 1,
    }
    with serving(folder, model, "--threads", "1", **limits) as found:
        yield found


def request(chance: random.Random) -> bytes:
    """A request that is often valid, or almost."""
    path, body = chance.choice(PATHS), chance.choice(BODIES)
    lines = [b" ".join((chance.choice(METHODS), path, chance.choice(VERSIONS)))]
    lines += [b"host: 127.0.0.1"] * (chance.random() < 0.8)
    if chance.random() < 0.8:
        path, body = chance.choice(VALID)
        lines = [(b"POST " if body else b"GET ") + path + b" HTTP/1.1", b"host: 127.0.0.1"]
    if chance.random() < 0.7:
        lines.append(b"content-length: %d" % len(body))
    elif chance.random() < 0.8:
        lines.append(b"transfer-encoding: chunked")
        body = chunked(body, chance)
    lines += chance.choices(HEADERS, k=chance.choice((0, 0, 0, 0, 1, 3)))
    newline = b"\r\n" if chance.random() < 0.9 else chance.choice((b"\n", b"\r"))
    whole = newline.join((*lines, b"", b"")) + body
    if chance.random() < 0.1:  # damaged
        i = chance.randrange(len(whole) or 1)
        whole = whole[:i] + chance.randbytes(chance.randrange(4)) + whole[i + chance.randrange(4) :]
    if chance.random() < 0.1:
        whole = whole[: chance.randrange(len(whole) + 1)]
    return whole * chance.choice((1, 1, 1, 1, 1, 1, 2, 30))


def chunked(body: bytes, chance: random.Random) -> bytes:
    size = chance.choice((1, 7, 1000))
    parts = [body[i : i + size] for i in range(0, len(body), size)][:200]
    extension = chance.choice((b"", b"", b";a=b", b";" + b"e" * 3000))
    trailer = chance.choice((b"", b"", b"x: y\r\n", b"content-length: 5\r\n", b"t: " + b"x" * 3000 + b"\r\n"))
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
    return (
        chunks
        + chance.choice((b"0", b"0", b"0", b"0", b"-1", b"ffffffffffffffff", b""))
        + b"\r\n"
        + trailer
        + b"\r\n"
    )


def exchange(server: Running, sent: bytes, chance: random.Random) -> bytes:
    """What the server answers to a request that comes in up to three pieces and ends in one of three ways."""
    with closing(socket.create_connection(("127.0.0.1", server.port), SECONDS)) as connection:
        answer = b""
        with suppress(OSError):
            cuts = sorted(chance.choices(range(len(sent) + 1), k=chance.choice((0, 0, 1, 2))))
            for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
                connection.sendall(sent[begin:end])
            how = chance.random()
            if how < 0.1:  # a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return b""
            if how < 0.3:
                connection.shutdown(socket.SHUT_WR)  # then the server closes, in any case
            else:
                connection.settimeout(0.03)
            while part := connection.recv(65536):
                answer += part
        return answer


def attack(server: Running, count: int, seed: int) -> Counter[int]:
    """Sends requests; returns how many got each status."""
    chance, statuses = random.Random(seed), Counter[int]()
    for number in range(count):
        sent = request(chance)
        begun = time.monotonic()
        answer = exchange(server, sent, chance)
        took = time.monotonic() - begun
        assert took < SECONDS, f"request {number} of seed {seed} took {took:.1f} s: {sent[:200]!r}"
        assert b"Traceback" not in answer and b"Internal Server Error" not in answer, sent
        for status in STATUS.findall(answer):
            statuses[int(status)] += 1
            assert int(status) < 500, f"request {number} of seed {seed}: {sent[:300]!r} -> {answer[:300]!r}"
    return statuses


def check(server: Running, count: int, seed: int, clients: int = 1) -> None:
    attack(server, 50, seed)  # what is loaded at first use
    files, memory, log = open_files(server), resident(server), server.log.stat().st_size
    statuses = Counter[int]()
    with ThreadPoolExecutor(clients) as threads:
        for found in threads.map(
            attack, [server] * clients, [count // clients] * clients, range(seed + 1, seed + 1 + clients)
        ):
            statuses += found
    print(f"seed {seed}: {dict(sorted(statuses.items()))}")
    assert statuses[200] > count / 10 and statuses[400] and statuses[403] and statuses[404]
    server.wait_idle()
    wait_until(lambda: open_files(server) <= files)
    text = server.log.read_text()
    assert "Traceback" not in text and "Exception" not in text, text[-5000:]
    served = 150 * statuses[200]  # each has its line
    assert server.log.stat().st_size - log < 100_000 + served and resident(server) - memory < 200 * MiB
    assert server.ask(CHAT, server.chat(max_tokens=3))[0] == 200


def open_files(server: Running) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def test_random_http(server: Running) -> None:
    check(server, 600, seed=16)


@pytest.mark.soak
def test_random_http_for_long(server: Running) -> None:
    check(server, 100_000, seed=random.randrange(1 << 30), clients=CLIENTS)


OWN, MODELS = b"Host: 127.0.0.1\r\n", b"GET /v1/models HTTP/1.1\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (MODELS + OWN, 200),
        (b"GET /v1/models HTTP/1.0\r\n", 200),  # as some proxies probe
        (b"GET http://127.0.0.1/v1/models HTTP/1.1\r\n" + OWN, 200),
        (MODELS + OWN + b"Sec-Fetch-Site: same-origin\r\n", 200),
        (MODELS + OWN + b"Host: evil.example\r\n", 400),
        (MODELS, 400),
        (MODELS + b"Host:\r\n", 400),
        (b"GET http://evil.example/v1/models HTTP/1.1\r\n" + OWN, 400),
        (b"GET /v1/models\r\n", 400),
        (b"GET /v1/models HTTP/0.9\r\n" + OWN, 400),
        (b"GET /v1/models HTTP/2.0\r\n" + OWN, 400),
        (MODELS + OWN + b"Transfer-Encoding: gzip, chunked\r\n", 400),
        (MODELS + OWN + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"GET /v1/models HTTP/1.0\r\n" + OWN + b"Transfer-Encoding: chunked\r\n", 400),
        (MODELS + OWN + b"Origin:\r\n", 400),
        (MODELS + OWN + b"Origin: http://127.0.0.1\r\nOrigin: http://evil.example\r\n", 400),
        (MODELS + OWN + b"Sec-Fetch-Site: same-origin\r\nSec-Fetch-Site: cross-site\r\n", 400),
        (MODELS + OWN + b"Sec-Fetch-Site: same-origin, cross-site\r\n", 403),
        (MODELS + OWN + b"Sec-Fetch-Site: cross-site\t\r\n", 403),
    ],
)
def test_a_head_that_a_proxy_may_read_in_another_way_is_refused(
    server: Running, head: bytes, status: int
) -> None:
    with server.connect() as connection:
        connection.sendall(head + b"Connection: close\r\n\r\n" + b"0\r\n\r\n" * (b"chunked" in head))
        assert status_of(read_all(connection)) == status

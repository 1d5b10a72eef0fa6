"""Clients without a key cannot exhaust the server: its memory, files and log, or the time of others."""

from __future__ import annotations

import logging
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tandem.server.http.middleware import network_of
from tandem.server.http.uvicorn_server import MAX_LINES, LimitedHandler
from tests.cli.tiny_model import write_tiny_model
from tests.hostile.attacks import (
    CHAT,
    EXHAUSTION,
    HEAD,
    UNREAD,
    MiB,
    check_harm,
    check_streams,
    send,
    status_of,
)
from tests.server.servers import PATIENCE, Running, post, read_all, serving, wait_until

SECONDS = 1.5  # of each attack
KEY = "sk-0123456789abcdef"
CLOSE = b"connection: close\r\n\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that may open 1,024 files."""
    folder = tmp_path_factory.mktemp("exhaustion")
    with serving(folder, model, open_files=1024, context=20_000, batch=8, shutdown=1) as found:
        yield found


# ---- the whole set, and what others notice


@pytest.mark.parametrize("attack", EXHAUSTION)
def test_an_attack_exhausts_nothing(server: Running, attack: str) -> None:
    check_harm(server, attack, SECONDS)
    server.wait_idle()
    assert server.ask(CHAT, server.chat(max_tokens=3))[0] == 200


@pytest.mark.soak
@pytest.mark.parametrize("attack", EXHAUSTION)
def test_an_attack_does_not_stall_streams(streaming: Running, attack: str) -> None:
    check_streams(streaming, attack, seconds=30)


# ---- heads


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"x-long: " + b"a" * 20 * MiB + b"\r\n" + CLOSE,
        HEAD + b"x-long: " + b"a" * 40_000 + b"\r\n" + CLOSE,
        HEAD + b"".join(b"x-%d: a\r\n" % i for i in range(200)) + CLOSE,
        HEAD.replace(b"/v1/models", b"/" + b"a" * 40_000) + CLOSE,
    ],
    ids=["20 MB", "40 KB", "200 headers", "a URL of 40 KB"],
)
def test_a_large_head_is_refused(server: Running, head: bytes) -> None:
    """With 431, if the client reads it before it has sent more than a connection may."""
    status = status_of(send(server, head))
    assert status == 431 or (len(head) > MiB and status is None)


def test_heads_of_clients_are_accepted(server: Running) -> None:
    large = HEAD + b"cookie: " + b"a" * 16_000 + b"\r\n" + b"".join(b"x-%d: a\r\n" % i for i in range(60))
    assert status_of(send(server, large + CLOSE)) == 200


def test_trailers_are_not_headers(model: Path, tmp_path: Path) -> None:
    """A trailer with the key comes after the check, and cannot forge a header of the log either."""
    (tmp_path / "keys").write_text(KEY)
    (tmp_path / "keys").chmod(0o600)
    body = b"2\r\n{}\r\n0\r\nx-api-key: %b\r\n\r\n" % KEY.encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n"
    with serving(tmp_path, model, "--api-keys", tmp_path / "keys") as server:
        assert status_of(send(server, head + CLOSE + body)) == 401


# ---- bodies of refused requests


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (b"content-length: 1000000000000\r\n\r\n", b" " * 65536),
        (b"transfer-encoding: chunked\r\n\r\n", b"ffff\r\n" + b" " * 0xFFFF + b"\r\n"),
    ],
    ids=["a length", "chunks"],
)
def test_a_body_that_nobody_reads_ends_the_connection(server: Running, head: bytes, part: bytes) -> None:
    """It is read slowly, for a moment: a client that is still sending would not see the response otherwise."""
    begun, sent = time.monotonic(), 0
    with server.connect() as client:
        client.sendall(UNREAD + head)
        assert status_of(client.recv(65536)) == 403
        with pytest.raises(OSError):
            while True:
                client.sendall(part)
                sent += len(part)
    assert time.monotonic() - begun < 10 and sent < 100 * MiB


def test_a_refused_request_with_a_body_is_answered(server: Running) -> None:
    body = b" " * (3 * MiB)
    answer = send(server, UNREAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert status_of(answer) == 403 and b"connection: close" in answer


def test_bodies_of_clients_without_a_key_are_not_kept(model: Path, tmp_path: Path) -> None:
    """They would take the memory for the bodies of others, who then get 429."""
    (tmp_path / "keys").write_text(KEY)
    (tmp_path / "keys").chmod(0o600)
    head = b"POST /health HTTP/1.1\r\nhost: a\r\ncontent-length: 90000\r\n\r\n"
    with serving(tmp_path, model, "--api-keys", tmp_path / "keys", max_body=100_000) as server:
        half = [connect(server) for _ in range(20)]
        for client in half:
            client.sendall(head + b" " * 80_000)
        assert all(status_of(client.recv(100)) == 400 for client in half)
        assert server.ask("/tokenize", {"content": "Hi"}, x_api_key=KEY)[0] == 200
        assert server.ask("/v1/models", x_api_key=KEY)[0] == server.ask("/health")[0] == 200
        for client in half:
            client.close()


# ---- pipelined requests


def test_a_pipelined_request_ends_the_connection_after_the_response(server: Running) -> None:
    """The client sends it again on a new connection; nothing is kept for it."""
    answer = send(server, (HEAD + b"\r\n") * 3)
    assert answer.count(b"HTTP/1.1 200") == 1 and b"connection: close" in answer


def test_a_disconnect_behind_a_pipelined_request_cancels_the_request(server: Running) -> None:
    before = server.cancelled()
    with server.connect() as client:
        client.sendall(post(CHAT, server.chat(max_tokens=15_000, ignore_eos=True)))
        wait_until(lambda: server.running() == 1)
        client.sendall((HEAD + b"\r\n") * 10)
    wait_until(lambda: server.cancelled() == before + 1)


# ---- requests for another protocol


H2C = {
    "connection": "Upgrade, HTTP2-Settings",
    "upgrade": "h2c",
    "http2-settings": "AAMAAABkAAQBAAAAAAIAAAAA",
}


@pytest.mark.parametrize("size", [1, 7, 1 << 20], ids=["in bytes", "in pieces", "at once"])
def test_a_request_for_http_2_is_served_as_http_1(server: Running, size: int) -> None:
    """Java's HttpClient sends such headers with each request. Then the connection goes on."""
    request = post("/tokenize", {"content": "Hi"}, **H2C)
    with server.connect() as client:
        for _ in range(2):
            for at in range(0, len(request), size):
                client.sendall(request[at : at + size])
            answer = b""
            while b"max_model_len" not in answer:
                answer += client.recv(65536)
            assert status_of(answer) == 200 and b'"tokens":[' in answer and b"connection: close" not in answer


def test_other_protocols_are_refused(server: Running) -> None:
    chunked = b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade, close\r\nupgrade: h2c\r\n"
    chunked += b'transfer-encoding: chunked\r\n\r\n11\r\n{"content": "Hi"}\r\n0\r\n\r\n'
    assert status_of(send(server, chunked)) == 200
    websocket = b"connection: upgrade, close\r\nupgrade: websocket\r\n\r\n"
    assert status_of(send(server, HEAD + websocket)) == 200
    assert status_of(send(server, HEAD + websocket + b"\x81\x05Hello")) == 200
    for line in (b"CONNECT 127.0.0.1:80", b"CONNECT /v1/models", b"CONNECT http://a/b", b"PRI *"):
        for more in (CLOSE, websocket, b"\r\n"):
            with server.connect() as client:
                client.sendall(HEAD.replace(b"GET /v1/models", line) + more)
                assert status_of(client.recv(65536)) == 400
    assert "Traceback" not in server.log.read_text()


# ---- numbers of connections


def connect(server: Running, address: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), PATIENCE, (address, 0))


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_a_new_connection_takes_the_place_of_the_longest_idle(model: Path, tmp_path: Path) -> None:
    """By address, then in all. A connection with a running request is not closed."""
    limits = {"max_connections": 10, "max_connections_per_address": 6, "context": 20_000, "shutdown": 1}
    with serving(tmp_path, model, **limits) as server:
        busy, other = connect(server), connect(server, "127.0.0.2")
        busy.sendall(post(CHAT, server.chat(stream=True, max_tokens=15_000, ignore_eos=True)))
        assert busy.recv(65536)
        idle = []
        for _ in range(20):
            idle.append(connect(server))
            time.sleep(0.01)
        wait_until(lambda: sum(map(is_open, idle)) <= 5)
        assert is_open(idle[-1]) and not is_open(idle[0]) and is_open(other)
        third = [connect(server, "127.0.0.3") for _ in range(6)]
        wait_until(lambda: sum(map(is_open, [busy, other, *idle, *third])) <= 10)
        assert is_open(other) and is_open(third[-1]) and is_open(busy)
        with closing(connect(server, "127.0.0.4")) as last:
            last.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + CLOSE)
            assert status_of(read_all(last)) == 200
        for connection in (busy, other, *idle, *third):
            connection.close()


def test_connections_in_use_are_not_closed_for_new_ones(model: Path, tmp_path: Path) -> None:
    limits = {"max_connections": 3, "context": 20_000, "shutdown": 1}
    with serving(tmp_path, model, **limits) as server:
        streams = [connect(server) for _ in range(3)]
        for stream in streams:
            stream.sendall(post(CHAT, server.chat(stream=True, max_tokens=15_000, ignore_eos=True)))
            assert stream.recv(65536)
        with closing(connect(server)) as refused:
            answer = read_all(refused)
        assert status_of(answer) == 503 and b"retry-after" in answer and all(map(is_open, streams))
        for stream in streams:
            stream.close()


def test_without_files_the_server_pauses_and_says_so_once(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, model, context=20_000, shutdown=1) as server:
        used = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (used + 40, used + 40))
        idle = [connect(server) for _ in range(200)]
        begun = time.monotonic()
        assert server.ask("/health")[0] == 200 and time.monotonic() - begun < PATIENCE / 10
        log = server.log.read_text()
        assert 1 <= log.count("cannot accept connections") <= 5 and "open files" in log and len(log) < 5000
        for connection in idle:
            connection.close()


def test_the_limit_of_open_files_limits_connections(server: Running) -> None:
    assert "1024 open files allows" in server.log.read_text()


@pytest.mark.fast
def test_addresses_of_one_network_count_together() -> None:
    assert network_of("192.0.2.7") == "192.0.2.7"
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:2") != network_of("2001:db8:0:1::1")
    # Clients of a server that listens on "::".
    assert network_of("::ffff:192.0.2.7") == "192.0.2.7" != network_of("::ffff:192.0.2.8")
    assert network_of("::1") != network_of("::ffff:127.0.0.1") != network_of("::")
    assert network_of("fe80::1%lo") == network_of("fe80::2")
    # IPv4 clients behind a translator, or a tunnel's networks.
    assert network_of("64:ff9b::192.0.2.7") == "192.0.2.7" != network_of("64:ff9b::192.0.2.8")
    assert network_of("2002:c000:207::1") == network_of("2002:c000:207:9::1") == "192.0.2.7"
    assert network_of("2001:0:4136:e378:8000:63bf:3fff:fdd2") == "192.0.2.45"


def test_a_client_that_does_not_read_a_large_response_is_disconnected(model: Path, tmp_path: Path) -> None:
    """The whole response lies in the server's memory; the client does not read it."""
    limits = {"write_timeout": 1, "idle_timeout": 1, "context": 20_000, "batch": 8, "shutdown": 1}
    with serving(tmp_path, model, **limits) as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        ports = f":{server.port:04X}", f":{deaf.getsockname()[1]:04X}"
        body = server.chat(n=8, max_tokens=400, ignore_eos=True, logprobs=True, top_logprobs=20)
        deaf.sendall(post(CHAT, body))
        deaf.settimeout(PATIENCE)
        assert deaf.recv(10, socket.MSG_PEEK)  # it has begun
        wait_until(lambda: not is_established(*ports))


def is_established(here: str, there: str) -> bool:
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(line[1].endswith(here) and line[2].endswith(there) and line[3] == "01" for line in lines)


# ---- the log


@pytest.mark.fast
def test_a_message_is_one_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger("test")
    logger.addHandler(LimitedHandler())
    logger.error(
        "%s: failed", "/a\n2026-01-01T00:00:00 forged\x1b[2J\u2028\u202e\u2066\ufeff" + "b" * 100_000
    )
    [line] = capsys.readouterr().err.splitlines()
    assert len(line) < 1100 and line.isprintable()


@pytest.mark.fast
def test_lines_of_a_kind_are_limited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    logger = logging.Logger("test")
    logger.addHandler(LimitedHandler())
    for i in range(1000):
        logger.warning("it failed: %d", i)
        logger.info("served", extra={"kind": None})
    logger.warning("another")
    now[0] += 100
    logger.warning("it failed: %d", 1000)
    lines = capsys.readouterr().err.splitlines()
    assert sum("it failed: " in line for line in lines) == MAX_LINES + 2
    assert sum("served" in line for line in lines) == 1000 and sum("another" in line for line in lines) == 1
    [left_out] = [line for line in lines if "left out" in line]
    assert f" {1000 - MAX_LINES} more" in left_out and "it failed: %d" in left_out

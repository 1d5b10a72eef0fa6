"""A hub that is hostile or broken: every answer is a model or a typed error, within bounds, and no one else gets the
token."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tandem.errors import DownloadError, ModelNotFoundError
from tandem.model import download, locate
from tandem.settings import read_settings

pytestmark = pytest.mark.fast
SHA = "ab" * 32
COMMIT = "5c" * 20
TOKEN = "hf_secret"


class Raw(NamedTuple):
    head: bytes
    then: bytes  # again and again
    pause: float = 0.0


class Hub:
    """Answers each path as it is told: with a body, with a Location, or with all the bytes of a Raw response."""

    def __init__(self) -> None:
        self.answer: Callable[[str], bytes | str | Iterator[bytes] | Raw] = lambda _: b""
        self.sent = 0  # bytes of Raw responses, without their heads
        self.seen: list[tuple[str, str | None]] = []  # path and Authorization of each request


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            hub.seen.append((self.path, self.headers["Authorization"]))
            answer = hub.answer(self.path)
            if isinstance(answer, Raw):
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.wfile.write(answer.head)
                    for part in endless(answer.then, answer.pause):
                        hub.sent += self.wfile.write(part)
                return
            self.send_response(302 if isinstance(answer, str) else 200)
            if isinstance(answer, str):
                self.send_header("Location", answer)
                answer = b""
            self.end_headers()
            try:
                for part in (answer,) if isinstance(answer, bytes) else answer:
                    self.wfile.write(part)
            except OSError:
                pass  # the client has had enough

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(download, "RETRY_SECONDS", 0)
    # "https" without certificates: what is tested is who sees the token.
    plain = http.client.HTTPConnection
    monkeypatch.setattr(
        urllib.request.HTTPSHandler, "https_open", lambda self, request: self.do_open(plain, request)
    )
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


def listing(**entry: Any) -> bytes:
    file = {"rfilename": "m-Q4_0.gguf", "size": 5, "lfs": {"sha256": SHA}} | entry
    return json.dumps({"sha": COMMIT, "siblings": [file]}).encode()


def always(answer: bytes, _: str) -> bytes:
    return answer


def endless(chunk: bytes, pause: float = 0) -> Iterator[bytes]:
    while True:
        yield chunk
        time.sleep(pause)


WRONG_VALUES: dict[str, list[Any]] = {
    "rfilename": [None, 7, [], {}],
    "size": [None, "5", 5.5, [], True, float("inf"), float("nan"), "x"],
    "lfs": [7, "x", [1], {"sha256": None}, {"sha256": "../../x"}, {"sha256": SHA[:40]}, {"x": 1}],
}
BODIES: dict[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1e999",
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "deep siblings": b'{"sha": "x", "siblings": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "not UTF-8": b"\xff\xfe\xff",
    "NUL": b"\0" * 1000,
    "a long number": b'{"sha": ' + b"9" * 10_000 + b"}",
    "siblings null": json.dumps({"sha": COMMIT, "siblings": None}).encode(),
    "siblings of strings": json.dumps({"sha": COMMIT, "siblings": ["m.gguf"]}).encode(),
    "siblings of nulls": json.dumps({"sha": COMMIT, "siblings": [None]}).encode(),
    "no commit": json.dumps({"siblings": []}).encode(),
    "a path as commit": json.dumps({"sha": "../../..", "siblings": []}).encode(),
    "a number as commit": json.dumps({"sha": 7, "siblings": []}).encode(),
    **{
        f"{key} {value!r:.40}": listing(**{key: value})
        for key, values in WRONG_VALUES.items()
        for value in values
    },
}
UNSAFE = [
    *("../m-Q4_0.gguf", "/etc/m-Q4_0.gguf", "a/../../m-Q4_0.gguf", "a//m-Q4_0.gguf", "./m-Q4_0.gguf"),
    *("a\\..\\m-Q4_0.gguf", "m\0-Q4_0.gguf", "m\n-Q4_0.gguf", "\x1b[2Jm-Q4_0.gguf", "\ud800-Q4_0.gguf"),
    *(f"{'a' * 300}-Q4_0.gguf", "/".join("a" * 2000) + "-Q4_0.gguf"),
]


@pytest.mark.parametrize("what", BODIES)
def test_a_listing_of_the_wrong_form_is_a_typed_error(hub: Hub, what: str) -> None:
    hub.answer = lambda _: BODIES[what]
    with pytest.raises(DownloadError, match="did not answer like a Hugging Face hub"):
        locate.resolve("user/repo", pull=True)


@pytest.mark.parametrize(
    "entry", [*({"rfilename": n} for n in UNSAFE), {"size": -1}, {"size": 0}, {"size": 10**400}]
)
def test_unsafe_names_and_sizes_are_refused(hub: Hub, entry: dict[str, Any], tmp_path: Path) -> None:
    hub.answer = lambda _: listing(**entry)
    with pytest.raises(DownloadError, match="unsafe names or sizes"):
        locate.resolve("user/repo", pull=True)
    assert not list(tmp_path.rglob("*.gguf")) and not (tmp_path / "hub").exists()


def test_a_file_that_no_disk_holds_is_refused_before_it_is_fetched(hub: Hub) -> None:
    hub.answer = lambda _: listing(size=10**30)
    with pytest.raises(DownloadError, match="GB are needed"):
        locate.resolve("user/repo", pull=True)
    assert len(hub.seen) == 1


def test_many_files_with_long_names_take_little_time(hub: Hub) -> None:
    """Names that are slow to search for a quant: whoever has a repository on a hub chooses its names."""
    for name, count, error in (
        ("_Q1" * 80, 2000, ModelNotFoundError),
        ("_Q1" * 80, 2001, DownloadError),
        ("_Q1" * 300, 10, DownloadError),
    ):
        files = [{"rfilename": f"{i}{name}+.gguf", "size": 5, "lfs": {"sha256": SHA}} for i in range(count)]
        hub.answer = partial(always, json.dumps({"sha": COMMIT, "siblings": files}).encode())
        began = time.process_time()
        with pytest.raises(error) as refused:
            locate.resolve("user/repo", pull=True)
        assert time.process_time() - began < 5 and len(str(refused.value)) < 6000


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"garbage\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 999 x\r\n\r\n", b"\0" * 70_000),
        *(
            b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
        ),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: /\xff\r\n\r\n",
        b"HTTP/1.1 500 " + b"\x1b[2J" * 1000 + b"\r\n\r\n",
    ],
)
def test_an_answer_that_is_not_http_is_a_typed_error(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(DownloadError) as refused:
            locate.resolve("user/repo", pull=True)
        assert len(str(refused.value)) < 500
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_listing_that_does_not_end_is_cut(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.answer = lambda _: endless(b" " * 65536)
    with pytest.raises(DownloadError, match="does not end"):
        locate.resolve("user/repo", pull=True)
    monkeypatch.setattr(download, "LISTING_SECONDS", 0.2)
    hub.answer = lambda _: endless(b" ", pause=0.01)
    with pytest.raises(DownloadError, match="does not end"):
        locate.resolve("user/repo", pull=True)


CHUNKED = b"\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = {
    "interim responses": Raw(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "trailers": Raw(b"HTTP/1.1 200 OK" + CHUNKED + b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * 100),
    "the body of a redirect": Raw(
        b"HTTP/1.1 302 no\r\nlocation: /x" + CHUNKED, b"400\r\n%b\r\n" % bytes(1024)
    ),
    "a slow head": Raw(b"HTTP/1.1 200 OK\r\na: ", b"b", 0.02),
    "a slow body": Raw(b"HTTP/1.1 200 OK\r\n\r\n", b" ", 0.02),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_response_without_end_is_cut(hub: Hub, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`http.client` reads interim responses and trailers for ever, urllib the whole body of a redirect."""
    monkeypatch.setattr(download, "LISTING_SECONDS", 0.5)
    hub.answer = lambda _: ENDLESS[what]
    begun = time.monotonic()
    with pytest.raises(DownloadError):
        locate.resolve("user/repo", pull=True)
    assert time.monotonic() - begun < 10
    assert what != "the body of a redirect" or hub.sent < 100 << 20


def test_what_a_hub_says_is_a_part_of_a_sentence(hub: Hub) -> None:
    hub.answer = lambda _: Raw(
        b"HTTP/1.1 418 \x1b[2J\x9b2J" + b"x" * 1000 + b"\r\ncontent-length: 0\r\n\r\n", b""
    )
    with pytest.raises(DownloadError, match=r"answered 418 \[2J 2Jx+ for user/repo") as raised:
        locate.resolve("user/repo", pull=True)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 300


def test_a_file_that_does_not_end_is_cut_at_its_size(hub: Hub, tmp_path: Path) -> None:
    hub.answer = lambda path: listing() if path.startswith("/api") else endless(b"x" * 65536)
    with pytest.raises(DownloadError, match="arrived damaged"):
        locate.resolve("user/repo", pull=True)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "location",
    [
        *(
            "http://[::1",
            "http://h:99999/",
            f"http://{'a' * 70}.x/",
            "ftp://127.0.0.1/m",
            "file:///etc/passwd",
        ),
        *("http://u:p@127.0.0.1/", "https://", "data:,x", "http://\0/", "/" * 3, ""),
    ],
)
@pytest.mark.parametrize("of", ["/api", "/user"])
def test_a_redirect_to_no_address_is_a_typed_error(hub: Hub, location: str, of: str) -> None:
    hub.answer = lambda path: location if path.startswith(of) else listing()
    with pytest.raises((DownloadError, ModelNotFoundError)):
        locate.resolve("user/repo", pull=True)


def test_a_hub_that_says_nothing_is_not_asked_for_longer_than_a_listing_may_take(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("TIMEOUT_SECONDS", 0.3), ("LISTING_SECONDS", 0.4), ("RETRY_SECONDS", 0.01)):
        monkeypatch.setattr(download, name, seconds)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel takes the connections
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(DownloadError, match="does not end"):
            locate.resolve("user/repo", pull=True)
        silent.setblocking(False)
        asked = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                asked += 1
    assert 1 <= asked <= 2


def tokens(hub: Hub) -> list[bool]:
    """Whether each request had the token."""
    return [authorization == f"Bearer {TOKEN}" for _, authorization in hub.seen]


def redirected(hub: Hub, *locations: str) -> list[bool]:
    """Who sees the token of a request that is redirected from one of the addresses to the next."""
    hub.seen.clear()
    following = iter(locations[1:])
    hub.answer = lambda _: next(following, b"{}")
    download._open(locations[0]).close()
    return tokens(hub)


def test_the_token_goes_to_the_same_scheme_host_and_port_only(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = read_settings().hub.rpartition(":")[2]
    plain, secret, other = f"http://127.0.0.1:{port}", f"https://127.0.0.1:{port}", f"http://localhost:{port}"
    assert redirected(hub, f"{secret}/a", f"{secret}/b") == [True, True]  # a repository with a new name
    assert redirected(hub, f"{secret}/a", "/b") == [True, True]
    # Where anybody could change the response.
    with pytest.raises(http.client.InvalidURL, match="from https to http"):
        redirected(hub, f"{secret}/a", f"{plain}/b")
    assert redirected(hub, f"{plain}/a", f"{secret}/b") == [True, False]
    assert redirected(hub, f"{plain}/a", f"{other}/b") == [True, False]
    assert redirected(hub, f"{plain}/a", f"{secret}/b", f"{secret}/c") == [True, False, False]
    assert redirected(hub, f"{plain}/a", f"{other}/b", f"{plain}/c", f"{plain}/d") == [
        True,
        False,
        False,
        False,
    ]
    with pytest.raises(download.NETWORK_ERRORS):  # another port of the same host
        redirected(hub, f"{plain}/a", "http://127.0.0.1:9/b")


def test_default_ports_and_capitals_are_the_same_address() -> None:
    assert download._origin("https://Hub.example/a") == download._origin("https://hub.example:443/b")
    assert download._origin("http://hub.example:443/") != download._origin("https://hub.example/")
    assert download._origin("https://user@hub.example/") == download._origin("https://hub.example/")


def test_a_resumed_download_shows_the_token_to_the_hub_only(hub: Hub) -> None:
    port = read_settings().hub.rpartition(":")[2]

    def answer(path: str) -> bytes | str:
        if path.startswith("/api"):
            return listing()
        return f"http://localhost:{port}/cdn" if path.startswith("/user") else b"x"  # one byte at a time

    hub.answer = answer
    with pytest.raises(DownloadError, match=r"arrived damaged|closed early"):
        locate.resolve("user/repo", pull=True)
    assert {path == "/cdn" for path, _ in hub.seen} == {True, False}
    assert all((path != "/cdn") == (given == f"Bearer {TOKEN}") for path, given in hub.seen)


@pytest.mark.parametrize(
    "endpoint", ["https://me:hunter2@hub.example", "file:///etc", "hub.example", "http://[::1", "http://"]
)
def test_an_endpoint_that_is_no_hub_is_not_repeated(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(DownloadError, match="HF_ENDPOINT is not the address of a hub") as refused:
        locate.resolve("user/repo", pull=True)
    assert "hunter2" not in str(refused.value)


def test_a_token_that_is_none_is_not_repeated(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in ("hunter2\r\nX-Evil: 1", "hunter2é"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(DownloadError, match="HF_TOKEN has characters") as refused:
            locate.resolve("user/repo", pull=True)
        assert "hunter2" not in str(refused.value) and not hub.seen
    monkeypatch.setenv("HF_TOKEN", f" {TOKEN}\n")  # out of a file
    hub.answer = lambda _: b"{}"
    with pytest.raises(DownloadError, match="did not answer"):
        locate.resolve("user/repo", pull=True)
    assert tokens(hub) == [True]

"""Images that requests name by an address: only of allowed hosts, in bounded time and memory, and never of the own
network by a detour."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tandem import LLM
from tandem.engine.images import ImageParts
from tandem.errors import QueueFullError, RequestError
from tandem.server.core import image_urls
from tandem.server.core.image_urls import ImageFetcher, RemoteImage
from tandem.server.core.images import RequestImages
from tests.engine.test_images import as_png, picture
from tests.hostile.attacks import CHAT
from tests.models.test_vision import GOLDENS
from tests.server.servers import serving

PNG = as_png(picture(1))
ANSWERS: dict[str, list[bytes]] = {  # the target of a request -> what the host sends, piece by piece
    "/a.png?size=1": [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(PNG), PNG],
    "/chunked": [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(PNG),
        PNG,
        b"\r\n0\r\n\r\n",
    ],
    "/until-closed": [b"HTTP/1.0 200 OK\r\n\r\n", PNG],
    "/moved": [b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/latest\r\nContent-Length: 0\r\n\r\n"],
    "/missing": [b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"],
    "/garbage": [b"SSH-2.0-OpenSSH_9.6\r\n"],
    "/nothing": [],
    "/cut": [b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", PNG],
    "/cut-chunk": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n", PNG],
    "/large": [b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n", *[b"x" * 10_000] * 900],
    "/endless": [b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 10_000] * 900],
    "/slow-body": [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", *[b"x", b""] * 100],
    "/slow-head": [b"HTTP/1.1 200 OK\r\nA: ", *[b"x", b""] * 100],
}


def answer(connection: socket.socket) -> None:
    with connection, suppress(OSError):
        target = connection.recv(4096).split()[1].decode(errors="replace")
        for piece in ANSWERS.get(target, []):
            connection.sendall(piece)
            if not piece:  # a pause
                time.sleep(0.1)


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """A web server; its address and port."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def fetched(url: str, *hosts: str) -> bytes:
    async def run() -> bytes:
        fetcher = ImageFetcher(hosts)
        try:
            async with fetcher.fetched(RemoteImage(url)) as data:
                return bytes(data)
        finally:
            fetcher.close()

    return asyncio.run(run())


@pytest.mark.parametrize("target", ["/a.png?size=1", "/chunked", "/until-closed"])
def test_an_allowed_image_is_fetched(host: str, target: str) -> None:
    assert fetched(f"http://{host}{target}", host) == PNG


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1/a.png", "fetches no images from '127.0.0.1'"),
        ("http://HOST@example.com/a.png", "fetches no images from 'example.com'"),
        ("http://user:key@HOST/a.png", "letters"),
        ("http://HOST/a b.png", "letters"),
        ("http://HOST/\r\nHost: example.com", "letters"),
        ("http://HOST/ä.png", "letters"),
        ("http://[::1", "not valid"),
        ("http://HOST:99999999/", "not valid"),
        ("http:///a.png", "fetches no images from ''"),
        ("https://HOST/a.png", "no answer"),
        ("file:///etc/passwd", "fetches no images"),
        ("ftp://HOST/a.png", "fetches no images"),
        ("http://localhost:PORT/a.png", "not public"),
        ("http://HOST/moved", "status 302"),
        ("http://HOST/missing", "status 404"),
        ("http://HOST/garbage", "no answer"),
        ("http://HOST/nothing", "no answer"),
        ("http://HOST/cut", "too early"),
        ("http://HOST/cut-chunk", "no answer"),
        ("http://HOST/large", "more than"),
        ("http://HOST/endless", "more than"),
        ("http://HOST/slow-body", "too slowly|no answer"),
        ("http://HOST/slow-head", "too slowly|no answer"),
    ],
)
def test_a_refused_image(host: str, monkeypatch: pytest.MonkeyPatch, url: str, said: str) -> None:
    monkeypatch.setattr(image_urls, "MAX_BYTES", 5_000_000)
    monkeypatch.setattr(image_urls, "SECONDS", 1.0)
    port = host.rpartition(":")[2]
    url, begin = url.replace("HOST", host).replace("PORT", port), time.monotonic()
    with pytest.raises(RequestError, match=said):
        fetched(url, host, f"localhost:{port}")
    assert time.monotonic() - begin < 3


def test_a_name_whose_addresses_are_not_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if one of several is, and however it is written."""
    tried: list[Any] = []
    monkeypatch.setattr(socket, "create_connection", lambda address, _: tried.append(address))
    for addresses in (
        ["169.254.169.254"],
        ["93.184.216.34", "10.0.0.1"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["fe80::1%2"],
        [],
    ):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        with pytest.raises(RequestError, match="not public"):
            fetched("http://images.example.org/a.png", "images.example.org")
    assert not tried


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def connect(address: Any, _: float) -> socket.socket:
        tried.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 443))]
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(RequestError, match="Connection refused"):
        fetched("https://Images.example.org/a.png", "images.EXAMPLE.org")
    assert tried == [("93.184.216.34", 443)]


def test_too_many_fetches_wait_for_nobody(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_urls, "MAX_FETCHES", 2)
    monkeypatch.setattr(image_urls, "SECONDS", 0.5)

    async def run() -> list[Any]:
        fetcher = ImageFetcher([host])

        async def fetch(target: str) -> bytes:
            async with fetcher.fetched(RemoteImage(f"http://{host}/{target}")) as data:
                return bytes(data)

        found = await asyncio.gather(*(fetch("slow-body") for _ in range(4)), return_exceptions=True)
        assert await fetch("chunked") == PNG
        fetcher.close()
        return found

    assert [type(one) for one in asyncio.run(run())] == [
        RequestError,
        RequestError,
        QueueFullError,
        QueueFullError,
    ]


def test_images_that_wait_to_be_read_are_few(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of 150 bytes makes the server fetch 16 MiB: 200 of them took 4 GB while they waited to be read."""
    reading, most = 0, 0

    async def read(*_: object) -> ImageParts:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0.1)
        reading -= 1
        return ImageParts()

    async def run() -> None:
        images = RequestImages([host])
        monkeypatch.setattr(images._reader, "read", read)

        async def request(i: int) -> None:
            image = {"type": "image", "image": RemoteImage(f"http://{host}/a.png?size=1#{i}")}
            async with images.read(llm, [{"role": "user", "content": [image]}]):
                pass

        await asyncio.gather(*map(request, range(20)))
        await images.close()

    with LLM(GOLDENS / "gemma3.gguf", device="cpu", threads=1, batch=1, kv_memory=1e7) as llm:
        asyncio.run(run())
    assert most == image_urls.THREADS


def test_a_server_with_an_allowed_host(host: str, tmp_path: Path) -> None:
    for name in ("gemma3.gguf", "mmproj-gemma3.gguf"):
        (tmp_path / name).write_bytes((GOLDENS / name).read_bytes())
    arguments = (tmp_path / "gemma3.gguf", "--device", "cpu", "--threads", "1", "--allow-image-urls", host)
    with serving(tmp_path, *arguments, batch=2, context=128, timeout=60, shutdown=2) as server:

        def ask(url: str) -> tuple[int, Any]:
            content = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": "What is this?"},
            ]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
            status, _, answer = server.ask(CHAT, body)
            return status, answer

        data = ask("data:image/png;base64," + base64.b64encode(PNG).decode())
        given = ask(f"http://{host}/a.png?size=1")
        assert data[0] == given[0] == 200
        assert (
            data[1]["choices"] == given[1]["choices"]
            and data[1]["usage"]["prompt_tokens"] == given[1]["usage"]["prompt_tokens"]
        )
        for url, said in (
            (f"http://{host}/moved", "302"),
            (f"http://{host}/garbage", "no answer"),
            ("http://[::1]/", "fetches no"),
        ):
            status, answer = ask(url)
            assert status == 400 and said in answer["error"]["message"], url
        assert "Traceback" not in server.log.read_text()

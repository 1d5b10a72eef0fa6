"""A registered server that is stopped, overloaded or answers garbage: `tandem run` loads the model, or says so."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tandem.cli import remote
from tandem.cli.remote import RemoteLLM
from tandem.errors import TandemError
from tandem.server.instances import Instance

pytestmark = pytest.mark.fast
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
ANSWERS = {
    "nothing": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "a long line": b"H" * 100_000,
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000,
    "no JSON": HEAD + b"data: hello\n\n",
    "other JSON": HEAD + b"data: 7\n\n",
    "no choices": HEAD + b"data: {}\n\n",
    "wrong choices": HEAD + b'data: {"choices": [null]}\n\n',
    "deep JSON": HEAD + b"data: " + b"[" * 100_000 + b"\n\n",
    "a wrong chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "a wrong length": b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\ndata",
    "an error of another kind": b"HTTP/1.1 500 no\r\ncontent-length: 2\r\n\r\n[]",
    "models of another kind": HEAD + b'{"models": {"tiny": {"context": []}}}',
    "a list of models": HEAD + b'{"models": ["tiny"]}',
}


@contextmanager
def answering(answer: bytes | None) -> Iterator[RemoteLLM]:
    """A server that answers each request so; None: never."""
    open_ones: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer_all() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                open_ones.append(connection)
                if answer is not None:
                    with suppress(OSError):  # the client has seen enough
                        connection.recv(65536)
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=answer_all, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        yield RemoteLLM(Instance(1, url, ["tiny"], 1.0, None), "tiny")
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in open_ones:
            connection.close()


@pytest.mark.parametrize("what", ANSWERS)
def test_garbage_is_no_server_and_a_typed_error(what: str) -> None:
    with answering(ANSWERS[what]) as server:
        assert not server.is_available()
        with pytest.raises(TandemError):
            list(server.stream("Hi"))


def test_a_server_that_does_not_answer_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was stopped with SIGSTOP: its port accepts connections."""
    assert remote.CONNECT_TIMEOUT <= 5
    monkeypatch.setattr(remote, "CONNECT_TIMEOUT", 0.2)
    with answering(None) as server:
        begun = time.monotonic()
        assert not server.is_available()
        assert time.monotonic() - begun < 5

"""Clients that stream, in a process of their own: they measure the server, and not the threads of a test.

`python -m tests.hostile.streams URL COUNT TOKENS` streams one response after the other on each of COUNT connections. It
writes a line when all have begun and, when its input ends, the times at which tokens arrived: JSON, a list for each
response. The event with the role does not count: it comes before the prompt is computed.
"""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
import time

from tests.hostile.cores import apart, pinning
from tests.server.servers import post

STORY = {
    "messages": [{"role": "user", "content": "Tell a long story."}],
    "temperature": 1,
    "stream": True,
    "ignore_eos": True,
}


class Streams:
    """Runs the process in a `with` block, which begins when all streams have begun."""

    def __init__(self, url: str, count: int, tokens: int = 1500) -> None:
        self._command = [sys.executable, "-m", "tests.hostile.streams", url, str(count), str(tokens)]

    def __enter__(self) -> Streams:
        pipe = subprocess.PIPE
        places = apart()
        pin = pinning(places and places.clients)
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, preexec_fn=pin)
        assert self._process.stdout and self._process.stdout.readline() == b"begun\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def stop(self) -> list[list[float]]:
        """The times of arrival, by response, on the clock of `time.perf_counter`."""
        found: list[list[float]] = json.loads(self._process.communicate()[0])
        return found


def main(url: str, count: int, tokens: int) -> None:
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    request = post("/v1/chat/completions", {**STORY, "max_tokens": tokens})
    selector, responses, begun = selectors.DefaultSelector(), list[list[float]](), False

    def start() -> None:
        connection = socket.create_connection(address)
        connection.sendall(request.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
        responses.append([])
        selector.register(connection, selectors.EVENT_READ, responses[-1])

    selector.register(sys.stdin, selectors.EVENT_READ)
    for _ in range(count):
        start()
    while True:
        for key, _ in selector.select():
            if not isinstance(key.fileobj, socket.socket):
                return print(json.dumps(responses))
            data, now = key.fileobj.recv(65536), time.perf_counter()
            if b'"delta":{"content":"' in data:
                key.data.append(now)
            if b'{"error"' in data or (b"HTTP/1.1 " in data and b"HTTP/1.1 200 " not in data):
                sys.exit(f"a stream failed: {data[:500]!r}")
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                start()
        if not begun and all(len(times) > 2 for times in responses):
            begun = True
            print("begun", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

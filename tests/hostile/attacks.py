"""Attacks on a running server, and what others notice of them: memory, log, `/health`, and gaps between tokens.

An attack is a function of the server and of an event that ends it. `watched` runs beside it:

    with watched(server, streams=8) as harm, attacking(server, endless_headers):
        time.sleep(10)
    assert harm.health < 0.5 and harm.memory < 200 * MiB
"""

from __future__ import annotations

import itertools
import json
import resource
import socket
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.server.servers import Running, post, read_all, wait_until

CHAT = "/v1/chat/completions"
MiB = 1 << 20
MAX_MEMORY, MAX_LOG, MAX_HEALTH, MAX_GAP = 200 * MiB, 100_000, 0.5, 3.0
ATTEMPTS = 3  # other processes of the machine make gaps too, but not each time
PROBE_SECONDS = 0.05  # between two probes of /health and of the memory
RECONNECT_SECONDS = 0.005  # s between two connections of an attacker, who shares the machine with the server
HEAD = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n"
Attack = Callable[[Running, threading.Event], None]


# ---- what others notice


@dataclass
class Harm:
    health: float = 0.0  # s, the slowest /health; infinite if one was not answered
    memory: int = 0  # bytes of growth
    log: int = 0  # bytes of growth
    quiet_gap: float = 0.0  # s, the median gap between tokens of a stream before the attack
    gaps: list[float] = field(default_factory=list)  # s, all gaps between tokens during the attack

    @property
    def gap(self) -> float:
        """The longest gap between two tokens of a stream, in median gaps of the time before."""
        return max(self.gaps) / self.quiet_gap

    def __str__(self) -> str:
        shown = f"/health {self.health:.3f} s, memory {self.memory / MiB:+.0f} MiB, log {self.log} bytes"
        if not self.gaps:
            return shown
        gaps = f"{self.quiet_gap * 1e3:.0f} ms before, at most {max(self.gaps) * 1e3:.0f} ms"
        return f"{shown}, gaps {gaps} ({self.gap:.1f}x)"


@contextmanager
def watched(server: Running, streams: int = 0, quiet_seconds: float = 4.0) -> Iterator[Harm]:
    """Measures the harm that is done to others while the block runs. The result is complete after the block."""
    harm, done = Harm(), threading.Event()
    with ExitStack() as stack:
        running = [stack.enter_context(_Stream(server)) for _ in range(streams)]
        if streams:
            wait_until(lambda: all(len(stream.times) > 2 for stream in running))
            time.sleep(quiet_seconds)
            harm.quiet_gap = statistics.median(gap for stream in running for gap in stream.gaps(0.0))
        begun, memory, log = time.perf_counter(), resident(server), server.log.stat().st_size
        prober = threading.Thread(target=_probe, args=(server, harm, memory, done))
        prober.start()
        try:
            yield harm
        finally:
            done.set()
            prober.join()
            harm.log = server.log.stat().st_size - log
            harm.gaps = [gap for stream in running for gap in stream.gaps(begun)]


def resident(server: Running) -> int:
    """The bytes of memory of the server's process and its children."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return sum(
        map(_resident, [str(pid), *(child for path in children for child in path.read_text().split())])
    )


def _resident(pid: str) -> int:
    with suppress(OSError, IndexError):  # it has just ended
        return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) * 1024
    return 0


def _probe(server: Running, harm: Harm, memory: int, done: threading.Event) -> None:
    while not done.wait(PROBE_SECONDS):
        begun = time.perf_counter()
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=10) as response:
                response.read()
            harm.health = max(harm.health, time.perf_counter() - begun)
        except (OSError, urllib.error.URLError):
            harm.health = float("inf")
        harm.memory = max(harm.memory, resident(server) - memory)


class _Stream:
    """A client that streams one response after the other, and notes when tokens arrive."""

    def __init__(self, server: Running) -> None:
        self._server, self._stopped = server, threading.Event()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._run)
        self.times: list[float] = []  # of all tokens
        self._starts: set[int] = set()  # indices of the first tokens of responses

    def __enter__(self) -> _Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._connection:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def gaps(self, since: float) -> list[float]:
        """Gaps between consecutive tokens of a response, of those that ended after `since`."""
        times = list(self.times)
        pairs = enumerate(itertools.pairwise(times), 1)
        return [b - a for i, (a, b) in pairs if b > since and i not in self._starts]

    def _run(self) -> None:
        body = self._server.chat("Tell a long story.", stream=True, max_tokens=1500, ignore_eos=True)
        while not self._stopped.is_set():
            with self._server.connect() as connection, suppress(OSError):
                self._connection = connection
                connection.sendall(post(CHAT, body, connection="close"))
                self._starts.add(len(self.times))
                with connection.makefile("rb") as lines:
                    for line in lines:
                        if line.startswith(b"data: {"):
                            assert "error" not in (event := json.loads(line[6:])), event
                            self.times.append(time.perf_counter())


# ---- attacks


@contextmanager
def attacking(server: Running, *attacks: Attack) -> Iterator[None]:
    """Runs attacks in threads until the block ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the attackers' own connections
    done = threading.Event()
    threads = [threading.Thread(target=attack, args=(server, done)) for attack in attacks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def check_harm(server: Running, attack: Attack, seconds: float) -> None:
    """Attacks, and checks what others notice. At most three attempts for /health: other processes may have used the
    cores during the first."""
    for _ in range(ATTEMPTS):
        with watched(server) as harm, attacking(server, attack):
            time.sleep(seconds)
        print(harm)
        assert harm.memory < MAX_MEMORY and harm.log < MAX_LOG and harm.health < float("inf"), harm
        if harm.health < MAX_HEALTH:
            return
    raise AssertionError(harm)


def pour(server: Running, done: threading.Event, first: bytes, more: Callable[[int], bytes]) -> None:
    """Sends `first` and then `more(i)` without end; starts again when the server closes the connection."""
    while not done.wait(RECONNECT_SECONDS):
        with suppress(OSError), server.connect() as connection:
            connection.sendall(first)
            i = 0
            while not done.is_set():
                connection.sendall(more(i))
                i += 1


def hold(
    server: Running, done: threading.Event, count: int, first: bytes, more: bytes = b"", pause: float = 0.5
) -> None:
    """Keeps `count` connections open that sent `first` and send `more` every `pause` seconds."""
    held: list[socket.socket] = []
    try:
        while not done.is_set():
            if len(held) < count:
                with suppress(OSError):
                    held.append(socket.create_connection(("127.0.0.1", server.port), 1))
                    held[-1].setblocking(False)
                    held[-1].send(first)
                continue
            kept = []
            for connection in held:
                try:
                    connection.send(more)
                    kept.append(connection)
                except BlockingIOError:
                    kept.append(connection)
                except OSError:
                    connection.close()
            held = kept
            done.wait(pause)
    finally:
        for connection in held:
            connection.close()


def endless_headers(server: Running, done: threading.Event) -> None:
    pour(server, done, HEAD, lambda i: b"".join(b"x-%d-%d: %b\r\n" % (i, j, b"a" * 100) for j in range(500)))


def endless_header(server: Running, done: threading.Event) -> None:
    pour(server, done, HEAD + b"x-long: ", lambda _: b"a" * 65536)


def endless_url(server: Running, done: threading.Event) -> None:
    pour(server, done, b"GET /", lambda _: b"a" * 65536)


def endless_trailers(server: Running, done: threading.Event) -> None:
    first = (
        b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    )
    pour(server, done, first, lambda i: b"".join(b"x-%d-%d: a\r\n" % (i, j) for j in range(2000)))


def endless_pipeline(server: Running, done: threading.Event) -> None:
    """Requests without end behind one whose response takes long."""
    first = post(CHAT, server.chat(max_tokens=1500, ignore_eos=True))
    pour(server, done, first, lambda _: (HEAD + b"\r\n") * 1000)


def garbage(server: Running, done: threading.Event) -> None:
    pour(server, done, b"\x16\x03\x01 no HTTP \xff\r\n\r\n", lambda _: b"\x00" * 65536)


def refused_requests(server: Running, done: threading.Event) -> None:
    """Requests that get 400, 403, 404 and 405, with long paths for the log."""
    requests = [
        b"GET /" + b"%0a" * 1000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: evil.example\r\n\r\n",
        b"DELETE /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    ]
    while not done.wait(RECONNECT_SECONDS):
        for request in requests:
            with suppress(OSError), server.connect() as connection:
                connection.sendall(request)
                connection.recv(1)


def idle_connections(server: Running, done: threading.Event) -> None:
    hold(server, done, 1200, b"")


def slow_heads(server: Running, done: threading.Event) -> None:
    hold(server, done, 200, HEAD + b"x-slow: ", b"a")


def slow_bodies(server: Running, done: threading.Event) -> None:
    """Bodies of 15 MB whose last bytes come one at a time."""
    head = b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % (15 * MiB)
    hold(server, done, 50, head + b" " * MiB, b" " * 65536)


EXHAUSTION: tuple[Attack, ...] = (
    endless_headers,
    endless_header,
    endless_url,
    endless_trailers,
    endless_pipeline,
    garbage,
    refused_requests,
    idle_connections,
    slow_heads,
    slow_bodies,
)


def send(server: Running, request: bytes) -> bytes:
    """All that the server answers until it closes the connection, also if it answers before it has read everything."""
    answers: list[bytes] = []
    with server.connect() as connection:
        reader = threading.Thread(target=lambda: answers.append(read_all(connection)))
        reader.start()
        with suppress(OSError):
            connection.sendall(request)
        reader.join()
    return answers[0]


def status_of(answer: bytes) -> int | None:
    """The HTTP status of an answer; None if there is none."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else None

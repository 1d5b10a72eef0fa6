"""Attacks on a running server, and what others notice of them: memory, log, `/health`, and gaps between tokens.

`python -m tests.hostile.attacks URL NAME` runs one until it is killed: those of this file, which exhaust what a server
has, and those of stall_attacks.py, which take its time. `watched` runs beside it:

    with watched(server, streams=8) as harm, attacking(server, "endless_headers"):
        time.sleep(10)
    assert harm.health < 0.5 and harm.memory < 200 * MiB
"""

from __future__ import annotations

import itertools
import os
import random
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.hostile import stall_attacks
from tests.hostile.cores import SERVER, apart, pinning
from tests.hostile.streams import Streams
from tests.server.servers import PATIENCE, Running, post, read_all, serving

CHAT = "/v1/chat/completions"
MiB = 1 << 20
MAX_MEMORY, MAX_LOG, MAX_HEALTH, MAX_GAP = 200 * MiB, 100_000, 0.5, 3.0
ATTEMPTS = 3  # other processes of the machine make gaps too, but not each time
PROBE_SECONDS = 0.05  # between two probes of /health and of the memory
RECONNECT_SECONDS = 0.005  # s between two connections of an attacker, who shares the machine with the server
HEAD = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n"
UNREAD = b"POST /tokenize HTTP/1.1\r\nhost: evil.example\r\n"  # refused before its body is read


# ---- what others notice


@dataclass
class Harm:
    health: float = 0.0  # s, the slowest /health; infinite if one was not answered
    memory: int = 0  # bytes of growth
    log: int = 0  # bytes of growth
    quiet_gap: float = 0.0  # s, the median gap between tokens of a stream without the attack
    gaps: list[float] = field(default_factory=list)  # s, all gaps between tokens during the attack

    @property
    def gap(self) -> float:
        """The longest gap between two tokens of a stream, in median gaps without the attack."""
        return max(self.gaps) / self.quiet_gap

    def __str__(self) -> str:
        shown = f"/health {self.health:.3f} s, memory {self.memory / MiB:+.0f} MiB, log {self.log} bytes"
        if not self.gaps:
            return shown
        gaps = f"{self.quiet_gap * 1e3:.0f} ms in quiet, at most {max(self.gaps) * 1e3:.0f} ms"
        return f"{shown}, gaps {gaps} ({self.gap:.1f}x)"


@contextmanager
def serving_streams(folder: Path, model: Path, *options: str, cores: int = SERVER) -> Iterator[Running]:
    """A server for 8 streams beside attacks. All of its KV cache has been written: pages that streams are the first to
    use, 24 KB for a token, are no harm that an attack does."""
    context, batch, chance, places = 2048, 16, random.Random(16), apart(cores)
    own = places and places.server
    with serving(folder, model, *options, open_files=1024, cores=own, context=context, batch=batch) as server:
        for _ in range(batch):
            ids = chance.choices(range(1000, 40_000), k=context - 2)
            assert server.ask("/v1/completions", {"prompt": ids, "max_tokens": 1})[0] == 200
        yield server


@contextmanager
def watched(server: Running, streams: int = 0, quiet_seconds: float = 10.0) -> Iterator[Harm]:
    """Measures the harm that is done to others while the block runs. It is complete after the block. The same streams
    run before it, for as long: steps take longer as streams grow, which is not the attack's doing."""
    harm, done = Harm(), threading.Event()
    if streams:
        with Streams(server.url, streams) as clients:
            time.sleep(quiet_seconds)
            harm.quiet_gap = statistics.median(_gaps(clients.stop()))
    with Streams(server.url, streams) if streams else nullcontext() as attacked:
        memory, log = resident(server), server.log.stat().st_size
        prober = threading.Thread(target=_probe, args=(server, harm, memory, done))
        prober.start()
        try:
            yield harm
        finally:
            done.set()
            prober.join()
            harm.log = server.log.stat().st_size - log
        if attacked:
            harm.gaps = _gaps(attacked.stop())


def _gaps(responses: list[list[float]]) -> list[float]:
    """Gaps between consecutive tokens of a response."""
    return [after - before for times in responses for before, after in itertools.pairwise(times)]


def resident(server: Running) -> int:
    """The bytes of memory of the server's process and its descendants."""
    nbytes, pids = 0, [str(server.process.pid)]
    while pids:
        pid = pids.pop()
        nbytes += _resident(pid)
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):  # it has just ended
                pids += path.read_text().split()
    return nbytes


def _resident(pid: str) -> int:
    with suppress(OSError, IndexError):  # it has just ended
        return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) * 1024
    return 0


def _probe(server: Running, harm: Harm, memory: int, done: threading.Event) -> None:
    if places := apart():
        os.sched_setaffinity(0, places.clients)  # this thread
    while not done.wait(PROBE_SECONDS):
        begun = time.perf_counter()
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=10) as response:
                response.read()
            harm.health = max(harm.health, time.perf_counter() - begun)
        except (OSError, urllib.error.URLError):
            harm.health = float("inf")
        harm.memory = max(harm.memory, resident(server) - memory)


# ---- attacks


@contextmanager
def attacking(server: Running, *names: str) -> Iterator[None]:
    """Runs attacks until the block ends, each in a process with a low priority: its time is not the server's."""
    commands = [[sys.executable, "-m", "tests.hostile.attacks", server.url, name] for name in names]
    places = apart()
    pin = pinning(places and places.attackers)
    attackers = [subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=pin) for command in commands]
    try:
        for attacker in attackers:
            assert attacker.stdout and attacker.stdout.readline() == b"begun\n"
        yield
    finally:
        for attacker in attackers:
            attacker.kill()
        problems = [attacker.communicate()[0] for attacker in attackers]
    assert not any(problems), problems


def check_harm(server: Running, name: str, seconds: float) -> None:
    """Attacks, and checks what others notice. At most three attempts for /health: other processes may have used the
    cores during the first."""
    for _ in range(ATTEMPTS):
        with watched(server) as harm, attacking(server, name):
            time.sleep(seconds)
        print(harm)
        assert harm.memory < MAX_MEMORY and harm.log < MAX_LOG and harm.health < float("inf"), harm
        if harm.health < MAX_HEALTH:
            return
    raise AssertionError(harm)


def check_streams(server: Running, *names: str, seconds: float = 10.0) -> None:
    """Attacks while 8 others stream. At most three attempts for the gaps between tokens, as in `check_harm`."""
    for _ in range(ATTEMPTS):
        with watched(server, 8, seconds) as harm, attacking(server, *names):
            time.sleep(seconds)
        print(harm)
        assert harm.memory < MAX_MEMORY and harm.log < MAX_LOG and harm.health < float("inf"), harm
        if harm.gap <= MAX_GAP and harm.health < MAX_HEALTH:
            return
    raise AssertionError(harm)


def pour(port: int, first: bytes, more: Callable[[int], bytes]) -> None:
    """Sends `first` and then `more(i)` without end; starts again when the server closes the connection."""
    while True:
        time.sleep(RECONNECT_SECONDS)
        with suppress(OSError), connect(port) as connection:
            connection.sendall(first)
            for i in itertools.count():
                connection.sendall(more(i))


def hold(port: int, count: int, first: bytes, more: bytes = b"", pause: float = 0.5) -> None:
    """Keeps `count` connections open that sent `first` and send `more` every `pause` seconds."""
    held: list[socket.socket] = []
    while True:
        if len(held) < count:
            with suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), 1))
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
        time.sleep(pause)


def connect(port: int) -> closing[socket.socket]:
    return closing(socket.create_connection(("127.0.0.1", port), PATIENCE))


def endless_headers(port: int) -> None:
    pour(port, HEAD, lambda i: b"".join(b"x-%d-%d: %b\r\n" % (i, j, b"a" * 100) for j in range(500)))


def endless_header(port: int) -> None:
    pour(port, HEAD + b"x-long: ", lambda _: b"a" * 65536)


def endless_url(port: int) -> None:
    pour(port, b"GET /", lambda _: b"a" * 65536)


def endless_trailers(port: int) -> None:
    first = (
        b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    )
    pour(port, first, lambda i: b"".join(b"x-%d-%d: a\r\n" % (i, j) for j in range(2000)))


def endless_pipeline(port: int) -> None:
    """Requests without end behind one whose response takes long."""
    messages = [{"role": "user", "content": "Hi"}]
    first = post(CHAT, {"messages": messages, "max_tokens": 1500, "ignore_eos": True})
    pour(port, first, lambda _: (HEAD + b"\r\n") * 1000)


def endless_body(port: int) -> None:
    """The body of a request that is refused for its head."""
    pour(port, UNREAD + b"content-length: 1000000000000\r\n\r\n", lambda _: b" " * 65536)


def endless_chunks(port: int) -> None:
    chunks = b"ffff\r\n" + b" " * 0xFFFF + b"\r\n"
    pour(port, UNREAD + b"transfer-encoding: chunked\r\n\r\n", lambda _: chunks)


def tiny_requests(port: int) -> None:
    """16 connections, each of which sends a request as soon as it has the response to the last."""
    with selectors.DefaultSelector() as selector:
        for _ in range(16):
            connection = socket.create_connection(("127.0.0.1", port), PATIENCE)
            selector.register(connection, selectors.EVENT_READ)
            connection.sendall(HEAD + b"\r\n")
        while True:
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj.recv(65536).endswith(b"}"):  # the end of the body
                    key.fileobj.sendall(HEAD + b"\r\n")


def garbage(port: int) -> None:
    pour(port, b"\x16\x03\x01 no HTTP \xff\r\n\r\n", lambda _: b"\x00" * 65536)


def refused_requests(port: int) -> None:
    """Requests that get 400, 403, 404 and 405, with long paths for the log."""
    requests = [
        b"GET /" + b"%0a" * 1000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: evil.example\r\n\r\n",
        b"DELETE /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    ]
    while True:
        time.sleep(RECONNECT_SECONDS)
        for request in requests:
            with suppress(OSError), connect(port) as connection:
                connection.sendall(request)
                connection.recv(1)


def idle_connections(port: int) -> None:
    hold(port, 1200, b"")


def slow_heads(port: int) -> None:
    hold(port, 200, HEAD + b"x-slow: ", b"a")


def slow_bodies(port: int) -> None:
    """Bodies of 15 MB whose last bytes come one at a time."""
    head = b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % (15 * MiB)
    hold(port, 50, head + b" " * MiB, b" " * 65536)


def unread_streams(port: int) -> None:
    """Long streams with as much as there is for each token, of which nothing is read."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
    }
    hold(port, 4, post(CHAT, {**body, "max_tokens": 1900}))


EXHAUSTION: dict[str, Callable[[int], None]] = {
    attack.__name__: attack
    for attack in (
        endless_headers,
        endless_header,
        endless_url,
        endless_trailers,
        endless_pipeline,
        endless_body,
        endless_chunks,
        tiny_requests,
        garbage,
        refused_requests,
        idle_connections,
        slow_heads,
        slow_bodies,
        unread_streams,
    )
}


def main(url: str, name: str) -> None:
    os.nice(19)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # its own connections
    print("begun", flush=True)
    if name in EXHAUSTION:
        EXHAUSTION[name](int(url.rpartition(":")[2]))
    else:
        stall_attacks.run(url, name)


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


if __name__ == "__main__":
    main(*sys.argv[1:])

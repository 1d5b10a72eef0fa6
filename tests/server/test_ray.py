"""Ray replicas: prefix-aware routing, and the death of a replica affects only its own requests."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import string
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import serve
from tandem.cli.commands import parse
from tandem.errors import DeviceError, RequestError
from tandem.server.cluster.routing import CHUNK_CHARS, MAX_CHUNKS, MAX_IMBALANCE, PrefixAffinity, prefix_keys
from tests.cli.tiny_model import write_tiny_model
from tests.server.servers import PATIENCE, Running, post, read_all, serving, wait_until

CHAT = "/v1/chat/completions"
LONG = 1500  # tokens
MONITOR_SECONDS = 5  # of the cluster: its module needs Ray


@pytest.mark.fast
def test_prefix_keys() -> None:
    def keys(**body: Any) -> list[bytes]:
        return prefix_keys(json.dumps(body).encode())

    system, turn = {"role": "system", "content": "s" * 3000}, {"role": "user", "content": "a" * 400}
    one, two = keys(messages=[system]), keys(messages=[system, turn], temperature=1)
    assert 10 < len(one) < len(two) and two[: len(one) - 1] == one[:-1]  # a continued conversation
    assert keys(model="x", messages=[system])[0] != one[0]
    assert keys(prompt="a" * (2 * CHUNK_CHARS * MAX_CHUNKS)) and len(keys(prompt="a" * 10**6)) == MAX_CHUNKS
    many = b'{"prompt": [%b1]}' % (b"1," * 300_000)  # a replica refuses it
    for odd in (b"", b"{", b"3", b'{"prompt": "\\ud800"}', b"[" * 100_000, b"null", many):
        assert prefix_keys(odd) == []


@pytest.mark.fast
def test_the_replica_with_the_prefix_is_preferred_unless_overloaded() -> None:
    affinity, keys = PrefixAffinity(), [b"1", b"2", b"3"]
    affinity.begin("b", keys)
    assert affinity.ranked(["a", "b"], keys)[0] == "b"
    assert affinity.ranked(["a", "b"], [b"1", b"2", b"x"])[0] == "b"  # it has the longest prefix
    assert affinity.ranked(["a", "b"], [b"x"])[0] == "a"  # the least loaded
    for _ in range(MAX_IMBALANCE):
        affinity.begin("b", [])
    assert affinity.ranked(["a", "b"], keys) == ["a", "b"]
    affinity.end("b")
    assert affinity.ranked(["a", "b"], keys)[0] == "b"
    affinity.forget("b")
    affinity.begin("b", [])
    assert affinity.ranked(["a", "b"], keys)[0] == "a"


@pytest.mark.fast
def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "tandem.server.cluster.replicas", raising=False)
    options = parse(["serve", str(write_tiny_model(tmp_path / "tiny.gguf")), "--ray", "--port", "0"])
    assert options.ray == (2, 2) and parse(["serve", "--ray", "1-4"]).ray == (1, 4)
    with pytest.raises(RequestError, match=r"tandem-llm.ray"):
        serve.main(options)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    if not find_spec("ray"):
        message = "NO TEST OF RAY RUNS: pip install 'tandem-llm[ray]'"
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    options = ("--ray", "2", "--threads", "1")
    limits: dict[str, Any] = {"context": 50_000, "batch": 8, "shutdown": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")  # not a cluster of this machine
        patch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU": 4}')  # for two servers on fewer cores
        with serving(tmp_path_factory.mktemp("ray"), tiny, *options, **limits) as found:
            yield found


@pytest.fixture
def same_cluster(server: Running, monkeypatch: pytest.MonkeyPatch) -> str:
    """New servers start their replicas in the cluster of `server`."""
    found = re.search(r"started a local Ray cluster at (\S+)", server.log.read_text())
    assert found
    monkeypatch.setenv("RAY_ADDRESS", found[1])
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    return found[1]


@pytest.mark.filterwarnings("ignore")  # of Ray
def test_a_cluster_is_joined_only_if_it_is_named(same_cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server's local cluster would end with that server."""
    from tandem.server.cluster.replicas import existing_cluster

    assert existing_cluster() == same_cluster
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(DeviceError, match=":1, which RAY_ADDRESS names"):
        existing_cluster()
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda _: None)  # no `ray start` here
    assert existing_cluster() is None


def cached_share(server: Running) -> float:
    """The share of cached prompt tokens in conversations of three turns."""
    rng, prompt, cached = random.Random(0), 0, 0
    talks = [
        [{"role": "system", "content": "".join(rng.choices(string.ascii_letters, k=1500))}] for _ in range(8)
    ]
    for turn in range(3):
        rng.shuffle(talks)
        for talk in talks:
            talk.append({"role": "user", "content": f"{turn} " + "go on " * 50})
            status, _, body = server.ask(CHAT, {"messages": talk, "max_tokens": 4, "temperature": 0})
            assert status == 200
            talk.append(body["choices"][0]["message"])
            if turn:
                prompt += body["usage"]["prompt_tokens"]
                cached += body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached / prompt


@pytest.mark.usefixtures("same_cluster")
def test_prefix_routing(server: Running, tiny: Path, tmp_path: Path) -> None:
    """Compared with Ray's own routing in the same cluster."""
    with_routing = cached_share(server)
    options = ("--ray", "2", "--threads", "1")
    plain: dict[str, Any] = {"prefix_routing": False, "context": 50_000, "shutdown": 2}
    with serving(tmp_path, tiny, *options, **plain) as other:
        without = cached_share(other)
    print(f"computed before: {with_routing:.0%} with routing by prefix, {without:.0%} without")
    assert with_routing > 0.75 and with_routing > without + 0.1


def replicas(server: Running) -> list[int]:
    """The replica processes of a server."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"ServeReplica:tandem-{server.port}:" in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            pass  # the process has ended
    return found


def test_the_death_of_a_replica(server: Running) -> None:
    """Of eight responses, those of the other replica are complete; its own end with an error that says to try again."""
    ended: list[bytes] = []

    begun = threading.Semaphore(0)

    def ask(number: int) -> None:
        with server.connect() as client:
            body = server.chat(f"{number}", stream=True, max_tokens=LONG)
            client.sendall(post(CHAT, body, connection="close"))
            first = client.recv(1)
            begun.release()
            ended.append(first + read_all(client))

    assert len(replicas(server)) == 2
    clients = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for client in clients:  # one by one, so that they are distributed
        client.start()
        assert begun.acquire(timeout=PATIENCE)
    os.kill(replicas(server)[0], signal.SIGKILL)
    for client in clients:
        client.join(PATIENCE)
    whole = [answer for answer in ended if b"data: [DONE]" in answer]
    lost = [answer for answer in ended if b"replica_lost" in answer]
    assert len(whole) + len(lost) == 8 and whole and lost, [answer[-300:] for answer in ended]
    assert all(answer.count(b'"delta"') >= LONG for answer in whole)
    for _ in range(4):
        assert server.ask(CHAT, server.chat(max_tokens=2))[0] == 200
    wait_until(lambda: len(replicas(server)) == 2)  # Ray has replaced it


def test_metrics_of_all_replicas_are_merged(server: Running) -> None:
    """/live sums over the replicas, /metrics labels them."""

    def live() -> Any:
        """Waits until both replicas report: a slow one is left out."""
        found: Any = {}

        def is_whole() -> bool:
            found.update(server.ask("/live")[2]["models"]["tiny"])
            return bool(found["device"].startswith("2 replicas")) and len(found["memory"]["heaps"]) == 2

        wait_until(is_whole)
        return found

    def answers() -> dict[str, float]:
        """The responses of each replica that has any."""
        status, _, text = server.ask("/metrics")
        assert status == 200 and text.count("# TYPE tandem_requests_total counter") == 1
        label = r'tandem_requests_total\{finish_reason="length",model="tiny",replica="(\w+)"\} ([0-9.]+)'
        return {replica: float(count) for replica, count in re.findall(label, text)}

    server.wait_idle()
    before, asked = live(), 0
    while asked < 12 or (len(answers()) < 2 and asked < 200):  # until each replica has some
        assert server.ask(CHAT, server.chat(f"{asked}" * 300, max_tokens=5))[0] == 200
        asked += 1
    after = live()
    assert after["totals"]["tokens"] == before["totals"]["tokens"] + 5 * asked
    assert len(after["history"]["tokens"]) == 180 and after["kv"][0]["blocks"] > 0
    assert len(answers()) == 2 and sum(answers().values()) >= asked


def test_a_replica_that_hangs_hides_no_other(server: Running) -> None:
    """`/health` and the metrics are those of the others, and new requests go to them."""
    wait_until(lambda: len(replicas(server)) == 2 and server.ask("/health")[0] == 200)
    hung = replicas(server)[0]
    os.kill(hung, signal.SIGSTOP)
    try:
        for path in ("/health", "/live", "/metrics"):
            begun = time.monotonic()
            assert server.ask(path)[0] == 200
            assert time.monotonic() - begun < 2 * MONITOR_SECONDS
        assert server.ask(CHAT, server.chat(max_tokens=2))[0] == 200
    finally:
        os.kill(hung, signal.SIGCONT)


@pytest.mark.soak
@pytest.mark.usefixtures("same_cluster")
def test_more_replicas_when_requests_queue_up(tiny: Path, tmp_path: Path) -> None:
    """One replica at first, another when requests queue up."""
    with serving(
        tmp_path,
        tiny,
        "--ray",
        "1-2",
        "--threads",
        "1",
        batch=2,
        context=90_000,
        shutdown=1,
        write_timeout=600,
    ) as other:
        assert len(replicas(other)) == 1
        streams = [other.connect() for _ in range(4)]
        try:
            for number, stream in enumerate(streams):
                stream.thing.sendall(post(CHAT, other.chat(f"{number}", stream=True, max_tokens=80_000)))
            wait_until(lambda: len(replicas(other)) == 2)
        finally:
            for stream in streams:
                stream.thing.close()


@pytest.mark.soak
def test_replicas_that_cannot_start_are_one_sentence(server: Running, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(tiny.read_bytes()[:20_000])
    command = [
        sys.executable,
        "-m",
        "tandem",
        "serve",
        str(tmp_path / "cut.gguf"),
        "--ray",
        "1",
        "--port",
        "0",
    ]
    done = subprocess.run(command, env=server.env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tandem: no replica could be started: ") and "cut.gguf" in last


def test_a_disconnect_cancels_the_request_of_a_replica(server: Running) -> None:
    before = server.cancelled()
    with server.connect() as client:
        client.sendall(post(CHAT, server.chat("gone", stream=True, max_tokens=40_000)))
        assert b"data:" in client.recv(65536) + client.recv(65536)
        assert b"data:" in client.recv(65536)
    wait_until(lambda: server.cancelled() > before)
    server.wait_idle()

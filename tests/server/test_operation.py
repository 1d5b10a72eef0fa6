"""The guarantees of docs/SECURITY.md: API keys, limits, bad connections, log, shutdown."""

from __future__ import annotations

import dataclasses
import json
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import serve
from tandem.cli.commands import parse
from tandem.errors import RequestError
from tandem.server.http.middleware import ApiKeys
from tandem.server.http.uvicorn_server import bind_socket
from tandem.server.settings import ServerSettings, read_api_keys, read_settings_file
from tests.cli.tiny_model import write_tiny_model
from tests.server.servers import PATIENCE, TICKS, Running, post, read_all, serving, wait_until

CHAT = "/v1/chat/completions"
MiB = 1 << 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with limits that a test can reach."""
    limits: dict[str, Any] = {"max_requests": 4, "max_prompt": 4000, "max_body": MiB}
    limits |= {"context": 50_000, "batch": 8, "shutdown": 2, "cors_origins": ["https://friend.example"]}
    with serving(tmp_path_factory.mktemp("operation"), tiny, **limits) as found:
        yield found


@pytest.fixture(scope="module")
def hasty(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with short timeouts."""
    limits: dict[str, Any] = {"read_timeout": 1, "write_timeout": 1, "idle_timeout": 1}
    with serving(
        tmp_path_factory.mktemp("hasty"), tiny, **limits, context=50_000, batch=8, shutdown=2
    ) as found:
        yield found


def endless(server: Running, **more: Any) -> dict[str, Any]:
    return server.chat(stream=True, max_tokens=40_000, **more)


def tandem(server: Running, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as the server's user."""
    command = [sys.executable, "-m", "tandem", *arguments]
    return subprocess.run(command, env=server.env, capture_output=True, text=True, timeout=PATIENCE)


def is_well(server: Running) -> None:
    """The server still responds, and no earlier request is left."""
    server.wait_idle()
    assert server.ask(CHAT, server.chat(max_tokens=3))[0] == 200


# ---- connections


def test_a_connection_that_says_nothing_is_closed(hasty: Running) -> None:
    with hasty.connect() as silent:
        assert read_all(silent) == b""
    is_well(hasty)


def test_a_request_that_never_ends_is_closed(hasty: Running) -> None:
    """Single bytes do not extend the deadline."""
    with hasty.connect() as slow:
        begun = time.monotonic()
        try:
            for byte in b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: " + b"a" * 1000:
                slow.sendall(bytes([byte]))
                time.sleep(0.05)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert time.monotonic() - begun < PATIENCE / 2
    is_well(hasty)


def test_a_body_that_comes_too_slowly_is_refused(hasty: Running) -> None:
    with hasty.connect() as slow:
        slow.sendall(post(CHAT, hasty.chat())[:-10])
        answer = read_all(slow)
    assert b" 408 " in answer and b"did not arrive" in answer
    is_well(hasty)


def test_the_second_request_of_a_connection_has_a_deadline_too(hasty: Running) -> None:
    with hasty.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert connection.recv(1).startswith(b"H")
        connection.sendall(b"GET /health HTTP/1.1\r\nhos")
        assert read_all(connection).count(b"HTTP/1.1") == 0


def test_an_idle_connection_is_closed(hasty: Running) -> None:
    with hasty.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_is_disconnected(hasty: Running) -> None:
    """Its request is cancelled when the socket buffers stay full."""
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", hasty.port))
        before = hasty.cancelled()
        deaf.sendall(post(CHAT, endless(hasty, n=8, logprobs=True, top_logprobs=20)))
        wait_until(lambda: hasty.cancelled() == before + 8)
    is_well(hasty)


def test_a_stream_that_is_not_read_ends_before_it_fills_the_memory(server: Running) -> None:
    """Long before `write_timeout`, by the number of tokens and log-probabilities that wait."""
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        begun, before = time.monotonic(), server.cancelled()
        deaf.sendall(post(CHAT, endless(server, n=4, logprobs=True, top_logprobs=20)))
        wait_until(lambda: server.running() == 4)
        wait_until(lambda: server.running() == 0)
        # The responses are there, up to an error, and the client may read them.
        assert server.cancelled() == before
        assert time.monotonic() - begun < 25
    is_well(server)


def test_a_disconnect_in_mid_stream_cancels_the_request(server: Running) -> None:
    before = server.cancelled()
    with server.connect() as client:
        client.sendall(post(CHAT, endless(server)))
        assert b"data:" in client.recv(65536) + client.recv(65536)
    wait_until(lambda: server.cancelled() == before + 1)
    is_well(server)


def test_a_disconnect_before_the_response_cancels_the_request(server: Running) -> None:
    with server.connect() as client:
        before = server.cancelled()
        client.sendall(post(CHAT, server.chat(max_tokens=40_000)))
        wait_until(lambda: server.running() == 1)
    wait_until(lambda: server.cancelled() == before + 1)
    is_well(server)


def test_a_half_closed_connection_cancels_the_request(server: Running) -> None:
    before = server.cancelled()
    with server.connect() as client:
        client.sendall(post(CHAT, server.chat(max_tokens=40_000)))
        wait_until(lambda: server.running() == 1)
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""
    wait_until(lambda: server.cancelled() == before + 1)
    is_well(server)


def test_a_peer_that_has_vanished_is_probed(server: Running) -> None:
    """The kernel's connection table shows the keepalive timer, set to at most 30 s."""

    def is_probed(client: int) -> bool:
        ports = f":{server.port:04X}", f":{client:04X}"
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, here, there, _, _, timer, *_ = line.split()
            if here.endswith(ports[0]) and there.endswith(ports[1]):
                kind, ticks = (int(part, 16) for part in timer.split(":"))
                return kind == 2 and 0 < ticks / TICKS <= 30
        return False

    with server.connect() as client:
        wait_until(lambda: is_probed(client.getsockname()[1]))


# ---- sizes and numbers


def resident(server: Running) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_100_mb_is_refused_and_not_kept(server: Running, chunked: bool) -> None:
    is_well(server)
    before, part = resident(server), b"a" * MiB
    with server.connect() as large, ThreadPoolExecutor(1) as reader:
        # Sampled while it is sent: unread data is freed with the connection.
        answer = reader.submit(read_all, large)
        how = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % (100 * MiB)
        large.sendall(b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n" + how + b"\r\n\r\n")
        try:
            for _ in range(100):
                large.sendall(b"%x\r\n%b\r\n" % (MiB, part) if chunked else part)
            large.sendall(b"0\r\n\r\n" * chunked)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server closed the connection
    assert b" 413 " in answer.result() and b"larger than" in answer.result()
    assert resident(server) - before < 30 * MiB
    is_well(server)


def test_many_half_requests_do_not_fill_the_memory(server: Running) -> None:
    """The bytes of all incomplete requests are limited."""
    head = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % MiB
    clients = [socket.create_connection(("127.0.0.1", server.port), PATIENCE) for _ in range(24)]
    try:
        for client in clients:
            client.sendall(head + b" " * (MiB - 1000))
        refused = select.select(clients, [], [], PATIENCE)[0]  # others may still be sending
        assert refused and all(b" 429 " in client.recv(65536) for client in refused)
    finally:
        for client in clients:
            client.close()
    is_well(server)


def test_a_long_prompt_is_refused(server: Running) -> None:
    status, _, body = server.ask(CHAT, server.chat("a " * 5000))
    assert status == 400 and "4000" in body["error"]["message"]


def test_too_many_requests_get_retry_after(server: Running) -> None:
    streams = [server.connect() for _ in range(4)]
    try:
        for stream in streams:
            stream.thing.sendall(post(CHAT, endless(server)))
        wait_until(lambda: server.running() == 4)
        status, headers, body = server.ask(CHAT, server.chat())
        assert status == 429 and int(headers["retry-after"]) > 0
        assert body["error"]["type"] == "rate_limit_error"
        assert server.ask("/health")[0] == 200  # monitoring still works
    finally:
        for stream in streams:
            stream.thing.close()
    is_well(server)


def test_a_full_queue_is_429(tiny: Path, tmp_path: Path) -> None:
    with serving(tmp_path, tiny, batch=1, max_queue=1, context=50_000, shutdown=1) as server:
        with server.connect() as one, server.connect() as two:
            for client in (one, two):
                client.sendall(post(CHAT, endless(server)))
            wait_until(lambda: server.running() == 2)
            status, headers, body = server.ask(CHAT, server.chat())
        assert status == 429 and int(headers["retry-after"]) > 0 and "try again" in body["error"]["message"]
        is_well(server)


# ---- API keys and origins


def test_keys(tiny: Path, tmp_path: Path) -> None:
    """Valid keys are accepted, others are rejected, and none is in the log."""
    keys = ["sk-first-0123456789abcdef", "sk-second-fedcba9876543210"]
    file = tmp_path / "keys"
    file.write_text(f"# people\n{keys[0]}\n\n  {keys[1]}  \n")
    wrong = "sk-wrong-00000000000000"
    with serving(tmp_path, tiny, "--api-keys", file) as server:
        for path, body in ((CHAT, server.chat()), ("/v1/models", None), ("/live", None), ("/metrics", None)):
            for headers in ({}, {"authorization": f"Bearer {wrong}"}, {"x_api_key": wrong}):
                status, answered, error = server.ask(path, body, **headers)
                assert status == 401 and answered["www-authenticate"] == "Bearer"
                assert error["error"]["type"] == "authentication_error" and wrong not in str(error)
        for key in keys:
            assert server.ask("/v1/models", authorization=f"Bearer {key}")[0] == 200
            assert server.ask(CHAT, server.chat(max_tokens=2), x_api_key=key)[0] == 200
            assert server.ask(f"/v1/models?key={key}")[0] == 401
        assert server.ask("/")[0] == server.ask("/health")[0] == 200  # the page asks the user for a key
        log = server.log.read_text()
        assert "401" in log and not any(key in log for key in (*keys, wrong))
        shown = tandem(server, "ps").stdout
        assert server.url in shown and not any(key in shown for key in keys)
        assert tandem(
            server, "run", "tiny", "Hi", "-n", "4"
        ).stdout.strip()  # with a key from the server's file


@pytest.mark.fast
def test_key_files(tmp_path: Path) -> None:
    assert (
        ApiKeys(["a", "b"]).accept("b") and not ApiKeys(["a"]).accept("") and not ApiKeys(["a"]).accept(None)
    )
    for text in ("", "# only a comment\n", "with space\n", "ключ\n"):
        (tmp_path / "keys").write_text(text)
        with pytest.raises(RequestError):
            read_api_keys(tmp_path / "keys")
    with pytest.raises(RequestError, match="cannot be read"):
        read_api_keys(tmp_path / "none")


def test_other_origins_are_rejected(server: Running) -> None:
    body = server.chat(max_tokens=1)
    assert server.ask(CHAT, body, origin="https://evil.example")[0] == 403
    assert server.ask("/v1/models", origin="null")[0] == 403
    assert server.ask("/v1/models", host="evil.example")[0] == 403  # DNS rebinding
    assert server.ask("/v1/models", origin=server.url)[0] == 200
    status, headers, _ = server.ask(CHAT, body, origin="https://friend.example")
    assert status == 200 and headers["access-control-allow-origin"] == "https://friend.example"
    with server.connect() as asking:
        asking.sendall(
            b"OPTIONS /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\norigin: https://friend.example\r\n"
            b"access-control-request-headers: authorization,x-stainless-os\r\n\r\n"
        )
        allowed = asking.recv(65536)
        assert b" 204 " in allowed and b"allow-headers: authorization,x-stainless-os" in allowed


def test_it_listens_on_this_machine_only(server: Running) -> None:
    assert ServerSettings().host == "127.0.0.1" and not ServerSettings().cors_origins
    known = "".join(path.read_text() for path in Path("/proc/net").glob("tcp*"))
    listening = re.findall(rf" (\w+):{server.port:04X} \w+:0000 0A ", known)
    assert listening == ["0100007F"]  # 127.0.0.1


# ---- the log


def test_requests_have_ids_and_a_line_each(server: Running) -> None:
    _, headers, _ = server.ask("/v1/models?secret=42", x_request_id="from-the-client.1")
    assert headers["x-request-id"] == "from-the-client.1"
    _, headers, _ = server.ask("/no/such%0apath", x_request_id="two words")
    made = headers["x-request-id"]
    server.ask("/v1/models", x_forwarded_for="1.2.3.4 GET /forged 200", x_request_id="behind-a-proxy")
    assert len(made) == 16 and made != "two words"
    _, headers, _ = server.ask("/v1/models", x_request_id="\xe9\xaa", x_forwarded_for="\xe9\xaa")
    assert headers["x-request-id"].isascii()
    wait_until(
        lambda: all(id in server.log.read_text() for id in ("from-the-client.1", made, "behind-a-proxy"))
    )
    lines = server.log.read_text().splitlines()
    assert any("from-the-client.1 127.0.0.1 GET /v1/models 200 " in line for line in lines)
    assert any(f"{made} 127.0.0.1 GET /no/such\\npath 404 " in line for line in lines)
    assert any("behind-a-proxy - GET /v1/models 200 " in line for line in lines)
    assert not any("\xe9" in line or "secret" in line or "forged" in line for line in lines)


# ---- settings


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prot = 1", "unknown setting prot"),
        ("port = 'x'", "port = 'x'"),
        ("port = 99999", "65535"),
        ("max_requests = 0", "above 0"),
        ("models = 3", "models = 3"),
        ("access_log = 1", "access_log"),
        ("port = ", "is not valid TOML"),
        ("kv = 'f8'", "f16 or q8"),
        ("timeout = nan", "timeout = nan: use a number above 0"),
        ("read_timeout = 1e308", "1e.09 at most"),
        ("idle_timeout = inf", "1e.09 at most"),
        ("kv_memory = " + "9" * 400, "1e.09 at most"),
        ("keep_alive = -" + "9" * 400, "1e.09 at most"),
        ("batch = " + "9" * 5000, "is not valid TOML"),
        ("batch = " + "[" * 20_000, "is not valid TOML"),
        *(
            (f"allow_image_urls = ['{host}']", "names of hosts")
            for host in ("http://a.b/x", "*", "", " a.com")
        ),
        *((f"cors_origins = ['{origin}']", "use origins") for origin in ("http://a b", "a.com", "")),
    ],
    ids=lambda value: value[:30],
)
def test_a_wrong_settings_file_is_an_error(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text(text)
    with pytest.raises(RequestError, match=problem):
        read_settings_file(file)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["~nobody-has-this-name/x.gguf", "x" * 3000, "x\0"])
def test_a_path_that_no_file_has_is_a_name_of_a_model(tmp_path: Path, name: str) -> None:
    """It was a traceback; that no model has this name is said when the model is looked for."""
    file, text = tmp_path / "tandem.toml", json.dumps(name)
    file.write_text(
        f"models = [{text}]\nresponses = {text}\n[[presets]]\nname = 'a'\nfile = {text}\ndraft = {text}"
    )
    settings = read_settings_file(file)
    assert settings.models == (name,) and settings.presets[0].file == settings.presets[0].draft == name


@pytest.mark.fast
@pytest.mark.parametrize("host", ["\0", "ä..b", "a" * 300])
def test_a_wrong_host_is_an_error(host: str) -> None:
    with pytest.raises(RequestError, match="cannot listen on"):
        bind_socket(ServerSettings(host=host, port=0))


@pytest.mark.fast
def test_a_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text('port = 1234\nmodels = ["a", "b"]\ntimeout = 5\napi_keys = "keys"\naccess_log = false\n')
    found = read_settings_file(file)
    assert (found.port, found.models, found.timeout) == (1234, ("a", "b"), 5.0)
    assert found.api_keys == tmp_path / "keys" and not found.access_log
    (tmp_path / "my.gguf").touch()
    file.write_text(
        'models = ["my.gguf", "smollm2"]\ndraft = ["my=my.gguf"]\nkeep_alive = 0\nkv = "q8"\nthreads = 2\n'
    )
    found = read_settings_file(file)
    assert found.models == (f"{tmp_path}/my.gguf", "smollm2") and found.draft == (f"my={tmp_path}/my.gguf",)
    given = serve._given(parse(["serve", "--threads", "3"]))
    assert given == {"threads": 3}  # nothing else overrides the file
    assert (found.keep_alive, found.kv, found.threads) == (0.0, "q8", 2)


@pytest.mark.fast
def test_the_example_has_every_setting_with_its_default() -> None:
    example = Path(__file__).parents[2] / "deploy" / "tandem.toml"
    lines = re.findall(r"^# (\w+ = .*?)(?:  +#.*)?$", example.read_text(), re.MULTILINE)
    shown = tomllib.loads("\n".join(lines))
    settings = dataclasses.asdict(ServerSettings())
    # Tables, which test_deploy.py and test_mcp.py read.
    assert shown.keys() == settings.keys() - {"presets", "mcp"}
    for name, value in settings.items():
        assert value in (None, (), {}) or shown[name] == value


# ---- shutdown


def test_sigterm_under_load(tiny: Path, tmp_path: Path) -> None:
    """Short responses finish, long ones end with an error, the port is free at once, and a new server can start."""
    ended: dict[str, bytes] = {}
    with serving(tmp_path / "one", tiny, context=90_000, batch=16, shutdown=6) as server:
        port = server.port

        def ask(name: str, body: dict[str, Any]) -> None:
            with server.connect() as client:
                client.sendall(post(CHAT, body))
                ended[name] = read_all(client)

        wanted = {f"long {i}": server.chat(stream=True, max_tokens=80_000) for i in range(4)}
        wanted |= {f"whole {i}": server.chat(max_tokens=80_000) for i in range(2)}
        short = {f"short {i}": server.chat(stream=True, max_tokens=300) for i in range(4)}
        clients = [threading.Thread(target=ask, args=item) for item in (*wanted.items(), *short.items())]
        for client in clients[: len(wanted)]:
            client.start()
        wait_until(lambda: server.running() == len(wanted))
        for client in clients[len(wanted) :]:
            client.start()
        wait_until(lambda: server.ask("/live")[2]["models"]["tiny"]["totals"]["requests"] >= len(clients))
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_free(port))
        assert server.process.poll() is None  # while responses finish
        with serving(tmp_path / "two", tiny, port=port) as restarted:
            assert restarted.ask(CHAT, restarted.chat(max_tokens=3))[0] == 200
            for client in clients:
                client.join(PATIENCE)
            assert server.process.wait(PATIENCE) == 0
    for name, answer in ended.items():
        if name.startswith("short"):
            assert answer.count(b'"delta"') >= 300 and b"[DONE]" in answer
        elif name.startswith("long"):
            assert b"data: [DONE]" not in answer and b"shut down" in answer.split(b"data: ")[-1]
        else:
            assert b" 503 " in answer and b"retry-after" in answer and b"shut down" in answer


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_ps_run_and_stop(tiny: Path, tmp_path: Path) -> None:
    with serving(tmp_path, tiny, shutdown=2) as server:
        [shown] = json.loads(tandem(server, "ps", "--json").stdout)
        assert (shown["url"], shown["pid"], shown["models"]) == (server.url, server.process.pid, ["tiny"])
        alone = tandem(server, "run", str(tiny), "Hi", "-n", "20").stdout  # a file is loaded in the process
        before = server.ask("/live")[2]["models"]["tiny"]["totals"]["tokens"]
        assert tandem(server, "run", "tiny", "Hi", "-n", "20").stdout == alone
        assert server.ask("/live")[2]["models"]["tiny"]["totals"]["tokens"] == before + 20
        answer = json.loads(tandem(server, "run", "tiny", "Hi", "--regex", "(yes|no)", "--json").stdout)
        assert answer["text"] in ("yes", "no") and answer["usage"]["completion_tokens"] > 0
        failed = tandem(server, "run", "tiny", "a " * 4000)
        assert failed.returncode == 1 and "context" in failed.stderr and "Traceback" not in failed.stderr
        assert tandem(server, "stop", "nothing").returncode == 1
        assert tandem(server, "stop", "tiny").stdout == f"stopped {server.url}\n"
        assert server.process.wait(PATIENCE) == 0
        assert "no server" in tandem(server, "ps").stderr


def test_a_killed_server_is_not_shown(tiny: Path, tmp_path: Path) -> None:
    with serving(tmp_path, tiny) as server:
        server.process.kill()
        server.process.wait()
        assert "no server" in tandem(server, "ps").stderr
        assert not any((tmp_path / "cache" / "tandem" / "servers").iterdir())


def test_a_port_in_use_is_one_sentence(server: Running, tiny: Path) -> None:
    command = [sys.executable, "-m", "tandem", "serve", str(tiny), "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1 and "choose another" in done.stderr and "Traceback" not in done.stderr


def test_an_idle_server_uses_no_cpu(server: Running) -> None:
    """Less than 2% of a core, also some time after a request."""
    is_well(server)
    shares = list[float]()
    while len(shares) < 2 and not (shares and shares[-1] < 0.02):
        begun, before = time.monotonic(), server.cpu_seconds()
        time.sleep(3)
        shares.append((server.cpu_seconds() - before) / (time.monotonic() - begun))
    assert shares[-1] < 0.02, shares
    measured = server.ask("/live")[2]["models"]["tiny"]["roofline"]
    assert measured is None  # not requested


def test_errors_have_the_body_that_clients_expect(server: Running) -> None:
    for status, answer in (
        (403, server.ask("/v1/models", origin="https://evil.example")),
        (404, server.ask("/v1/nothing{}")),
        (405, server.ask(CHAT)),
        (400, server.ask(CHAT, {"messages": "none"})),
    ):
        assert answer[0] == status, json.dumps(answer[2])
        assert set(answer[2]["error"]) == {"message", "type", "param", "code"}
        assert status < 404 or "/docs" in answer[2]["error"]["message"]

"""Runs `tandem serve` as a process, and connects to it."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 60.0  # seconds, the timeout of everything on a busy machine
TICKS = os.sysconf("SC_CLK_TCK")  # clock ticks per second in /proc
START = 180.0  # seconds for a server to start; with Ray it starts dozens of processes


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    url: str
    log: Path
    env: dict[str, str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        """(status, headers, JSON) of a request: POST if it has a body, else GET."""
        data = None if body is None else json.dumps(body).encode()
        given = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        request = urllib.request.Request(self.url + path, data, given)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return response.status, response.headers, _json(response.read())
        except urllib.error.HTTPError as error:
            return error.code, error.headers, _json(error.read())

    def chat(self, text: str = "Hi", **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}

    def connect(self) -> closing[socket.socket]:
        return closing(socket.create_connection(("127.0.0.1", self.port), PATIENCE))

    def running(self) -> int:
        """The number of running sequences."""
        models = self.ask("/live")[1:][1]["models"]
        return sum(model["running"] + model["waiting"] for model in models.values())

    def cancelled(self) -> int:
        """The number of cancelled requests so far."""
        counts = re.findall(
            r'tandem_requests_total\{finish_reason="cancelled".*\} (\S+)', self.ask("/metrics")[2]
        )
        return int(sum(map(float, counts)))

    def cpu_seconds(self) -> float:
        """CPU seconds used by the server's process."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def wait_idle(self) -> None:
        wait_until(lambda: not self.running())


def wait_until(done: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def post(path: str, body: Any, **headers: str) -> bytes:
    """An HTTP request as bytes."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
    lines += [f"content-length: {len(data)}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def read_all(connection: socket.socket) -> bytes:
    """Reads until the server closes the connection."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@contextmanager
def serving(
    folder: Path,
    *arguments: str | Path,
    open_files: int | None = None,
    cores: frozenset[int] | None = None,
    presets: str = "",
    **settings: Any,
) -> Iterator[Running]:
    """A server on a free port, with its own cache folder; with `open_files` as its limit, and on `cores` only.
    `presets`: in TOML."""
    folder.mkdir(parents=True, exist_ok=True)
    log, file = folder / "server.log", folder / "settings.toml"
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
    file.write_text("".join(lines) + presets)
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "NO_PROXY": "*"}
    options = ["--settings", str(file)] + ([] if "port" in settings else ["--port", "0"])
    command = [sys.executable, "-m", "tandem", "serve", *map(str, arguments), *options]

    def limit() -> None:
        if open_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
        if cores:
            os.sched_setaffinity(0, cores)

    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, preexec_fn=limit)
    try:
        running = Running(process, _address(process, log), log, env)
        wait_until(lambda: running.ask("/health")[0] == 200)
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + START
    while not (found := re.search(r"listening at (http://\S+)", log.read_text())):
        assert process.poll() is None and time.monotonic() < end, f"it did not start: {log.read_text()}"
        time.sleep(0.05)
    return found[1]

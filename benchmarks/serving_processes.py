"""The two servers of a comparison, as processes on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

STARTING = 60.0  # seconds a server may take
TICKS = float(os.sysconf("SC_CLK_TCK"))


class Server:
    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.port, self._process = port, process

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def _started(command: list[str], port: int, health: str) -> Iterator[Server]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + STARTING
        while not _answers(f"http://127.0.0.1:{port}{health}"):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"this does not start a server: {' '.join(command)}")
            time.sleep(0.05)
        yield Server(process, port)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def tandem(
    model: Path, *, threads: int, device: str, context: int, options: Sequence[str] = ()
) -> contextlib.AbstractContextManager[Server]:
    port = _free_port()
    command = [
        sys.executable,
        "-m",
        "tandem",
        "serve",
        str(model),
        "--device",
        device,
        "--threads",
        str(threads),
    ]
    command += ["--context", str(context), "--port", str(port), *options]
    return _started(command, port, "/v1/models")


def llama_cpp(
    program: str, model: Path, *, threads: int, slots: int, context: int, options: list[str]
) -> contextlib.AbstractContextManager[Server]:
    """With a slot a client, each with a whole context of its own."""
    port = _free_port()
    command = [program, "-m", str(model), "--port", str(port), "-t", str(threads), "-tb", str(threads)]
    return _started([*command, "-np", str(slots), "-c", str(slots * context), *options], port, "/health")


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=1) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""Ctrl-C at any moment: exit code 130, no traceback, nothing half-written."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.processes import COMMAND, PATIENCE, environment, tandem, wait_for
from tests.loopback_hub import LoopbackHub


def start(
    *arguments: str | Path, env: dict[str, str] | None = None, python: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    command = [sys.executable, *python, *COMMAND[1:], *map(str, arguments)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )


def interrupt(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """Sends Ctrl-C's signal; the rest of both outputs."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, (process.returncode, err.decode())
    assert b"Traceback" not in err and b"KeyboardInterrupt" not in err, err.decode()
    return out.decode(), err.decode()


# Modules in the order they are imported, from the first that is ours to the last before the model is read.
@pytest.mark.parametrize(
    ("module", "delay"),
    [
        ("tandem.cli.commands", 0),
        ("tandem.cli.loading", 0),
        ("numpy._core.multiarray", 0),
        ("numpy", 0),
        ("tandem.engine.llm", 0),
        ("tandem.engine.llm", 0.02),
        ("tandem.engine.llm", 0.05),
    ],
)
def test_during_start_up_and_load(tiny: Path, module: str, delay: float) -> None:
    process = start("run", tiny, "hello", "-n", "99999", "-c", "100000", python=("-X", "importtime"))
    assert process.stderr is not None
    wait_for(process.stderr.fileno(), rf" {re.escape(module)}\n".encode())
    time.sleep(delay)
    interrupt(process)


def test_while_it_answers(tiny: Path) -> None:
    process = start("run", tiny, "hello", "-n", "99999", "-c", "100000")
    assert process.stdout is not None
    wait_for(process.stdout.fileno(), b"[a-z]")
    out, err = interrupt(process)
    assert out.endswith("\n") and err == ""


@pytest.mark.parametrize("command", ["run", "perplexity"])
def test_while_it_reads_or_measures(tiny: Path, tmp_path: Path, command: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy.\n" * 20_000)
    reading = command == "run"  # from a pipe that brings nothing
    process = start(command, tiny, *([] if reading else [text]), python=("-X", "importtime"))
    assert process.stderr is not None
    wait_for(process.stderr.fileno(), b" tandem.cli.loading\n" if reading else b" tandem.engine.llm\n")
    time.sleep(0.3)
    out, _ = interrupt(process)
    assert out == ""


def test_during_a_pull_which_then_goes_on(tmp_path: Path) -> None:
    model = os.urandom(2_000_000)
    with LoopbackHub({"user/repo": {"model-Q4_0.gguf": model}}) as hub:
        hub.bytes_per_second = 200_000
        env = environment(tmp_path, HF_ENDPOINT=hub.url)
        process = start("pull", "user/repo", env=env)
        blobs = tmp_path / "hub" / "models--user--repo" / "blobs"
        size = wait_for_bytes(blobs)
        _, err = interrupt(process)
        assert err == "fetching model-Q4_0.gguf (2 MB)\n"
        [part] = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert part.suffix == ".incomplete" and size <= part.stat().st_size < len(model)

        hub.bytes_per_second = None
        fetched = part.stat().st_size
        done = tandem("pull", "user/repo", env=env)
        assert done.returncode == 0 and Path(done.stdout.strip()).read_bytes() == model
        assert (fetched, len(model) - fetched) in hub.sent["model-Q4_0.gguf"]


def wait_for_bytes(folder: Path) -> int:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if sizes := [size for path in folder.glob("*.incomplete") if (size := path.stat().st_size)]:
            return sizes[0]
        time.sleep(0.01)
    raise AssertionError("nothing was fetched")


def test_while_pip_fetches_a_package(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # an index that takes calls and says nothing
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        env = environment(tmp_path, PIP_INDEX_URL=index, PIP_CONFIG_FILE=os.devnull, PIP_RETRIES="0")
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
            env.pop(name, None)
        process = start("pull", "smollm2", env=env)
        silent.settimeout(PATIENCE)
        call, _ = silent.accept()
        interrupt(process)
        call.settimeout(PATIENCE)
        while call.recv(4096):  # ends when pip is gone
            pass
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.name.startswith(".pull")] == []

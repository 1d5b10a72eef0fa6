"""What was acknowledged is not lost: saved states survive kill -9 and a full disk (docs/FAILURES.md)."""

from __future__ import annotations

import os
import random
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tandem import LLM
from tandem.devices.tuned_choices import Choices, read_choices, write_choices
from tandem.devices.vulkan.pipelines import Pipelines
from tandem.errors import StateFileError
from tests.cli.tiny_model import write_tiny_model
from tests.models.test_reference import GOLDENS
from tests.server.servers import PATIENCE, wait_until

PROMPT = list(range(3, 40))
SAVE_FOR_EVER = """
import sys
from tandem import LLM

llm = LLM(sys.argv[1], device="cpu", threads=1, context=64)
while True:
    print(llm.save(list(range(3, 40)), sys.argv[2]), flush=True)
"""


def open_llm() -> LLM:
    return LLM(GOLDENS / "llama.gguf", device="cpu", threads=1, context=64)


@pytest.mark.parametrize("kills", [3, pytest.param(500, marks=pytest.mark.soak)])
def test_a_saved_state_survives_kill_9(kills: int, tmp_path: Path) -> None:
    state, rng = tmp_path / "state", random.Random(5)
    with open_llm() as llm:
        for _ in range(kills):
            command = [sys.executable, "-c", SAVE_FOR_EVER, str(GOLDENS / "llama.gguf"), str(state)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                assert process.stdout and process.stdout.readline() == b"32\n"  # acknowledged
                time.sleep(rng.random() / 20)
                process.kill()
            assert llm.restore(state) == PROMPT[:32]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_no_part_of_a_cache(tmp_path: Path) -> None:
    choices = Choices({"matmul 1": {"tile": 4}})
    write_choices(tmp_path / "choices", choices, {})
    pipelines = Pipelines.__new__(Pipelines)
    pipelines._file, pipelines._known = tmp_path / "cache", 0
    pipelines.cache_data = lambda: bytes(1000)  # type: ignore[method-assign]
    with largest_file(10):
        with pytest.raises(OSError, match="File too large"):
            write_choices(tmp_path / "choices", Choices({}), {})
        pipelines.save()
    assert list(tmp_path.iterdir()) == [tmp_path / "choices"]
    assert read_choices(tmp_path / "choices").by_shape == choices.by_shape


def test_a_full_disk_keeps_the_state_that_was_there(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with open_llm() as llm:
        expected = llm.generate(PROMPT, max_tokens=4).token_ids
        llm.save(PROMPT, state)
        sound = state.read_bytes()
        for room in (0, 100, len(sound) - 1):
            with (
                largest_file(room),
                pytest.raises(StateFileError, match=r"state cannot be written: File too"),
            ):
                llm.save(PROMPT, state)
            assert state.read_bytes() == sound and list(tmp_path.iterdir()) == [state]
        with pytest.raises(StateFileError, match="cannot be written"):
            llm.save(PROMPT, "/dev/full/state")
        assert llm.generate(PROMPT, max_tokens=4).token_ids == expected
        assert llm.restore(state) == PROMPT[:32]


@pytest.mark.parametrize("log", ["2>/dev/full", "2>&-"])
def test_a_log_that_cannot_be_written_stops_no_server(log: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model = write_tiny_model(tmp_path / "tiny.gguf")
    command = shlex.join([sys.executable, "-m", "tandem", "serve", str(model), "--port", str(port)])
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}

    def ready() -> bool:
        assert process.poll() is None
        health = f"http://127.0.0.1:{port}/health"
        with suppress(OSError), urllib.request.urlopen(health, timeout=PATIENCE) as response:
            return bool(response.status == 200)
        return False

    with subprocess.Popen(f"exec {command} {log}", shell=True, env=env) as process:
        try:
            wait_until(ready)
            for _ in range(200):  # lines that fill a buffer
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=PATIENCE).close()
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0

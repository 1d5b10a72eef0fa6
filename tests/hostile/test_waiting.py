"""What would wait for ever is an error at once: a forked child, a callback into its own model, pipes for files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem import LLM
from tandem.devices.tuned_choices import read_choices
from tandem.doctor.caches import is_json, is_pipeline_cache
from tandem.errors import (
    ContextError,
    DeviceError,
    DownloadError,
    ModelFileError,
    ModelNotFoundError,
    RequestError,
    StateFileError,
)
from tandem.gguf.file import GGUF
from tandem.model.catalogue import RemoteFile
from tandem.model.download import fetch_file
from tandem.server.settings import read_api_keys, read_settings_file
from tests.models.test_reference import GOLDENS

PROMPT = list(range(3, 40))


def open_llm(threads: int = 2, **options: Any) -> LLM:
    return LLM(GOLDENS / "llama.gguf", device="cpu", threads=threads, context=64, **options)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raises an error in place of waiting longer."""

    def hangs(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


IN_A_CHILD = """
import asyncio, os, sys, threading, time
from tandem import LLM, AsyncLLM
from tandem.errors import DeviceError

llm = LLM(sys.argv[1], device="cpu", threads=2, context=64)
expected = llm.generate([5, 6, 7], max_tokens=4).token_ids
tokens = llm.stream([5, 6, 7], max_tokens=40)
served = AsyncLLM(sys.argv[1], device="cpu", threads=2, context=64)
next(tokens)
if sys.argv[2] == "busy":  # another thread has the lock of the engine when the process is forked
    holding = threading.Event()
    def hold():
        with llm.driver.locked():
            holding.set()
            time.sleep(1)
    threading.Thread(target=hold).start()
    holding.wait()
child = os.fork()
if child == 0:
    for call in (
        lambda: llm.generate([5, 6, 7], max_tokens=4),
        lambda: next(tokens),
        lambda: llm.embed([5, 6, 7]),
        lambda: asyncio.run(served.generate([5, 6, 7])),
        lambda: asyncio.run(served.embed([5, 6, 7])),
        lambda: llm.restore(sys.argv[1]),
    ):
        try:
            call()
        except DeviceError as error:
            assert "forked: open it in this process" in str(error)
        except Exception as error:
            assert "restore" in str(call.__code__.co_names), error
        else:
            raise AssertionError(call)
    llm.close()
    asyncio.run(served.close())
    with LLM(sys.argv[1], device="cpu", threads=2, context=64) as own:
        assert own.generate([5, 6, 7], max_tokens=4).token_ids == expected
    sys.exit(0)  # frees the copy of the pool
assert os.waitpid(child, 0)[1] == 0
assert asyncio.run(served.generate([5, 6, 7], max_tokens=4)).token_ids == expected
assert llm.generate([5, 6, 7], max_tokens=4).token_ids == expected
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_forked_child_says_so_at_once(state: str) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        IN_A_CHILD,
        str(GOLDENS / "llama.gguf"),
        str(state),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            _, problems = process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, problems


def test_a_callback_cannot_wait_for_its_own_step() -> None:
    with open_llm() as llm:
        raised: list[str] = []

        def processor(tokens: Any, logits: Any) -> Any:
            for call in (
                lambda: llm.generate([1, 2], max_tokens=1),
                lambda: llm.logits([1, 2]),
                lambda: llm.save(PROMPT, "nowhere"),
                llm.close,
            ):
                with pytest.raises(RequestError, match="use another LLM in a callback") as caught:
                    call()
                raised.append(str(caught.value))
            return logits

        with within(20):
            result = llm.generate([5, 6, 7], max_tokens=2, logits_processor=processor)
        assert len(result.token_ids) == 2 and len(raised) == 8
        assert llm.generate([5, 6, 7], max_tokens=2).token_ids


def test_a_closed_model_says_so(tmp_path: Path) -> None:
    llm = open_llm()
    llm.save(PROMPT, tmp_path / "state")
    llm.close()
    llm.close()
    for call in (
        lambda: llm.restore(tmp_path / "state"),
        lambda: llm.save(PROMPT, tmp_path / "state"),
        lambda: llm.generate([1, 2], max_tokens=1),
        lambda: llm.embed([1, 2]),
        lambda: llm.logits([1, 2]),
        lambda: llm.capture([1, 2], llm.intermediates[:1]),
        lambda: next(llm.stream([1, 2])),
    ):
        with pytest.raises(DeviceError, match="closed"):
            call()


@pytest.fixture
def not_files(tmp_path: Path) -> list[Path]:
    """A pipe without a writer, a folder, an endless device, a link to itself, a folder that may not be entered."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return [tmp_path / "pipe", tmp_path / "folder", Path("/dev/zero"), Path("/dev/tty"), tmp_path / "loop"]


def test_pipes_and_devices_are_no_files(not_files: list[Path], tmp_path: Path) -> None:
    with open_llm() as llm, within(30):
        for path in not_files:
            with pytest.raises(StateFileError, match="cannot be read"):
                llm.restore(path)
            with pytest.raises((ModelNotFoundError, ModelFileError)):
                GGUF.open(path)
            with pytest.warns(UserWarning, match="damaged"):
                assert not read_choices(path).by_shape
            assert not is_json(path) and not is_pipeline_cache(path)
            for read in (read_settings_file, read_api_keys):
                with pytest.raises(RequestError, match="cannot be read"):
                    read(path)
        for path in (tmp_path / "folder", tmp_path / "none" / "state"):
            with pytest.raises(StateFileError, match="cannot be written"):
                llm.save(PROMPT, path)
        os.mkfifo(tmp_path / "state.part")  # the former name of an unfinished file
        assert llm.save(PROMPT, tmp_path / "state") == 32
        with open(tmp_path / "huge", "wb") as file:
            file.truncate(1 << 40)
        start = time.monotonic()
        with pytest.raises(ContextError, match="larger than the KV cache"):
            llm.restore(tmp_path / "huge")
        for read in (read_settings_file, read_api_keys):
            with pytest.raises(RequestError, match="larger than 1048576 bytes"):
                read(tmp_path / "huge")
        assert time.monotonic() - start < 1
        assert llm.restore(tmp_path / "state") == PROMPT[:32]
    assert not list(tmp_path.glob("*-*.part"))


def test_a_download_does_not_go_on_into_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf.incomplete")
    file = RemoteFile("model.gguf", 1, "0" * 64)
    with within(5), pytest.raises(DownloadError, match="cannot write to"):
        fetch_file("user/repo", "0" * 40, file, tmp_path / "model.gguf", lambda *_: None)

"""How many of our files a newcomer reads to follow an HTTP chat, found by tracing one."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest

import tandem
from tests.cli.tiny_model import write_tiny_model

SERVER = f"{Path(tandem.__file__).parent}/server/"
MAX_FILES = 10  # to read the path of a chat in one sitting
SECONDS = 60.0  # for the server to start, and for a response


def test_a_chat_passes_ten_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of the server whose functions run, in any thread, from the connection to the end of the
    response: metrics, log and timers too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = write_tiny_model(tmp_path / "tiny.gguf")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:  # `serve` changes its process
        whole, streamed = apart.submit(traced_chats, model).result()
    both = {"openai/chat.py", "http/background.py", "core/prompt.py", "monitoring/metrics.py"}
    for seen in (whole, streamed):
        assert both <= seen and len(seen) <= MAX_FILES, sorted(seen)


def traced_chats(model: Path) -> list[set[str]]:
    """Serves a model with default settings. Returns the files that a whole response passes, and those of a streamed
    one."""
    seen: set[str] = set()
    found: list[set[str]] = []

    def trace(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (path := frame.f_code.co_filename).startswith(SERVER):
            seen.add(path.removeprefix(SERVER))

    threading.setprofile(trace)
    sys.setprofile(trace)  # before the server's imports, so that no thread is missed
    from tandem.engine.model_manager import ModelManager
    from tandem.server.app import create_app
    from tandem.server.http.uvicorn_server import bind_socket, serve
    from tandem.server.settings import ServerSettings

    settings = ServerSettings(port=0, models=("tiny",))
    bound = bind_socket(settings)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"

    def send(path: str, body: object = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=SECONDS) as response:
            return bytes(response.read())

    def ask() -> None:
        try:
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                with suppress(OSError):  # it is not listening, or the model is not loaded
                    send("/health")
                    break
                time.sleep(0.05)
            for stream in (False, True):
                seen.clear()
                messages = [{"role": "user", "content": "Hello"}]
                text = send(
                    "/v1/chat/completions", {"messages": messages, "max_tokens": 40, "stream": stream}
                )
                assert (b"[DONE]" in text) == stream
                time.sleep(0.2)  # what follows: the log, the server's timer
                found.append(set(seen))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    client = threading.Thread(target=ask)
    client.start()
    models = ModelManager({"tiny": model}, device="cpu", threads=1)
    serve(create_app(models, settings), settings, bound)
    client.join()
    return found

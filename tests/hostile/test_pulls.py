"""Downloads that clients ask for: a slow one delays nobody, and a model has one name."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.tiny_model import write_tiny_model
from tests.loopback_hub import LoopbackHub
from tests.server.servers import serving, wait_until

PULLS = 40


@pytest.mark.parametrize("shared", [True, False])
def test_a_client_of_a_shared_server_cannot_unload_a_model(shared: bool, tmp_path: Path) -> None:
    model, keys = write_tiny_model(tmp_path / "tiny.gguf"), tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    options = ("--device", "cpu", "--threads", "1", *(("--api-keys", keys) if shared else ()))
    with serving(tmp_path / "home", model, *options, context=64, shutdown=1) as server:
        for body in ({}, {"prompt": "Hi", "options": {"num_predict": 1}}):
            asked = {"model": "tiny", "stream": False, "keep_alive": 0, **body}
            assert server.ask("/api/generate", asked, authorization="Bearer secret")[0] == 200
            time.sleep(0.2)
            loaded = server.ask("/api/ps", authorization="Bearer secret")[2]["models"]
            assert bool(loaded) == shared, body


def test_slow_downloads_delay_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf")
    repos = {f"user/repo{i}": {"m-Q4_0.gguf": os.urandom(1_000_000)} for i in range(PULLS)}
    with LoopbackHub(repos) as hub:
        hub.bytes_per_second = 1000
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        options = ("--device", "cpu", "--threads", "1")
        with (
            ThreadPoolExecutor(PULLS) as pool,
            serving(tmp_path / "home", model, *options, context=64, shutdown=1) as server,
        ):
            pulls = [
                pool.submit(server.ask, "/api/pull", {"model": f"hf.co/{repo}", "stream": False})
                for repo in repos
            ]
            wait_until(lambda: sum("/cdn/" in request for request in hub.requests) >= 6)
            wait_until(lambda: any(pull.done() for pull in pulls))
            refused = [pull.result()[0] for pull in pulls if pull.done()]
            assert refused and set(refused) == {429}  # too many at a time
            began = time.monotonic()
            assert server.ask("/api/show", {"model": "tiny"})[0] == 200
            assert server.ask("/v1/completions", {"prompt": "Hi", "max_tokens": 1})[0] == 200
            assert time.monotonic() - began < 10
            began = time.monotonic()
            server.process.terminate()
            server.process.wait(30)
            assert time.monotonic() - began < 20
        assert "Traceback" not in server.log.read_text()


def test_all_ways_to_write_a_repository_are_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would take the memory of one more copy."""
    model = write_tiny_model(tmp_path / "tiny.gguf")
    ways = ("User/Repo", "hf.co/User/Repo", "huggingface.co/user/repo", "https://hf.co/User/Repo")
    with LoopbackHub({"User/Repo": {"m-Q4_0.gguf": model.read_bytes()}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        options = ("--device", "cpu", "--threads", "1")
        with serving(tmp_path / "home", model, *options, context=64, shutdown=1) as server:
            for way in ways:
                assert server.ask("/api/pull", {"model": way, "stream": False})[0] == 200
                assert server.ask("/api/generate", {"model": way, "prompt": "Hi", "stream": False})[0] == 200
            assert [one["model"] for one in server.ask("/api/tags")[2]["models"]] == ["tiny", "User/Repo"]
            assert len(server.ask("/api/ps")[2]["models"]) == 2
            assert server.ask("/api/pull", {"model": "ｓmollm２", "stream": False})[0] == 400
            failed = server.ask("/api/pull", {"model": "user/missing"})[2]
            assert '"error":"' in failed and "Traceback" not in server.log.read_text()

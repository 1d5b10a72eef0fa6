"""A model downloaded through the server is served at once; concurrent requests share the download."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ollama
import pytest

from tests.cli.tiny_model import write_tiny_model
from tests.loopback_hub import LoopbackHub
from tests.server.servers import serving


def test_a_model_is_downloaded_once_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf")
    with LoopbackHub({"user/repo": {"other-F32.gguf": model.read_bytes()}}) as hub:
        hub.bytes_per_second = 400_000
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        options = ("--device", "cpu", "--threads", "1")
        with serving(tmp_path / "home", model, *options, context=64, shutdown=2) as server:
            client, names = ollama.Client(host=server.url), ["hf.co/user/repo:F32", "hf.co/user/repo:f32"]
            with ThreadPoolExecutor() as pool:
                pulls = list(pool.map(lambda name: list(client.pull(name, stream=True)), names * 2))
            for statuses in pulls:
                assert statuses[0].status == "pulling manifest" and statuses[-1].status == "success"
            assert any(status.completed and status.total for statuses in pulls for status in statuses)
            assert sum("/cdn/" in request for request in hub.requests) == 1
            for name in (*names, f"{names[0]}:latest"):  # one model, in whatever case it is written
                answer = client.chat(name, [{"role": "user", "content": "Hi"}], options={"num_predict": 3})
                assert answer.eval_count == 3
            for name in names:
                assert (
                    server.ask("/v1/completions", {"model": name, "prompt": "Hi", "max_tokens": 1})[0] == 200
                )
                assert server.ask(f"/v1/models/{name}")[0] == 200
            assert [str(listed.model).lower() for listed in client.list().models] == ["tiny", names[1]]
            with pytest.raises(ollama.ResponseError, match="no/where") as missing:
                client.pull("hf.co/no/where")
            assert missing.value.status_code in (404, 502)

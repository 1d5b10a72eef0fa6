"""/health, /metrics, /tokenize, errors and model selection."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.server.http import errors
from tests.cli.tiny_model import write_tiny_model
from tests.packages import model_path
from tests.server.servers import PATIENCE, Running, serving, wait_until


def numbers(server: Running) -> dict[str, float]:
    """The samples of /metrics, summed over labels."""
    found: dict[str, float] = {}
    for line in server.ask("/metrics")[2].splitlines():
        if match := re.fullmatch(r"(\w+)(?:\{.*\})? (\S+)", line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def test_metrics_count_what_happens(smollm2: Running) -> None:
    ask = smollm2.chat("Tell me about rivers, " * 20, max_tokens=10, ignore_eos=True)
    smollm2.ask("/v1/chat/completions", ask)
    before = numbers(smollm2)
    usage = smollm2.ask("/v1/chat/completions", ask)[2]["usage"]
    smollm2.wait_idle()
    after = numbers(smollm2)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert usage["completion_tokens"] == grown["tandem_completion_tokens_total"] == 10
    assert usage["prompt_tokens"] == grown["tandem_prompt_tokens_total"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached == grown["tandem_prompt_tokens_cached_total"] < usage["prompt_tokens"]
    assert grown["tandem_requests_total"] == grown["tandem_time_to_first_token_seconds_count"] == 1
    assert grown["tandem_inter_token_latency_seconds_count"] == 9 and grown["tandem_steps_total"] >= 10
    assert after["tandem_requests_running"] == after["tandem_requests_waiting"] == 0
    assert after["tandem_kv_blocks"] > 0 and after["tandem_device_memory_bytes"] > 90e6


def test_tokens_there_and_back(smollm2: Running) -> None:
    text = "Grüße, 世界 \U0001f600 <|im_end|>"
    found = smollm2.ask("/tokenize", {"prompt": text})[2]
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 2048
    assert smollm2.ask("/detokenize", {"tokens": found["tokens"]})[2]["prompt"] == text
    plain = smollm2.ask("/tokenize", {"content": text, "parse_special": False})[2]["tokens"]
    assert len(plain) > len(found["tokens"])
    chat = smollm2.ask("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})[2]["tokens"]
    assert "user\nHi<|im_end|>" in smollm2.ask("/detokenize", {"tokens": chat})[2]["content"]
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}
    called = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    tokens = smollm2.ask("/tokenize", {"messages": called})[2]["tokens"]
    assert '"arguments": {"x": 3}' in smollm2.ask("/detokenize", {"tokens": tokens})[2]["content"]


def test_a_model_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    """If it is the only model, the server exits with the error; otherwise /health and requests report it."""
    whole = model_path("smollm2").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    tiny = write_tiny_model(tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", "tandem", "serve", "--port", "0", str(tmp_path / "cut.gguf")]
    env = {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    alone = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert alone.returncode == 1 and "Traceback" not in alone.stderr
    assert alone.stderr.splitlines()[-1].startswith(f"tandem: {tmp_path / 'cut.gguf'}: ")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, str(tiny)], stderr=log, env=env)
    try:
        wait_until(lambda: b"listening at" in (tmp_path / "log").read_bytes())
        match = re.search(r"http://\S+", (tmp_path / "log").read_text())
        assert match
        server = Running(process, match[0], tmp_path / "log", {})
        wait_until(lambda: server.ask("/health")[2]["status"] == "failed")
        status, _, body = server.ask("/health")
        assert status == 503 and "cut.gguf" in body["message"]
        status, headers, body = server.ask("/v1/chat/completions", server.chat())
        assert status == 503 and body["error"]["code"] == "model_file" and headers["Retry-After"]
        assert server.ask("/v1/chat/completions", server.chat(model="tiny", max_tokens=2))[0] == 200
        assert server.ask("/api/tags")[0] == 200
        assert "Traceback" not in (tmp_path / "log").read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)


def test_timeouts_and_pulls_of_a_server_with_keys(tmp_path: Path) -> None:
    """A timeout ends with an error in the API's format; a pull is rejected."""
    (tmp_path / "keys").write_text("secret")
    model, home = write_tiny_model(tmp_path / "tiny.gguf"), tmp_path / "home"
    options: Any = {"timeout": 0.3, "shutdown": 2, "context": 50_000, "api_keys": str(tmp_path / "keys")}
    with serving(home, model, "--device", "cpu", "--threads", "1", **options) as server:
        key = {"authorization": "Bearer secret"}
        chat = "/v1/chat/completions"
        status, _, body = server.ask(chat, server.chat(), **key)
        assert (
            status == 408
            and body["error"]["code"] == "timeout"
            and "timed out after 0.3 s" in body["error"]["message"]
        )

        def begun(path: str, body: Any) -> str:
            """A stream that started in time: on a busy machine not every one does."""
            answers: list[Any] = []
            wait_until(lambda: answers.append(server.ask(path, body, **key)) or answers[-1][0] == 200)
            return str(answers[-1][2])

        text = begun(chat, server.chat(stream=True))
        last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
        assert last["error"]["code"] == "timeout" and "[DONE]" not in text
        text = begun("/v1/messages", server.chat(stream=True, max_tokens=40_000, model="tiny"))
        assert text.strip().splitlines()[-2] == "event: error" and '"type":"error"' in text
        text = begun("/api/chat", {"model": "tiny", "messages": server.chat()["messages"]})
        assert "timed out after 0.3 s" in json.loads(text.strip().splitlines()[-1])["error"]
        status, _, body = server.ask("/api/pull", {"model": "smollm2"}, **key)
        assert status == 403 and "operator" in body["error"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_rejections_have_the_error_body_of_their_api(
    tmp_path: Path, path: str, request: pytest.FixtureRequest
) -> None:
    """Also of rejections before a request is parsed."""
    tiny: Running = request.getfixturevalue("tiny")
    status, _, body = tiny.ask(path, {}, origin="http://elsewhere.example")
    assert status == 403
    if path == "/api/chat":
        assert "origins" in body["error"]
    else:
        assert "origins" in body["error"]["message"] and body["error"]["type"] == "permission_error"
    assert (body.get("type") == "error") == (path == "/v1/messages")


@pytest.mark.parametrize(
    ("path", "begin", "end", "error"),
    [
        ("/v1/chat/completions", "data: ", "\n\n",
         {"message": "no {}", "type": "server_error", "param": None, "code": "lost"}),
        ("/v1/messages", "event: error\ndata: ", "\n\n", {"type": "overloaded_error", "message": "no {}"}),
        ("/api/chat", "", "\n", "no {}"),
    ],
)  # fmt: skip
def test_a_stream_that_fails_ends_in_the_format_of_its_api(
    path: str, begin: str, end: str, error: Any
) -> None:
    text = errors.stream_error(path, 503, "no {}", "lost")
    assert text.startswith(begin) and text.endswith(end) and text.strip().count("\n") == begin.count("\n")
    assert json.loads(text[len(begin) :])["error"] == error


def test_models_are_chosen_by_name(tmp_path: Path) -> None:
    first, second = (
        write_tiny_model(tmp_path / f"{name}.gguf", context=size) for name, size in (("a", 64), ("b", 99))
    )
    with serving(tmp_path / "home", first, second, "--device", "cpu", "--threads", "1", shutdown=2) as server:
        assert [model["id"] for model in server.ask("/v1/models")[2]["data"]] == ["a", "b"]
        lengths = [
            server.ask("/tokenize", {"prompt": "x", **more})[2]["max_model_len"]
            for more in ({}, {"model": "b"})
        ]
        assert lengths == [64, 99]
        assert server.ask("/tokenize", {"prompt": "x", "model": "c"})[0] == 404

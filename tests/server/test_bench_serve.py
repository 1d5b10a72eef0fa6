"""`tandem bench serve` on our own server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem import cli
from tandem.bench.load_generator import ServeResult, ServeRow
from tests.server.servers import Running, serving


def test_our_own_server(tiny: Running, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "serve", tiny.url, "--rate", "20,40", "--requests", "6", "-p", "8", "-n", "8"]
    assert cli.main([*arguments, "--json"]) == 0
    data: ServeResult = json.loads(capsys.readouterr().out)
    assert data.keys() == ServeResult.__annotations__.keys()
    few = "with 6 requests p99 is about the slowest one: use more, such as --requests 200"
    assert data["notes"] == [few], "nothing else: it knows all that is asked"
    assert [row["rate"] for row in data["rows"]] == [20, 40]
    for row in data["rows"]:
        assert row.keys() == ServeRow.__annotations__.keys()
        assert row["answered"] == 6 and not row["errors"] and row["prompt_tokens"] > 6 * 4
        assert 6 * 4 <= row["tokens"] <= 6 * 12, "as many as were asked for, whatever the model would say"
        assert row["ttft"] and row["whole"] and 0 < row["ttft"]["p50"] <= row["whole"]["p50"] < 20
    assert cli.main([*arguments, "--model", "unheard-of"]) == 1
    assert "unheard-of" in capsys.readouterr().err


def test_clients(tiny: Running, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "serve", tiny.url, "--clients", "1,3", "--requests", "6", "-p", "8", "-n", "8"]
    assert cli.main(arguments) == 0
    output = capsys.readouterr().out
    assert "1 client " in output and "3 clients " in output and "6 of 6" in output
    assert cli.main([*arguments, "--json"]) == 0
    data: ServeResult = json.loads(capsys.readouterr().out)
    for clients, row in zip([1, 3], data["rows"], strict=True):
        assert (row["clients"], row["rate"], row["answered"]) == (clients, 0.0, 6)
        assert 6 * 4 <= row["tokens"] <= 6 * 12 and row["tokens_per_s"] > 0


def test_a_synthetic_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shape with random weights is served like a file, and the server says what it is."""
    name = "smollm2-135m:q4_0"
    with serving(tmp_path, "--synthetic", name, "--device", "cpu", "--kv-memory", "0.2", batch=2) as server:
        assert f"{name} has random weights" in server.log.read_text()
        assert server.ask("/v1/models")[2]["data"][0]["id"] == name
        arguments = ["bench", "serve", server.url, "--rate", "20", "--requests", "2", "-p", "4", "-n", "4"]
        assert cli.main([*arguments, "--json"]) == 0
        data: ServeResult = json.loads(capsys.readouterr().out)
        assert data["model"] == name and data["rows"][0]["answered"] == 2


@pytest.mark.fast
@pytest.mark.parametrize("more", [["smollm2"], ["--ray", "2"]])
def test_a_synthetic_model_is_served_alone(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--synthetic", "smollm2-135m:q4_0", *more]) == 2
    assert "leave MODEL, --ray and presets out" in capsys.readouterr().err

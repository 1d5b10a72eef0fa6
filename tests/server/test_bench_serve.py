"""`tandem bench serve` on our own server."""

from __future__ import annotations

import json

import pytest

from tandem import cli
from tandem.bench.load_generator import ServeResult, ServeRow
from tests.server.servers import Running


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

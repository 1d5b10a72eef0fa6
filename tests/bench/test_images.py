"""`tandem bench --images`: times until an image is encoded and until the first token, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tandem.cli import main
from tests.models.test_vision import GOLDENS

pytestmark = pytest.mark.fast
COMMAND = ["bench", "--device", "cpu", "--no-tune", "-p", "8", "-n", "0", "-r", "2"]


@pytest.mark.parametrize(("name", "tokens"), [("gemma3", 4), ("qwen25vl", 64)])
def test_images(name: str, tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--images", "64", "--json", str(GOLDENS / f"{name}.gguf")]) == 0
    [row] = json.loads(capsys.readouterr().out)["images"]
    assert (row["side"], row["tokens"], len(row["seconds"])) == (64, tokens, 2)
    assert 0 < row["encoding"] <= row["ttft"] <= max(row["seconds"])
    assert main([*COMMAND, "--images", "64", str(GOLDENS / f"{name}.gguf")]) == 0
    assert "64 x 64" in capsys.readouterr().out


def test_what_has_no_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--images", "64", "--synthetic", "gemma-3-1b"]) != 0
    assert "needs a file" in capsys.readouterr().err
    assert main([*COMMAND, "--images", "64", str(GOLDENS.parent / "qwen3.gguf")]) != 0
    assert "mmproj" in capsys.readouterr().err

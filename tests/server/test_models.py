"""Several models on one server: each with its own draft model and at most its trained context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.cli import serve
from tandem.cli.commands import parse
from tandem.errors import RequestError
from tests.cli.tiny_model import write_tiny_model
from tests.server.servers import serving

CHAT = "/v1/chat/completions"


@pytest.mark.fast
def test_a_draft_belongs_to_one_model(tmp_path: Path) -> None:
    tiny, other = (write_tiny_model(tmp_path / f"{name}.gguf") for name in ("tiny", "other"))
    files = {"tiny": tiny, "other": other}
    assert parse(["serve", str(tiny), "--draft", "a", "--draft", "b=c"]).draft == ["a", "b=c"]
    assert serve._per_model_options({"tiny": tiny}, [str(other)], None) == {"tiny": {"draft": other}}
    assert serve._per_model_options(files, [f"other={tiny}"], None) == {"other": {"draft": tiny}}
    with pytest.raises(RequestError, match="--draft tiny="):
        serve._per_model_options(files, [str(other)], None)


@pytest.mark.fast
def test_a_draft_of_another_vocabulary_is_refused_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    tiny = write_tiny_model(tmp_path / "tiny.gguf")
    monkeypatch.setattr("tests.cli.tiny_model.byte_letters", lambda: [f"token {i}" for i in range(256)])
    strange = write_tiny_model(tmp_path / "strange.gguf")
    with pytest.raises(RequestError, match="another vocabulary"):
        serve._per_model_options({"tiny": tiny}, [str(strange)], None)


def test_each_model_has_its_own(tmp_path: Path) -> None:
    """A context above a model's trained one is reduced for it; only one model has a draft model."""
    names = {"long": 100_000, "short": 64, "small": 100_000}
    long, short, small = (write_tiny_model(tmp_path / f"{n}.gguf", context=c) for n, c in names.items())
    with serving(tmp_path, long, short, "--draft", f"long={small}", context=5000, batch=2) as server:
        for name in ("long", "short"):
            assert server.ask(CHAT, server.chat(model=name, max_tokens=8))[0] == 200
        models = server.ask("/live")[2]["models"]
        assert (models["long"]["context"], models["short"]["context"]) == (5000, 64)
        assert models["long"]["speculation"] and models["short"]["speculation"] is None

"""Several models on one server: each with its own draft model and at most its trained context."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import serve
from tandem.cli.commands import parse
from tandem.errors import DownloadError, ModelFileError, ModelNotFoundError, RequestError
from tandem.server.http.errors import message_of
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


@pytest.mark.parametrize("kind", ["deleted", "pipe", "folder", "loop"])
def test_a_missing_file_hides_no_other_model(kind: str, tmp_path: Path) -> None:
    """It is not listed while it is missing, its requests say which file, and no answer shows a folder."""
    folder = tmp_path / "some models"
    folder.mkdir()
    first, second = (write_tiny_model(folder / f"{name}.gguf") for name in ("first", "second"))
    with serving(tmp_path, first, second, "--device", "cpu", context=64, shutdown=1) as server:
        second.unlink()
        if kind == "pipe":
            os.mkfifo(second)
        elif kind == "folder":
            second.mkdir()
        elif kind == "loop":
            second.symlink_to(second)
        status, _, listed = server.ask("/api/tags")
        assert status == 200 and [model["name"] for model in listed["models"]] == ["first"]
        assert len(server.ask("/v1/models")[2]["data"]) == 2
        for path, body in (
            (CHAT, server.chat(model="second")),
            ("/api/show", {"model": "second"}),
            ("/api/chat", {"model": "second", "messages": []}),
            ("/tokenize", {"model": "second", "content": "a"}),
        ):
            status, _, answer = server.ask(path, body)
            assert status == 404 and "second.gguf" in str(answer), answer
            assert str(folder) not in str(answer), answer
        first.unlink()
        status, _, listed = server.ask("/api/ps")
        assert status == 200 and [model["name"] for model in listed["models"]] == ["first"]
        assert server.ask(CHAT, server.chat(model="first", max_tokens=1))[0] == 200


@pytest.mark.fast
def test_messages_for_clients_show_no_folders() -> None:
    for error, shown in (
        (ModelFileError("/a b/c.d/tiny.gguf", "magic", 0, "no"), "tiny.gguf: magic at byte 0: no"),
        (DownloadError("cannot write to /x/hub: set HF_HOME"), "cannot write to hub: set HF_HOME"),
        (DownloadError("https://hub.example/a/b: gone"), "https://hub.example/a/b: gone"),
        (ModelNotFoundError("there is hf.co/user/repo:Q4_0, a/b"), "there is hf.co/user/repo:Q4_0, a/b"),
    ):
        assert message_of(error) == shown

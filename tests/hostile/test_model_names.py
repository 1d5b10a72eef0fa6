"""A model's name never leads to a file that nobody offered, whoever asks: a client, or a manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import ModelNotFoundError
from tandem.model import locate
from tests.cli.tiny_model import write_tiny_model
from tests.server.servers import Running, serving

LONG = "a" * 300
# {folder}: a folder with a GGUF file that is in no cache. {relative}: the file, as the server's folder sees it.
NAMES = [
    *("lmstudio:{folder}", "lmstudio:/", "lmstudio:", "lmstudio:..", "lmstudio:../..", "lmstudio:a/..", "lmstudio:./."),
    *("lmstudio:{folder}:secret", "lmstudio:user/../{folder}", "lmstudio:user", "lmstudio:user/repo/../../..:F32"),
    *("lmstudio:user/repo:{folder}/secret.gguf", "lmstudio:user/repo:../../../secret.gguf", "LMSTUDIO:{folder}"),
    *("ollama:{folder}", "ollama:../..", "ollama:/", "ollama:a:..", "ollama:a:/", "Ollama:{folder}/secret.gguf"),
    *("llama.cpp:{folder}/secret.gguf", "llama.cpp:../secret.gguf", "llama.cpp:..", "llama.cpp:notes.txt"),
    *("{folder}", "{folder}/secret.gguf", "{relative}", "./{relative}", "~/secret.gguf", "~root"),
    *("hf.co/../..", "hf.co/../../secret.gguf", "hf.co/user/..", "hf.co/./.", "HF.CO/../..", "https://hf.co/../.."),
    *("user/repo:../../secret.gguf", "smollm2:../../secret.gguf", "smollm2:{folder}/secret.gguf", "models--a--b/c"),
    *("lmstudio:user/repo\0", "ollama:a\0b", "llama.cpp:a\0.gguf", "user/re\0po", "\0", "hf.co/user/repo:\0", ".."),
    *(f"{LONG}/b", f"hf.co/a/{LONG}", f"lmstudio:{LONG}/b", f"ollama:{LONG}", f"llama.cpp:{LONG}", LONG * 100),
    *("é" * 90 + "/b", ".", "llama.cpp:", "file://{folder}/secret.gguf", "lmstudio:user/\ud800", "ollama:\ud800"),
    *("\ud800/b", "user/repo:\ud800"),
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches of every program, and beside them a model that is in none."""
    home = tmp_path_factory.mktemp("home")
    secret = write_tiny_model(home / "secret.gguf")
    (home / "user").mkdir()
    (home / "user" / "file").symlink_to(secret)  # as a repository, and as a file of the server's folder
    (home / ".lmstudio" / "models" / "user" / "repo").mkdir(parents=True)
    (home / ".cache" / "llama.cpp").mkdir(parents=True)
    (home / ".cache" / "llama.cpp" / "notes.txt").write_bytes(secret.read_bytes())
    manifest = (
        home / ".ollama" / "models" / "manifests" / "registry.ollama.ai" / "library" / "deep" / "latest"
    )
    manifest.parent.mkdir(parents=True)
    manifest.write_text("[" * 200_000)
    outside = home / ".ollama" / "models" / "manifests" / "registry.ollama.ai" / "library" / "out" / "latest"
    outside.parent.mkdir()
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../../secret.gguf"}
    outside.write_text(json.dumps({"layers": [layer]}))
    return home


def environment(home: Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "HF_HUB_CACHE": str(home / ".cache" / "hub"),
        "OLLAMA_MODELS": str(home / ".ollama" / "models"),
        "LLAMA_CACHE": str(home / ".cache" / "llama.cpp"),
        "HF_ENDPOINT": "http://127.0.0.1:9",  # where nobody listens
    }


def names_in(home: Path) -> list[str]:
    return [name.replace("{folder}", str(home)).replace("{relative}", "user/file") for name in NAMES]


@pytest.mark.fast
def test_no_name_leads_out_of_a_programs_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are for the operator: what is left of the names are typed errors, without a walk over the disk."""
    for name, value in environment(home).items():
        monkeypatch.setenv(name, value)
    walk = Path.rglob

    def in_a_cache(folder: Path, pattern: str) -> Iterator[Path]:
        assert folder.resolve().is_relative_to(home) and folder.resolve() != home, f"{folder} is walked"
        return iter(walk(folder, pattern))

    monkeypatch.setattr(Path, "rglob", in_a_cache)
    for name in [*names_in(home), "ollama:deep", "ollama:out"]:
        if not os.path.isfile(os.path.expanduser(name)):  # a path that the operator names
            with pytest.raises(ModelNotFoundError):
                locate.resolve(name)
            with pytest.raises(ModelNotFoundError):
                locate.find(name)


@pytest.fixture(scope="module")
def server(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(home).items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.getcwd())
        patch.chdir(home)
        model = write_tiny_model(tmp_path_factory.mktemp("served") / "tiny.gguf")
        options = ("--device", "cpu", "--threads", "1")
        with serving(home / "server", model, *options, context=64, shutdown=2) as running:
            yield running


def test_a_client_cannot_pull_a_path(home: Path, server: Running) -> None:
    """Nothing is registered, nothing of the disk is in the answer, and no answer is a failure of the server."""
    for name in [*names_in(home), "user/file", "ollama:deep", "ollama:out"]:
        for field in ("model", "name"):
            status, _, body = server.ask("/api/pull", {field: name, "stream": False})
            assert status in (400, 404, 502), (name, status, body)
            assert "directory" not in str(body) or name in (".", ".."), (name, body)
    assert [listed["model"] for listed in server.ask("/api/tags")[2]["models"]] == ["tiny"]


def test_no_other_route_takes_a_path_for_a_model(home: Path, server: Running) -> None:
    message = [{"role": "user", "content": "Hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": message, "max_tokens": 1},
        "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
        "/v1/embeddings": {"input": "Hi"},
        "/v1/messages": {"messages": message, "max_tokens": 1},
        "/api/chat": {"messages": message, "stream": False},
        "/api/generate": {"prompt": "Hi", "stream": False},
        "/api/embed": {"input": "Hi"},
        "/api/show": {},
        "/tokenize": {"text": "Hi"},
    }
    for path, body in bodies.items():
        for name in (
            f"{home}/secret.gguf",
            "user/file",
            f"lmstudio:{home}",
            "../secret.gguf",
            "\0",
            "hf.co/../..",
        ):
            status, _, answer = server.ask(path, {**body, "model": name})
            assert status in (400, 404), (path, name, status, answer)
    for path in ("/api/delete", "/api/push", "/api/blobs/sha256:../../x"):  # the first only deletes
        status, _, _ = server.ask(path, {"model": "tiny", "name": f"{home}/x"})
        assert status in (404, 405), path
    assert server.ask("/api/create", {"model": "x", "from": f"{home}/secret.gguf"})[0] in (400, 404)
    assert server.ask("/api/create", {"model": "x", "modelfile": f"FROM {home}/secret.gguf"})[0] in (400, 404)
    for name in (f"{home}/secret.gguf", "../secret.gguf", "\0"):
        assert server.ask("/api/copy", {"source": name, "destination": "x"})[0] in (400, 404)

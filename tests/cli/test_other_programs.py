"""Models of Ollama, LM Studio and llama.cpp are found where those programs keep them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tandem.errors import ModelNotFoundError
from tandem.model import locate

pytestmark = pytest.mark.fast


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def put(path: Path, content: bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def pulled(folder: Path, manifest: str, content: bytes) -> Path:
    """As `ollama pull` leaves it."""
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "0" * 64, "size": 1},
        {"mediaType": "application/vnd.ollama.image.model", "digest": digest, "size": len(content)},
    ]
    put(folder / "manifests" / manifest, json.dumps({"schemaVersion": 2, "layers": layers}).encode())
    return put(folder / "blobs" / digest.replace(":", "-"), content)


def test_ollama(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = home / ".ollama" / "models"
    latest = pulled(store, "registry.ollama.ai/library/llama3.2/latest", b"GGUF latest")
    small = pulled(store, "registry.ollama.ai/library/llama3.2/1b", b"GGUF small")
    theirs = pulled(store, "registry.ollama.ai/somebody/model/q8", b"GGUF theirs")
    hub = pulled(store, "hf.co/user/repo/Q4_0", b"GGUF hub")
    names = {
        "ollama:llama3.2": latest,
        "ollama:llama3.2:latest": latest,
        "ollama:llama3.2:1b": small,
        "ollama:somebody/model:q8": theirs,
        "ollama:hf.co/user/repo:Q4_0": hub,
    }
    assert {name: locate.resolve(name) for name in names} == names
    shown = {model.name: model.files[0] for model in locate.list_models()}
    assert shown == {name: path for name, path in names.items() if name != "ollama:llama3.2"}
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "moved"))
    with pytest.raises(ModelNotFoundError, match=r"there is no ollama:llama3\.2"):
        locate.resolve("ollama:llama3.2")
    store.rename(home / "moved")
    assert locate.resolve("ollama:llama3.2").read_bytes() == b"GGUF latest"


def test_a_damaged_or_hostile_manifest_names_nothing(home: Path) -> None:
    store = home / ".ollama" / "models"
    secret = put(home / "secret.gguf")
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:../../../../{secret.name}"}
    for i, text in enumerate(("", "{", "[]", '{"layers": 3}', json.dumps({"layers": [layer]}))):
        put(store / "manifests" / "registry.ollama.ai" / "library" / f"bad{i}" / "latest", text.encode())
    assert locate.list_models() == []
    for name in (
        "ollama:bad0",
        "ollama:bad4",
        "ollama:../../../../secret.gguf",
        "ollama:a:../../b",
        "ollama:",
    ):
        with pytest.raises(ModelNotFoundError):
            locate.resolve(name)


def test_lm_studio(home: Path) -> None:
    q4 = put(home / ".lmstudio" / "models" / "user" / "repo-GGUF" / "model-Q4_K_M.gguf")
    q8 = put(home / ".lmstudio" / "models" / "user" / "repo-GGUF" / "model-Q8_0.gguf")
    old = put(home / ".cache" / "lm-studio" / "models" / "user" / "other" / "other.gguf")
    put(home / ".lmstudio" / "models" / "user" / "repo-GGUF" / "mmproj-model-f16.gguf")
    names = {
        "lmstudio:user/repo-GGUF:Q4_K_M": q4,
        "lmstudio:user/repo-GGUF:Q8_0": q8,
        "lmstudio:user/other:other.gguf": old,
    }
    assert {model.name: model.files[0] for model in locate.list_models()} == names
    assert {name: locate.resolve(name) for name in names} == names
    assert locate.resolve("hf.co/user/repo-GGUF") == q4  # instead of a download
    assert locate.resolve("user/repo-GGUF:q8_0") == q8


def test_llama_cpp(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(home / ".cache" / "llama.cpp" / "ggml-org_gemma-3-4b-it-GGUF_gemma-3-4b-it-Q4_K_M.gguf")
    [shown] = locate.list_models()
    assert shown.name == f"llama.cpp:{path.name}" and locate.resolve(shown.name) == path
    assert locate.resolve("hf.co/ggml-org/gemma-3-4b-it-GGUF:Q4_K_M") == path
    monkeypatch.setenv("LLAMA_CACHE", str(home / "empty"))
    with pytest.raises(ModelNotFoundError):
        locate.resolve(shown.name)


def test_they_are_not_ours_to_delete(home: Path) -> None:
    path = put(home / ".lmstudio" / "models" / "user" / "repo" / "model-Q4_0.gguf")
    with pytest.raises(ModelNotFoundError, match="delete it there"):
        locate.find("lmstudio:user/repo:Q4_0")
    assert path.exists()

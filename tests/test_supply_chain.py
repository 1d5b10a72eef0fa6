"""What is installed, shipped and downloaded is what was tested: locks, an SBOM, pinned models, data with an origin."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tandem.errors import DownloadError
from tandem.model import download, locate
from tandem.model.catalogue import MIRRORS, PACKAGES, PINS, SHORT_NAMES, Pin
from tests.loopback_hub import COMMIT, LoopbackHub
from tests.packages import MODELS
from tests.page_packages import LICENSES, VENDOR, wanted_files

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ("build", "run", "dev", "lm-eval")
# Package -> versions (several: by their markers), hashes.
Locked = dict[str, list[tuple[Requirement, list[str]]]]


def locked(name: str) -> Locked:
    found: Locked = {}
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    for entry in re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]:
        lines = [line.strip().removesuffix("\\").strip() for line in entry.splitlines()]
        requirement = Requirement(lines[0])
        hashes = [line.removeprefix("--hash=sha256:") for line in lines[1:] if not line.startswith("#")]
        found.setdefault(canonicalize_name(requirement.name), []).append((requirement, hashes))
    return found


def here(versions: list[tuple[Requirement, list[str]]]) -> str | None:
    """The version for this Python."""
    for requirement, _ in versions:
        if not requirement.marker or requirement.marker.evaluate():
            return next(iter(requirement.specifier)).version
    return None


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_package_has_one_version_and_hashes(name: str) -> None:
    for package, versions in locked(name).items():
        for requirement, hashes in versions:
            [specifier] = requirement.specifier
            assert specifier.operator == "==" and not requirement.url, package
            assert hashes and all(re.fullmatch("[0-9a-f]{64}", digest) for digest in hashes), package
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    assert "://" not in text and "--index-url" not in text  # any registry with these files will do


def test_the_locks_have_what_pyproject_asks_for() -> None:
    """A requirement that was added or raised needs `make lock`."""
    project = PROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    build = PROJECT["build-system"]["requires"]
    wanted = {
        "build": build,
        "run": project["dependencies"],
        "dev": [*project["dependencies"], *extras, *build],
    }
    for name, lines in wanted.items():
        lock = locked(name)
        for requirement in map(Requirement, lines):
            version = here(lock.get(canonicalize_name(requirement.name), []))
            if not requirement.marker or requirement.marker.evaluate():
                assert version and requirement.specifier.contains(version, prereleases=True), requirement
    assert all(next(iter(Requirement(line).specifier)).operator == "==" for line in build)


def test_the_locks_agree() -> None:
    dev = {package: here(versions) for package, versions in locked("dev").items()}
    for name in ("build", "run"):
        assert {package: here(versions) for package, versions in locked(name).items()}.items() <= dev.items()


def test_the_runtime_lock_is_whole() -> None:
    """What the locked packages need is locked, too: pip would refuse to install it otherwise."""
    lock = locked("run")
    for package in lock:
        for requirement in map(Requirement, distribution(package).requires or []):
            if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
                assert canonicalize_name(requirement.name) in lock, f"{package} needs {requirement}"


def test_make_and_the_container_install_from_the_locks_only() -> None:
    def plan(*arguments: str) -> str:
        command = ["make", "--no-print-directory", "-n", "--always-make", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    installs = re.findall(r"^.*pip .*install .*$", plan(".venv/dev-installed"), re.MULTILINE)
    assert len(installs) == 3
    for line in installs:
        if "--editable" in line:
            assert "--no-deps" in line and "--no-build-isolation" in line
        else:
            assert "--require-hashes --only-binary=:all: -r requirements/" in line
    assert "requirements/" not in plan(".venv/dev-installed", "LOCKED=no")

    container = (ROOT / "deploy" / "Containerfile").read_text()
    for line in re.findall(r"pip (?:install|wheel|download) .*", container):
        is_locked = re.search(r"--require-hashes --only-binary=:all: -r \S*requirements/\w+\.lock", line)
        assert is_locked or "--no-deps" in line, line


def test_the_sbom_of_the_wheel(tmp_path: Path) -> None:
    """tests/cli/test_wheel.py finds it in the wheel."""
    library = tmp_path / "libtandem.so"
    library.write_bytes(b"core")
    script = (
        "import json, sys, setup; from pathlib import Path;"
        "print(json.dumps(setup.sbom('tandem-llm', '1.0', Path(sys.argv[1]))))"
    )
    run = [sys.executable, "-c", script, str(library)]
    printed = [subprocess.run(run, cwd=ROOT, capture_output=True, check=True).stdout for _ in range(2)]
    assert printed[0] == printed[1]  # the same sources give the same wheel
    check_sbom(json.loads(printed[0]), hashlib.sha256(b"core").hexdigest())


def check_sbom(bom: dict[str, Any], library_sha256: str) -> None:
    assert bom["bomFormat"] == "CycloneDX" and bom["specVersion"] == "1.6"
    components = {component["name"]: component for component in bom["components"]}
    assert components["libtandem.so"]["hashes"] == [{"alg": "SHA-256", "content": library_sha256}]
    packages = {
        name: c["version"] for name, c in components.items() if c.get("purl", "").startswith("pkg:pypi/")
    }
    assert packages == {name: here(versions) for name, versions in locked("run").items()}
    root = bom["metadata"]["component"]["bom-ref"]
    refs = {root, *(component["bom-ref"] for component in bom["components"])}
    needs = {entry["ref"]: entry["dependsOn"] for entry in bom["dependencies"]}
    reached = {root}
    while more := {ref for known in reached for ref in needs.get(known, [])} - reached:
        reached |= more
    assert reached == refs  # everything is there because something needs it
    direct = {canonicalize_name(Requirement(line).name) for line in PROJECT["project"]["dependencies"]}
    pypi = {ref for ref in needs[root] if ref.startswith("pkg:pypi/")}
    assert {ref.split("/")[1].split("@")[0] for ref in pypi} == direct
    page = tomllib.loads((ROOT / "requirements" / "page.toml").read_text())["package"]
    assert {f"{package['name']} {package['version']}" for package in page} == {
        f"{name} {c['version']}" for name, c in components.items() if c.get("purl", "").startswith("pkg:npm/")
    }


# ---- the web page's libraries


def test_the_page_has_unchanged_files_of_npm_packages() -> None:
    """`requirements/page.toml` has their versions and sums."""
    wanted = wanted_files()
    found = {path.relative_to(VENDOR).as_posix(): path for path in VENDOR.rglob("*") if path.is_file()}
    assert found.keys() - {LICENSES} == wanted.keys()
    assert not [name for name, content in wanted.items() if found[name].read_bytes() != content]
    licences = VENDOR.joinpath(LICENSES).read_text()
    assert not [
        name for name in wanted if name.replace(Path(name).stem, "*") not in licences and name not in licences
    ]


# ---- data in the repository

SOURCE = {
    *(
        ".py",
        ".pyi",
        ".c",
        ".h",
        ".hpp",
        ".cc",
        ".cpp",
        ".slang",
        ".js",
        ".mjs",
        ".css",
        ".html",
        ".md",
        ".in",
    ),
    *(".service", ".yml"),
}
SOURCE_FILES = {
    *(".ci/run", ".gitattributes", ".gitignore", "Makefile", "NOTICE", "deploy/Containerfile"),
    *("deploy/tandem.toml", "pyproject.toml", "tandem/py.typed"),
}


def explained() -> dict[str, str]:
    """Pattern -> origin and licence, of NOTICE."""
    table = (ROOT / "NOTICE").read_text().partition("\n\n")[2].split("\n\n")[1]
    return dict(re.findall(r"^(\S+)  +(\S.*  +\S.*)$", table, re.MULTILINE))


def test_every_data_file_has_an_origin_and_a_licence() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git repository")
    files, patterns = listed.stdout.splitlines(), explained()
    data = [file for file in files if Path(file).suffix not in SOURCE and file not in SOURCE_FILES]
    assert len(data) > 80 and len(patterns) > 10
    unexplained = [file for file in data if not any(fnmatch(file, pattern) for pattern in patterns)]
    assert not unexplained, f"NOTICE does not say where these come from: {unexplained}"
    assert not [pattern for pattern in patterns if not any(fnmatch(file, pattern) for file in files)]
    assert not SOURCE_FILES - {*files}


# ---- short names


def test_short_names_are_pinned() -> None:
    unpinned = {name for name, full in SHORT_NAMES.items() if full.partition(":")[0] not in PACKAGES} - {
        *PINS
    }
    assert unpinned == {"gemma-2-27b"}  # no sum of it was found: its first download counts
    assert PINS.keys() <= SHORT_NAMES.keys()
    for pin in PINS.values():
        assert pin.revision == "main" or re.fullmatch("[0-9a-f]{40}", pin.revision)
        assert pin.sha256 and all(re.fullmatch("[0-9a-f]{64}", sha256) for sha256 in pin.sha256)


def test_pins_agree_with_the_files_that_tests_fetch() -> None:
    """Of these files we have the bytes."""
    for name, pin in PINS.items():
        package = MIRRORS.get(SHORT_NAMES[name].partition(":")[0])
        assert not package or pin.sha256 == (package.file.sha256,)
    fetched = {file.removesuffix("-instruct-q4_k_m.gguf"): sha256 for file, (sha256, _) in MODELS.items()}
    assert PINS["qwen2.5-coder-1.5b"].sha256 == (fetched["qwen2.5-coder-1.5b"],)


GOOD, CHANGED = b"good" * 1000, b"evil" * 1000
REPO, FILE = "bartowski/gemma-2-27b-it-GGUF", "gemma-2-27b-it-Q4_K_M.gguf"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "*")
    with LoopbackHub({REPO: {FILE: GOOD, "gemma-2-27b-it-Q8_0.gguf": GOOD}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def pull(model: str) -> bytes:
    """The model's bytes, fetched anew."""
    path = locate.resolve(model, pull=True)
    content = path.read_bytes()
    locate.remove(locate.find(model))
    return content


def test_a_pinned_name_takes_no_other_file(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(PINS, "gemma-2-27b", Pin(COMMIT, hashlib.sha256(GOOD).hexdigest()))
    assert pull("gemma-2-27b") == pull("Gemma-2-27B:q4_k_m") == GOOD
    assert f"GET /api/models/{REPO}/revision/{COMMIT}" in hub.requests
    assert not list(tmp_path.rglob("refs/main"))  # a commit is no branch: other tools follow that
    hub.repos[REPO][FILE] = CHANGED
    hub.requests.clear()
    with pytest.raises(
        DownloadError, match=rf"is not the file that gemma-2-27b stands for .* hf\.co/{REPO}:Q4_K_M"
    ):
        pull("gemma-2-27b")
    assert len(hub.requests) == 1 and not list(tmp_path.rglob("*.gguf"))
    assert pull(f"hf.co/{REPO}:Q4_K_M") == CHANGED  # who names the repository follows it


def test_a_name_without_a_pin_is_held_to_its_first_download(hub: LoopbackHub, tmp_path: Path) -> None:
    assert pull("gemma-2-27b") == pull("gemma-2-27b:Q8_0") == GOOD
    record = tmp_path / "cache" / "tandem" / "first-downloads"
    assert record.read_text().splitlines()[0] == f"{hashlib.sha256(GOOD).hexdigest()}  {REPO}/{FILE}"
    hub.repos[REPO][FILE] = CHANGED
    with pytest.raises(DownloadError, match="is not the file that gemma-2-27b stands for"):
        pull("gemma-2-27b")
    assert pull("gemma-2-27b:Q8_0") == GOOD and len(record.read_text().splitlines()) == 2
    assert pull(f"hf.co/{REPO}:Q4_K_M") == CHANGED
    with pytest.raises(DownloadError):
        pull("gemma-2-27b")
    record.write_bytes(b"\xff\0 damaged\n\n  \n")  # it is a cache: a pull must not fail for it
    assert pull("gemma-2-27b") == CHANGED


def test_a_pull_works_where_the_first_download_cannot_be_recorded(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a folder")
    assert pull("gemma-2-27b") == GOOD


def test_a_pin_of_a_split_model_needs_all_parts(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {f"gemma-2-27b-it-Q4_K_M-0000{i}-of-00002.gguf": bytes([i]) * 9 for i in (2, 1)}
    hub.repos[REPO] = dict(parts)
    first, second = (hashlib.sha256(bytes([i]) * 9).hexdigest() for i in (1, 2))
    monkeypatch.setattr(download, "RETRY_SECONDS", 0)
    monkeypatch.setitem(PINS, "gemma-2-27b", Pin("main", first, second))
    assert pull("gemma-2-27b") == b"\1" * 9
    monkeypatch.setitem(PINS, "gemma-2-27b", Pin("main", first))
    with pytest.raises(DownloadError, match="stands for"):
        pull("gemma-2-27b")

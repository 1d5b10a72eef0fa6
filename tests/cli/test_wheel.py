"""`make wheel` builds a wheel that installs and runs where there is no compiler, with the packages it asks for."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

from tests.test_supply_chain import check_sbom

ROOT = Path(__file__).parents[2]
# What is needed besides Python files: of each pattern there are some, and all of them are in the wheel.
DATA = (
    "py.typed",
    "*/*.toml",
    "*/page/**/*",
    "native/libtandem.so",
    "devices/vulkan/spirv/*.spv",
    "devices/npu/*.[!p]*",
)


def run(*command: str | Path, cwd: Path = Path("/"), **environment: str) -> str:
    """What a command prints."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "PYTHON", "TANDEM"))}
    done = subprocess.run(
        [*map(str, command)], env=kept | environment, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def required(package: Distribution) -> dict[str, Distribution]:
    """The packages a package needs, and those that they need."""
    found: dict[str, Distribution] = {}
    for requirement in map(Requirement, package.requires or []):
        if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
            needed = distribution(requirement.name)
            found |= {requirement.name: needed, **required(needed)}
    return found


def environment_with(wheel: Path, folder: Path) -> Path:
    """An environment with the wheel in it and, linked from this one, what it declares to need; its programs."""
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel)
    [installed] = Distribution.discover(name="tandem-llm", path=[str(site)])
    for package in required(installed).values():
        for top in {file.parts[0] for file in package.files or [] if file.parts[0] != ".."}:
            if not (site / top).exists():
                (site / top).symlink_to(package.locate_file(top))
    return folder / "bin"


def test_a_wheel_runs_without_a_compiler(tiny: Path, tmp_path: Path) -> None:
    tools = Path(sys.executable).parent  # which stand for those that make would install
    run("make", "--assume-old=.venv/installed", "wheel", f"DIST={tmp_path}", f"BIN={tools}", cwd=ROOT)
    [wheel] = tmp_path.glob("*.whl")
    assert re.fullmatch(r"tandem_llm-[\d.]+-py3-none-\w*linux\w*_x86_64\.whl", wheel.name)
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
        bom = json.loads(archive.read(f"{info}/sboms/tandem-llm.cdx.json"))
        check_sbom(bom, hashlib.sha256(archive.read("tandem/native/libtandem.so")).hexdigest())
        assert archive.read(f"{info}/licenses/NOTICE") == (ROOT / "NOTICE").read_bytes()
    sources = {str(path.relative_to(ROOT)) for path in ROOT.glob("tandem/**/*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    data = {
        str(path.relative_to(ROOT))
        for pattern in DATA
        for path in ROOT.glob(f"tandem/{pattern}")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert len(data) > 40 and data <= names

    bin = environment_with(wheel, tmp_path / "env")
    nothing_else = {"PATH": str(bin), "CC": "/bin/false"}
    where = run(bin / "python", "-c", "import tandem; print(tandem.__file__)", **nothing_else)
    assert Path(where.strip()).is_relative_to(tmp_path)
    assert run(bin / "tandem", "--version", **nothing_else).startswith("tandem ")
    assert run(bin / "tandem", "run", tiny, "hello", "-n", "4", "--device", "cpu", **nothing_else).strip()


def test_an_editable_install_builds(tmp_path: Path) -> None:
    """As `make` installs Tandem."""
    build = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    run(sys.executable, "-c", build, tmp_path, cwd=ROOT)
    [wheel] = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "sboms" in name]

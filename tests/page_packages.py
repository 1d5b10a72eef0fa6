"""The npm packages of the web page (requirements/page.toml). `python -m tests.page_packages` copies their files."""

from __future__ import annotations

import tarfile
import tomllib
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from tests.packages import fetch_npm_package

ROOT = Path(__file__).parents[1]
VENDOR = ROOT / "tandem" / "server" / "page" / "assets" / "vendor"
LICENSES = "LICENSES.txt"


def wanted_files() -> dict[str, bytes]:
    """Path in the vendor folder -> content, of all packages."""
    found: dict[str, bytes] = {}
    for package in tomllib.loads((ROOT / "requirements" / "page.toml").read_text())["package"]:
        archive = fetch_npm_package(package["name"], package["version"], package["integrity"])
        with tarfile.open(archive) as members:
            names = members.getnames()
            for pattern, target in package["files"].items():
                matching = [name for name in names if fnmatch(name, f"package/{pattern}")]
                assert matching, f"{package['name']} has no {pattern}"
                for name in matching:
                    content = members.extractfile(name)
                    assert content
                    path = target + PurePosixPath(name).name if target.endswith("/") else target
                    found[path] = content.read()
    return found


if __name__ == "__main__":
    for path, content in wanted_files().items():
        (VENDOR / path).parent.mkdir(parents=True, exist_ok=True)
        (VENDOR / path).write_bytes(content)

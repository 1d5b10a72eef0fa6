"""Mesa's driver for AMD GPUs on a machine without one: it compiles for any family that RADV_FORCE_FAMILY names.

Debian 12's own (22.3) has no cooperative matrices, so the one of its backports is unpacked beside it, into build/mesa:
the system's stays as it is. Nothing here needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "mesa"
MANIFESTS = "share/vulkan/icd.d/radeon_icd*.json"
PACKAGES = ("mesa-vulkan-drivers", "libdrm-amdgpu1", "libdrm2")
# A Radeon 780M for newer and for older Mesa, each of which dies of the other.
FAMILIES = "phoenix", "gfx1103_r1"


@dataclass(frozen=True)
class Driver:
    manifest: Path
    libraries: Path | None = None  # None: the system's

    def environment(self, family: str) -> dict[str, str]:
        manifest = str(self.manifest)
        found = {**os.environ, "VK_ICD_FILENAMES": manifest, "VK_DRIVER_FILES": manifest, "RADV_FORCE_FAMILY": family,
                 "MESA_SHADER_CACHE_DISABLE": "true"}  # fmt: skip
        return found | ({"LD_LIBRARY_PATH": str(self.libraries)} if self.libraries else {})


def system_driver() -> Driver | None:
    manifest = next((m for root in ("/usr", "/usr/local") for m in Path(root).glob(MANIFESTS)), None)
    return Driver(manifest) if manifest else None


def newer_driver() -> Driver | None:
    """That of Debian 12's backports, fetched once (12 MB); None: not on Debian 12, or it cannot be had."""
    if not next((FOLDER / "usr").glob(MANIFESTS), None) and backports_source():
        partial = FOLDER.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            fetch(partial)
            partial.replace(FOLDER)
        except (OSError, subprocess.SubprocessError):
            return None
    manifest = next((FOLDER / "usr").glob(MANIFESTS), None)
    return Driver(manifest, FOLDER / "usr" / "lib" / "x86_64-linux-gnu") if manifest else None


def backports_source() -> str:
    """A line of sources.list for backports, from where this machine takes Debian 12; "": nowhere."""
    if not shutil.which("apt-get"):
        return ""
    asked = ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)"]
    listed = subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()
    address = next((line.split()[1] for line in listed if line.startswith("bookworm ")), "")
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    return f"deb [signed-by={key}] {address} bookworm-backports main" if address else ""


def fetch(folder: Path) -> None:
    """Packages of backports, checked by apt and unpacked under `folder`, without touching apt's own state."""
    (folder / "lists" / "partial").mkdir(parents=True)
    (folder / "sources.list").write_text(backports_source() + "\n")
    options = {"Dir::Etc::SourceList": folder / "sources.list", "Dir::Etc::SourceParts": "/dev/null",
               "Dir::State::Lists": folder / "lists", "Dir::Cache": folder, "APT::Sandbox::User": "root",
               "Acquire::Languages": "none"}  # fmt: skip
    apt = ["apt-get", "-qq", *(part for name, value in options.items() for part in ("-o", f"{name}={value}"))]
    for command in ([*apt, "update"], [*apt, "download", *PACKAGES]):
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True, timeout=60)
        package.unlink()
    shutil.rmtree(folder / "lists")

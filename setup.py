"""Builds the C core into the package: one plain shared library, no Python.h, so one build serves every Python.

Each kernel source is compiled three times, once per instruction set; which one runs is chosen at load by CPUID.
"""

import hashlib
import json
import os
import re
import subprocess
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools import __version__ as setuptools_version
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
EMULATOR = ROOT / "tandem" / "devices" / "rdna3"
CFLAGS = [
    *("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror=implicit"),
    *("-ffp-contract=off", "-fno-math-errno"),  # the order and rounding of every sum is the source's
]
ISAS = {
    "avx512": [
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
        *("-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mprefer-vector-width=512"),
    ],
    "avx2": ["-mavx2", "-mfma", "-mf16c", "-mbmi2"],
    "plain": [],
}


def compile_core(build: Path, library: Path) -> None:
    """Compiles what is older than its sources and links `library`."""
    cc = os.environ.get("CC", "gcc")
    include = [f"-I{ROOT / 'tandem' / 'kernels'}"]
    headers = max(p.stat().st_mtime for p in (ROOT / "tandem").rglob("*.h"))
    jobs: list[tuple[Path, Path, list[str]]] = []
    for source in sorted((ROOT / "tandem").rglob("*.c")):
        if source.parent.name == "kernels":
            for isa, flags in ISAS.items():
                jobs.append(
                    (source, build / f"{source.stem}_{isa}.o", [*flags, f"-DISA={isa}", f"-DISA_{isa}"])
                )
        else:
            flags = ISAS["avx2"] if source.parent == EMULATOR else []
            jobs.append((source, build / f"{source.stem}.o", flags))
    build.mkdir(parents=True, exist_ok=True)

    def run(job: tuple[Path, Path, list[str]]) -> None:
        source, target, flags = job
        if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime, headers):
            subprocess.run([cc, *CFLAGS, *flags, *include, "-c", str(source), "-o", str(target)], check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, jobs))
    library.parent.mkdir(parents=True, exist_ok=True)
    partial = library.with_suffix(".partial")
    subprocess.run(
        [cc, "-shared", "-o", str(partial), *(str(job[1]) for job in jobs), "-lm", "-lpthread", "-ldl"],
        check=True,
    )
    partial.replace(library)  # a running process keeps the library it has mapped
    write_declarations(library.with_name("_core.py"))


def write_declarations(module: Path) -> None:
    """What cffi makes of launch.h and exports.h, as a module that needs no parser when it is imported."""
    import cffi

    kernels = ROOT / "tandem" / "kernels"
    constants = dict(re.findall(r"^    (\w+) = (\d+),", (kernels / "abi.h").read_text(), re.M))
    headers = (kernels / "launch.h", ROOT / "tandem" / "native" / "exports.h", EMULATOR / "emulator.h")
    text = "".join(header.read_text() for header in headers)
    code = [line.partition("//")[0] for line in text.splitlines() if not line.startswith("#")]
    ffi = cffi.FFI()
    ffi.cdef(re.sub(r"\w+", lambda word: constants.get(word[0], word[0]), "\n".join(code)))
    ffi.set_source("tandem.native._core", None)
    partial = module.with_suffix(".partial")
    ffi.emit_python_code(str(partial))
    partial.replace(module)


def sbom(name: str, version: str, library: Path) -> dict[str, object]:
    """What a wheel contains, and the packages that it is tested with (requirements/run.lock), as CycloneDX.

    It has no date and no random number: the same sources give the same wheel.
    """

    def package(name: str, version: str, **more: object) -> dict[str, object]:
        purl = f"pkg:pypi/{name}@{version}"
        return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, **more}

    def licensed(licence: str) -> dict[str, object]:
        return {"licenses": [{"license": {"id": licence}}]}

    entries = re.split(r"^(?=\w)", (ROOT / "requirements" / "run.lock").read_text(), flags=re.M)[1:]
    pins = dict(re.match(r"([\w.-]+)==([^\s;]+)", entry).groups() for entry in entries)  # type: ignore[union-attr]
    refs = {package: f"pkg:pypi/{package}@{pin}" for package, pin in {**pins, name: version}.items()}
    needs: dict[str, list[str]] = {ref: [] for ref in refs.values()}
    for required, entry in zip(pins, entries, strict=True):
        for by in re.findall(r"^    # (?:via |  )([\w.-]+)(?: \(pyproject\.toml\))?$", entry, re.M):
            needs[refs[by]].append(refs[required])
    sha256 = hashlib.sha256(library.read_bytes()).hexdigest()
    inside = [
        {
            **{"type": "library", "bom-ref": library.name, "name": library.name, "version": version},
            **{"hashes": [{"alg": "SHA-256", "content": sha256}], **licensed("Apache-2.0")},
        },
        {
            **{"type": "data", "bom-ref": "ggml-codebooks", "name": "ggml codebooks", **licensed("MIT")},
            **{"copyright": "The ggml authors", "description": "in tandem/gguf/decode_iq.py; see NOTICE"},
        },
    ]
    for entry in tomllib.loads((ROOT / "requirements" / "page.toml").read_text())["package"]:
        purl = f"pkg:npm/{entry['name'].replace('@', '%40')}@{entry['version']}"
        more = {"purl": purl, "description": "in tandem/server/page/assets/vendor; its LICENSES.txt"}
        component = {"bom-ref": purl, "name": entry["name"], "version": entry["version"], **more}
        inside.append({"type": "library", **component, **licensed(entry["licence"])})
    needs[refs[name]] += [str(component["bom-ref"]) for component in inside]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": package(name, version, **licensed("Apache-2.0")),
            "tools": {"components": [package("setuptools", setuptools_version)]},
        },
        "components": [*inside, *(package(*pin, scope="required") for pin in pins.items())],
        "dependencies": [{"ref": ref, "dependsOn": on} for ref, on in needs.items()],
    }


class BuildWithCore(build_py):
    def run(self) -> None:
        super().run()
        package = ROOT if self.editable_mode else Path(self.build_lib)
        compile_core(ROOT / "build" / "core", package / "tandem" / "native" / "libtandem.so")


class AnyPythonWheel(bdist_wheel):
    """The library is native but knows no Python: tag py3-none-PLATFORM. With an SBOM."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]

    def write_wheelfile(self, wheelfile_base: str, *arguments: str) -> None:
        super().write_wheelfile(wheelfile_base, *arguments)
        library = Path(self.bdist_dir) / "tandem" / "native" / "libtandem.so"
        if library.exists():  # not in an editable install, which is shipped to nobody
            folder = Path(wheelfile_base) / "sboms"  # where PEP 770 has it
            folder.mkdir()
            bom = sbom(self.distribution.get_name(), self.distribution.get_version(), library)
            (folder / "tandem-llm.cdx.json").write_text(json.dumps(bom, indent=1) + "\n")


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithCore, "bdist_wheel": AnyPythonWheel}, distclass=NativeDistribution)

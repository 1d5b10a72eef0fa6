"""Builds the C core into the package: one plain shared library, no Python.h, so one build serves every Python.

Each kernel source is compiled three times, once per instruction set; which one runs is chosen at load by CPUID.
"""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1 leaves the command to the package `wheel`
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).parent
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
            jobs.append((source, build / f"{source.stem}.o", []))
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
    text = (kernels / "launch.h").read_text() + (ROOT / "tandem" / "native" / "exports.h").read_text()
    code = [line.partition("//")[0] for line in text.splitlines() if not line.startswith("#")]
    ffi = cffi.FFI()
    ffi.cdef(re.sub(r"\w+", lambda word: constants.get(word[0], word[0]), "\n".join(code)))
    ffi.set_source("tandem.native._core", None)
    partial = module.with_suffix(".partial")
    ffi.emit_python_code(str(partial))
    partial.replace(module)


class BuildWithCore(build_py):
    def run(self) -> None:
        super().run()
        package = ROOT if self.editable_mode else Path(self.build_lib)
        compile_core(ROOT / "build" / "core", package / "tandem" / "native" / "libtandem.so")


class AnyPythonWheel(bdist_wheel):
    """The library is native but knows no Python: tag py3-none-PLATFORM."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithCore, "bdist_wheel": AnyPythonWheel}, distclass=NativeDistribution)

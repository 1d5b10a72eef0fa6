"""A pytest plugin: runs tests with KV blocks of another size, as if only tandem/kernels/abi.py had been changed.

    python -m pytest -p tests.other_kv_block tests/engine ...

Python takes the number from abi.py. The C files and the shaders that use it are compiled again, in a temporary folder.
tests/ops/test_kv_block.py and tests/vulkan/test_kv_block.py run a part of the tests so.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tandem.kernels import abi

BLOCK = 2 * abi.KV_BLOCK
abi.KV_BLOCK = BLOCK  # before any other module takes it

import setup  # noqa: E402
from tandem import native  # noqa: E402
from tandem.kernels.generate_abi import FILES, FOLDER  # noqa: E402

USES = re.compile(r'\bKV_BLOCK\b|"kv_layout\.h"|^import attention_\w*common;', re.M)
_folder = tempfile.TemporaryDirectory()
SOURCES = Path(_folder.name)


def copy_sources(pattern: str) -> list[str]:
    """Copies sources of kernels, with the declarations for BLOCK; returns the stems of those that use it."""
    for path in FOLDER.glob(pattern):
        shutil.copy(path, SOURCES)
    for file, text in FILES.items():
        (SOURCES / file).write_text(text())
    return sorted(path.stem for path in SOURCES.glob(pattern) if USES.search(path.read_text()))


@cache
def library() -> tuple[ctypes.CDLL, Sequence[str]]:
    """The kernels whose C files use KV_BLOCK."""
    copy_sources("*.h")
    kernels = copy_sources("*.c")
    objects = []
    for isa in native.ISAS:
        flags = [
            *setup.CFLAGS,
            "-O1",
            "-fvisibility=default",
            *setup.ISAS[isa],
            f"-DISA={isa}",
            f"-DISA_{isa}",
        ]
        for kernel in kernels:
            objects.append(SOURCES / f"{kernel}_{isa}.o")
            subprocess.run(["gcc", *flags, "-c", SOURCES / f"{kernel}.c", "-o", objects[-1]], check=True)
    subprocess.run(["gcc", "-shared", "-o", SOURCES / "kernels.so", *objects, "-lm"], check=True)
    return ctypes.CDLL(str(SOURCES / "kernels.so")), kernels


def kernel(symbol: str, isa: str) -> Any:
    found, kernels = library()
    if symbol not in kernels:
        return built_kernel(symbol, isa)
    address = ctypes.cast(getattr(found, f"{symbol}_{isa}"), ctypes.c_void_p).value
    return native.ffi.cast("kernel_fn *", address)


built_kernel = native.kernel
native.kernel = kernel  # type: ignore[assignment]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compiles the shaders that lavapipe runs, if a test needs one; test_matrices.py compiles the others itself."""
    if not any("vulkan" in item.path.parts for item in session.items):
        return
    from tandem.devices.vulkan import compile_shaders, shader_modules

    uses = copy_sources("*.slang")
    compile_shaders.KERNELS = SOURCES
    shaders = SOURCES / "spirv"
    shutil.copytree(shader_modules.SPIRV, shaders)
    modules = [module for module in compile_shaders.modules() if module in uses]
    for module in modules:
        (shaders / f"{module}.spv").unlink()
    compile_shaders.compile_modules([m for m in modules if m in ("attention", "rope")], shaders)
    shader_modules.SPIRV = shaders

"""The SPIR-V in the repository is what its sources compile to."""

from __future__ import annotations

import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

from tandem.devices.vulkan import compile_shaders
from tandem.devices.vulkan.shader_modules import SPIRV
from tandem.kernels import all_kernels
from tandem.kernels.dispatch_table import DISPATCH_RULES


@pytest.mark.fast
def test_nothing_is_stale() -> None:
    assert not compile_shaders.stale(), "run `make shaders` and commit the result"
    assert set(compile_shaders.modules()) == {path.stem for path in SPIRV.glob("*.spv")}


@pytest.mark.fast
def test_there_are_few_and_small_binaries() -> None:
    """Each change of them stays in the repository's history."""
    sizes = [path.stat().st_size for path in SPIRV.glob("*.spv")]
    assert len(sizes) <= 40 and sum(sizes) <= 4 << 20


@pytest.mark.fast
def test_dispatch_rules_are_those_of_kernels() -> None:
    assert set(DISPATCH_RULES) == set(all_kernels())


def test_compiling_again_gives_the_same_bytes(tmp_path: Path) -> None:
    try:
        if not shutil.which("g++"):
            raise FileNotFoundError("g++")
        compile_shaders.driver()
    except (OSError, subprocess.CalledProcessError) as error:
        message = f"SHADERS ARE NOT COMPILED AGAIN: the compiler cannot be had here ({error})"
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    compile_shaders.compile_modules(compile_shaders.modules(), tmp_path)
    built = {path.name: path.read_bytes() for path in tmp_path.glob("*.spv")}
    kept = {path.name: path.read_bytes() for path in SPIRV.glob("*.spv")}
    assert built.keys() == kept.keys()
    assert not [name for name in kept if built[name] != kept[name]], (
        "run `make shaders` and commit the result"
    )

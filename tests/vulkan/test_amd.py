"""Every shader, compiled for a Radeon 780M that is not here: no spills, and the instructions that make it fast."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from tandem.devices.rdna3.compiler import Job, MachineCode
from tandem.devices.rdna3.emulator import ShaderProgram
from tandem.kernels import all_kernels
from tandem.kernels.dispatch_table import DISPATCH_RULES
from tests.vulkan import amd
from tests.vulkan.amd import Compiled
from tests.vulkan.machines import PHOENIX
from tests.vulkan.mesa import Driver, backports_source, newer_driver, system_driver

VOP3 = 0b110101  # the upper bits of an instruction of two words


@pytest.fixture(scope="module", params=[system_driver, newer_driver], ids=["the system's Mesa", "newer Mesa"])
def compiled(request: pytest.FixtureRequest, lavapipe: str) -> list[Compiled]:
    """By a driver. Lavapipe is in the same package."""
    find: Callable[[], Driver | None] = request.param
    driver = find()
    if driver is None and find is newer_driver and not backports_source():
        pytest.skip("not on Debian 12: the system's Mesa is the only one")
    if driver is None:
        message = "SHADERS ARE NOT COMPILED FOR AMD: install mesa-vulkan-drivers, and let apt reach Debian's backports"
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    return amd.compile_all(driver)[1]


def accepted(compiled: list[Compiled]) -> list[Compiled]:
    """All but those on matrix units, where the driver has none."""
    return [c for c in compiled if "cooperativeMatrix" not in c.error]


def test_every_shader_compiles_and_none_spills(compiled: list[Compiled]) -> None:
    assert not [c.error for c in accepted(compiled) if c.error]
    assert {c.job[0] for c in compiled} >= set(amd.shaders())
    spilled = {c.job: c.spills for c in accepted(compiled) if c.spills}
    assert not spilled, f"registers and bytes that spill: {spilled}"


def test_rdna4_compiles_what_needs_no_matrix_units(lavapipe: str) -> None:
    """A few shaders. Mesa 25.0 has no cooperative matrices there."""
    driver = newer_driver()
    if driver is None:
        pytest.skip("the system's Mesa does not know it")
    jobs: list[amd.Job] = [
        ("matmul_q4_0_t1", (256, 0, 512, 5376), 64), ("matmul_q4_k_rows", (256, 16), 64), ("quantise", (), 64),
        ("matmul_q6_k_shared_rows", (256, 128), 32), ("matmul_q4_0_many", (256,), 32),
    ]  # fmt: skip
    *plain, matrices = amd.compile_all(driver, jobs, ["gfx1200"])[1]
    assert not [c.error for c in plain if c.error] and not sum(c.spills for c in plain)
    assert "cooperativeMatrix" in matrices.error


def test_matmuls_of_few_tokens_use_integer_dot_products(compiled: list[Compiled]) -> None:
    matmuls = [c for c in accepted(compiled) if is_quantised_matmul(c) and not amd.on_matrix_units(c.job[0])]
    assert matmuls
    assert not [c.job for c in matmuls if not c.count(r"\bv_dot4_i32_iu8\b")]


def test_matmuls_load_from_scalar_bases(compiled: list[Compiled]) -> None:
    matmuls = [c for c in accepted(compiled) if is_quantised_matmul(c)]
    assert not [c.job for c in matmuls if c.scalar_loads < 4 * c.vector_loads]


def test_coopmat_matmuls_use_matrix_units(compiled: list[Compiled]) -> None:
    on_units = [c for c in accepted(compiled) if is_quantised_matmul(c) and amd.on_matrix_units(c.job[0])]
    if not on_units:
        pytest.skip("this Mesa has no cooperative matrices: 23.3 and newer do")
    assert not [c.job for c in on_units if not c.count(r"\bv_wmma_f32_16x16x16_f16\b")]


def is_quantised_matmul(c: Compiled) -> bool:
    return c.job[0].startswith(("matmul_q", "matmul_chosen"))


def test_the_emulator_decodes_what_llvm_does(compiled: list[Compiled]) -> None:
    """Every instruction of every pipeline has the same name in both."""
    if len(accepted(compiled)) < len(compiled):
        pytest.skip("machine code of this Mesa is not emulated: it has no cooperative matrices")
    for c in compiled:
        words, names = disassembled(c.assembly)
        code = np.array(words, np.uint32).tobytes()
        program = ShaderProgram(
            MachineCode(Job(*c.job), code, (1, 1, 1), 256, 0, 0, True, 0, 0, None, {}, None)
        )
        decoded = [i.operation.name for i in program.instructions()]
        assert len(decoded) == len(names)
        assert not [pair for pair in zip(decoded, names, strict=True) if pair[1] and pair[0] != pair[1]], (
            c.job
        )


def disassembled(assembly: str) -> tuple[list[int], list[str]]:
    """The words of the code, and the name of each instruction; "" of those that LLVM 15 does not know. It takes the
    second word of such an instruction of two words (VOP3) for another one."""
    words, names = list[int](), list[str]()
    last: tuple[list[int], list[str]] = [], []
    for line in assembly.partition("/* constant data")[0].splitlines():
        text, _, encoding = (part.strip() for part in line.partition(";"))
        repeated = re.match(r"\(then repeated (\d+) times\)", text)
        if repeated:
            words += last[0] * int(repeated[1])
            names += last[1] * int(repeated[1])
        elif encoding:
            parts = [part.split()[0] for part in text.split(" :: ")]  # two of a dual instruction
            short = [re.sub(r"_(e32|e64|dpp)$", "", part).replace("v_dual_", "v_") for part in parts]
            half = last[1] == [""] and len(last[0]) == 1 and last[0][0] >> 26 == VOP3
            last = [int(word, 16) for word in encoding.split()], ["" if n == "(invalid" else n for n in short]
            if half and last[1] == [""]:
                last = last[0], []
            words += last[0]
            names += last[1]
    return words, names


@pytest.mark.fast
def test_the_table_in_the_docs_has_every_kernel() -> None:
    table = amd.DOCUMENT.read_text().partition(amd.BEGIN)[2].partition(amd.END)[0]
    missing = []
    for name, kernel in all_kernels().items():
        case = next(iter(kernel.cases(np.random.default_rng(0))))
        found = DISPATCH_RULES[name](case.scalars, case.counts, PHOENIX)  # None: not on this GPU
        if found and not re.search(rf"^\| {found.shader or name} ", table, re.M):
            missing.append(found.shader or name)
    assert not missing, f"run `python -m tests.vulkan.amd`: {amd.DOCUMENT.name} has no {missing}"

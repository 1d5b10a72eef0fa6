"""Machine code with a fault planted, run on a kernel's cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from tandem.bench.kernel_checks import Mismatch, check_case, check_matmul, run_kernel, runs
from tandem.devices.rdna3.compiler import Job
from tandem.devices.rdna3.device import EmulatedDevice
from tandem.devices.rdna3.emulator import Fault, ShaderProgram
from tandem.devices.vulkan.fuse_launches import SCRATCH
from tandem.kernels import all_kernels
from tandem.kernels.dispatch import COUNTER_BYTES
from tandem.kernels.kernel import Case, Kernel

NOP = 0xBF800000
Words = np.ndarray[tuple[int], np.dtype[np.uint32]]


@cache
def jobs_of(device: EmulatedDevice, name: str) -> dict[Job, tuple[Kernel, list[Case]]]:
    """The pipelines of a kernel, with the cases that run each."""
    kernel, found = all_kernels()[name], {}
    for case in kernel.cases(np.random.default_rng(1)):
        if runs(device, kernel, case):
            run_kernel(device, kernel, case)
            assert device.executed
            found.setdefault(device.executed.program.machine_code.job, (kernel, []))[1].append(case)
    return found


def check(device: EmulatedDevice, kernel: Kernel, case: Case) -> None:
    if kernel.name.startswith("matmul_") and case.counts["tokens"] > 1:
        check_matmul(device, kernel, case)
    else:
        check_case(device, kernel, case)


def with_words(program: ShaderProgram, change: Callable[[Words], None]) -> ShaderProgram:
    words = np.frombuffer(program.machine_code.code, np.uint32).copy()
    change(words)
    return ShaderProgram(replace(program.machine_code, code=words.tobytes()))


def without(program: ShaderProgram, at: int, words: int = 1) -> ShaderProgram:
    """The program with no-ops in place of the instruction at a byte."""

    def remove(code: Words) -> None:
        code[at // 4 : at // 4 + words] = NOP

    return with_words(program, remove)


def outcome(
    device: EmulatedDevice, job: Job, changed: ShaderProgram, kernel: Kernel, cases: list[Case]
) -> str:
    """What the cases find of a changed pipeline: a fault, "wrong result" or ""."""
    kept = device.programs[job]
    device.programs[job] = changed
    try:
        for case in cases:
            check(device, kernel, case)
    except Fault as fault:
        return str(fault)
    except (Mismatch, AssertionError):
        return "wrong result"
    finally:
        device.programs[job] = kept
        device.memory(SCRATCH)[:COUNTER_BYTES] = 0  # as they are between launches that end well
    return ""

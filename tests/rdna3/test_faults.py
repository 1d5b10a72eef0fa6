"""Planted faults: each is named, with its instruction and shader."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tandem.bench.kernel_checks import run_kernel
from tandem.devices.rdna3.device import EmulatedDevice
from tandem.devices.rdna3.emulator import Encoding, Fault
from tandem.kernels import all_kernels
from tests.rdna3.planted import Words, jobs_of, outcome, with_words, without

KERNELS = ("norm", "quantise", "matmul_q4_0", "attention")


def planted(device: EmulatedDevice, name: str, operation: str, but: str = "-", limit: int = 12) -> list[str]:
    """What is found without each instruction of an operation, of a kernel's first pipelines."""
    found = []
    for job, (kernel, cases) in list(jobs_of(device, name).items())[:6]:
        run_kernel(device, kernel, cases[0])
        program = device.programs[job]
        names = ((i, i.operation.name) for i in program.instructions() if i.times)
        executed = [i for i, name in names if name.startswith(operation) and not name.startswith(but)]
        for i in executed[:limit]:
            words = 2 if i.operation.encoding == Encoding.DS else 1
            found.append(outcome(device, job, without(program, i.at, words), kernel, cases[:3]))
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_a_removed_wait_is_named(wave64: EmulatedDevice, name: str) -> None:
    found = planted(wave64, name, "s_waitcnt", but="s_waitcnt_depctr")
    named = [
        text
        for text in found
        if re.search(r": \w+ at 0x\w+ uses a register before s_waitcnt \w+ waits for", text)
    ]
    # Others are for loads of a path that these cases do not take, or that a later wait covers.
    assert len(named) >= 0.4 * len(found), "\n".join(sorted(set(found)))
    assert "wrong result" not in found


@pytest.mark.parametrize("name", ["matmul_q4_0", "attention"])
def test_a_removed_barrier_is_named(wave64: EmulatedDevice, name: str) -> None:
    found = planted(wave64, name, "s_barrier")
    # A wave reads what another has not yet written, or writes what another still reads.
    race = r": ds_\w+ at 0x\w+ races with ds_\w+ at 0x\w+ of wave"
    early = r": \w+ at 0x\w+ depends on a value that was never written \(.*\), read by ds_load_\w+ at 0x"
    named = [text for text in found if re.search(f"{race}|{early}", text)]
    assert found and len(named) >= 0.6 * len(found), "\n".join(sorted(set(found)))
    assert "wrong result" not in found


@pytest.mark.parametrize("name", ["norm", "matmul_q4_0"])
def test_an_uninitialised_read_of_lds_is_named(wave64: EmulatedDevice, name: str) -> None:
    found = planted(wave64, name, "ds_store")
    named = [
        text for text in found if re.search(r"never written \(\w+ \w+\), read by ds_load\w+ at 0x", text)
    ]
    assert found and len(named) >= 0.6 * len(found), "\n".join(sorted(set(found)))


@pytest.mark.parametrize(("name", "buffer"), [("glu", "gate"), ("norm", "x"), ("quantise", "x")])
def test_a_row_too_many_is_named(wave64: EmulatedDevice, name: str, buffer: str) -> None:
    """The last row of an input is missing."""
    kernel, found = all_kernels()[name], []
    for case in kernel.cases(np.random.default_rng(1)):
        array = case.arrays[buffer]
        whole = len(array) == case.counts["tokens"] > 1 and not case.scalars.get("use_rows")
        if whole:
            short = replace(case, arrays={**case.arrays, buffer: array[:-1]})
            with pytest.raises(Fault) as fault:
                run_kernel(wave64, kernel, short)
            found.append(str(fault.value))
    assert found
    for text in found:
        assert re.search(
            rf"^{name}\w*: \w+ at 0x\w+ depends on what is outside of the launch's buffers \(byte \d+ of {buffer}, "
            r"which has \d+\).*, read by global_load\w+ at 0x",
            text,
        ), text


def test_a_stale_cache_line_is_named(wave64: EmulatedDevice) -> None:
    """Loads of what other workgroups wrote, without GLC."""
    named = 0
    for job, (kernel, cases) in jobs_of(wave64, "attention").items():

        def cached(code: Words) -> None:
            for at in [i.at // 4 for i in program.instructions() if i.operation.name == "global_load_b32"]:  # noqa: B023
                code[at] &= ~np.uint32(1 << 14)

        program = wave64.programs[job]
        found = outcome(wave64, job, with_words(program, cached), kernel, cases)
        named += bool(
            re.search(r"global_load_b32 at 0x\w+ may read a stale cache line for byte \d+ of scratch", found)
        )
        assert found != "wrong result"
    assert named >= 3


def test_a_store_outside_is_named(wave64: EmulatedDevice) -> None:
    kernel = all_kernels()["glu"]
    case = next(
        c
        for c in kernel.cases(np.random.default_rng(1))
        if len(c.arrays["out"]) > 1 and not c.scalars["out_q8"]
    )
    short = replace(case, arrays={**case.arrays, "out": case.arrays["out"][:-1]})
    with pytest.raises(Fault, match=r"glu: global_store_b32 at 0x\w+ writes 4 bytes outside: byte \d+ of "):
        run_kernel(wave64, kernel, short)

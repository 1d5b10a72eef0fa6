"""How many changes of a kernel's machine code do its checks notice?

`python -m tests.rdna3.mutate [COUNT]` changes one bit, or the number of one register, of an instruction that runs,
COUNT times (1,000), and prints what came of it.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator

from tandem.bench import kernel_checks
from tandem.bench.kernel_checks import run_kernel
from tandem.devices.rdna3.device import EmulatedDevice
from tandem.devices.rdna3.emulator import LIMIT, Fault, Instruction, ShaderProgram
from tandem.devices.vulkan.fuse_launches import SCRATCH
from tandem.kernels.dispatch import COUNTER_BYTES
from tandem.kernels.kernel import Case, Kernel
from tests.rdna3.planted import Words, check, jobs_of, with_words
from tests.vulkan.mesa import FOLDER

KERNELS = ("glu", "quantise", "norm", "rope", "embed_q4_k", "attention", "matmul_q4_0", "matmul_q4_k", "matmul_q6_k",
           "expand_coopmat")  # fmt: skip
CASES = 3  # of each pipeline, at most
REFUSED, FAULT, WRONG, SAME, UNNOTICED = "not decoded", "fault", "wrong result", "same result", "unnoticed"
HINTS = ("s_delay_alu", "s_clause", "s_nop", "s_waitcnt_depctr", "s_set_inst_prefetch_distance", "s_sendmsg",
         "s_endpgm")  # fmt: skip


def changed(program: ShaderProgram, at: Instruction, words: int, rng: random.Random) -> ShaderProgram:
    """With a bit flipped, or a register's number one higher or lower."""

    def change(code: Words) -> None:
        word = at.at // 4 + rng.randrange(words)
        if rng.random() < 0.5:
            code[word] ^= 1 << rng.randrange(32)
        else:  # a field of eight bits, where encodings have registers
            shift = rng.choice((0, 8, 9, 16, 17, 24))
            field = (int(code[word]) >> shift) + rng.choice((-1, 1)) & 255
            code[word] = int(code[word]) & ~(255 << shift) & 0xFFFFFFFF | field << shift & 0xFFFFFFFF

    return with_words(program, change)


def sizes(program: ShaderProgram) -> dict[int, int]:
    """Words of the instruction at each byte."""
    ats = sorted({i.at for i in program.instructions()})
    return {a: (b - a) // 4 for a, b in zip(ats, [*ats[1:], len(program.machine_code.code)], strict=True)}


def outputs(device: EmulatedDevice, kernel: Kernel, cases: list[Case]) -> list[bytes]:
    return [array.tobytes() for case in cases for array in run_kernel(device, kernel, case).values()]


def mutations(device: EmulatedDevice, count: int, rng: random.Random) -> Iterator[str]:
    """What came of each of `count` changes."""
    found = (item for name in KERNELS for item in jobs_of(device, name).items())
    pipelines = [(job, kernel, cases[:CASES]) for job, (kernel, cases) in found]
    for _ in range(count):
        job, kernel, cases = rng.choice(pipelines)
        program = device.programs[job]
        before = outputs(device, kernel, cases)
        ran = [i for i in program.instructions() if i.times and i.operation.name not in HINTS]
        chosen = rng.choice(ran)
        assert device.executed
        device.limit = 50 * device.executed.instructions
        try:
            device.programs[job] = changed(program, chosen, sizes(program)[chosen.at], rng)
            yield outcome(device, kernel, cases, before)
        except Fault:
            yield REFUSED
        finally:
            device.programs[job], device.limit = program, LIMIT
            device.memory(SCRATCH)[:COUNTER_BYTES] = 0


def outcome(device: EmulatedDevice, kernel: Kernel, cases: list[Case], before: list[bytes]) -> str:
    try:
        for case in cases:
            check(device, kernel, case)
        return SAME if outputs(device, kernel, cases) == before else UNNOTICED
    except Fault:
        return FAULT
    except AssertionError:
        return WRONG


def noticed(found: Counter[str]) -> float:
    """The share of changes that matter which were noticed."""
    caught = found[REFUSED] + found[FAULT] + found[WRONG]
    return caught / (caught + found[UNNOTICED])


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    found: Counter[str] = Counter()
    for lanes in (64, 32):
        device = EmulatedDevice(FOLDER, lanes)
        kernel_checks.prepare(device)
        found.update(mutations(device, count // 2, random.Random(lanes)))
        device.close()
    print(f"{dict(found)}: {noticed(found):.1%} of those that change a result are noticed")


if __name__ == "__main__":
    main()

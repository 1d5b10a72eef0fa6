"""What a launch executes on an RDNA3 GPU, counted by the emulator: the input of a cost model.

device = EmulatedDevice(lanes=64)
kernel = all_kernels()["matmul_q4_0"]
case = matmul.make_case("q4_0", tokens=1, rows=256, columns=4096, epilogue=0, out_q8=0, rng=rng)
counts = count(device, kernel, case)
counts.valu, counts.dot, counts.memory_of("global_load").segments
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tandem.devices.rdna3.device import EmulatedDevice, Executed
from tandem.devices.rdna3.emulator import Encoding, Instruction
from tandem.devices.vulkan.fuse_launches import step_program
from tandem.devices.vulkan.recording import bucket
from tandem.kernels.abi import COUNTS
from tandem.kernels.kernel import Case, Kernel
from tandem.program.program import Launch, Program, Tensor

ALIGNMENT = 256
TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")


@dataclass
class MemoryCount:
    """Accesses of one operation."""

    instructions: int = 0
    lanes: int = 0  # active
    bytes: int = 0  # of active lanes
    segments: int = 0  # of 64 bytes that the lanes of an instruction touch: few if they are coalesced
    cycles: int = 0  # of LDS, with bank conflicts

    def __add__(self, other: MemoryCount) -> MemoryCount:
        return MemoryCount(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class Counts:
    """What the waves of a launch executed. Instructions are a wave's, not a lane's; a dual instruction is one."""

    shader: str
    lanes: int  # of a wave
    waves: int
    groups: int  # workgroups
    vgprs: int  # of a lane
    lds_bytes: int  # of a workgroup
    operations: Counter[str] = field(default_factory=Counter)  # by name; both of a dual instruction
    valu: int = 0  # of which are:
    dual: int = 0
    transcendental: int = 0
    dot: int = 0
    wmma: int = 0
    packed: int = 0
    salu: int = 0
    branches: int = 0
    waits: int = 0
    barriers: int = 0
    hints: int = 0  # s_delay_alu, s_clause, s_nop and others that compute nothing
    memory: dict[str, MemoryCount] = field(default_factory=dict)  # by operation

    @property
    def instructions(self) -> int:
        accesses = sum(m.instructions for m in self.memory.values())
        return self.valu + self.salu + self.branches + self.waits + self.barriers + self.hints + accesses

    def memory_of(self, start: str) -> MemoryCount:
        """The sum of the operations whose names begin so: "global_load", "ds_", "s_load"."""
        return sum((m for name, m in self.memory.items() if name.startswith(start)), MemoryCount())


def count(device: EmulatedDevice, kernel: Kernel, case: Case, groups: int | None = None) -> list[Counts]:
    """Runs a kernel on a case as the engine would; returns the counts of each launch that it makes of it, of which the
    kernel's own is the last. `groups`: runs only the first workgroups along x: enough where all do the same."""
    launch, sizes = _prepare(device, kernel, case)
    program, found = Program([launch], sizes, {}), []
    device.counting = True
    try:
        for each in step_program(program, sizes, device.capabilities).launches:
            device.launch(each, sizes, groups=groups if each.kernel.name == kernel.name else None)
            assert device.executed
            found.append(counts_of(device.executed))
    finally:
        device.counting = False
    return found


def counts_of(executed: Executed) -> Counts:
    """Of the last launch of a program, which ran with `counting`."""
    code = executed.program.machine_code
    groups = int(np.prod(executed.grid))
    waves = groups * -(-int(np.prod(code.threads)) // code.job.lanes)
    total = Counts(code.job.shader, code.job.lanes, waves, groups, code.vgprs, code.lds_bytes)
    second = False  # of a dual instruction
    for i in executed.program.instructions():
        total.operations[i.operation.name] += i.times
        if not second:
            _add(total, i)
        second = i.dual
    return total


def _prepare(device: EmulatedDevice, kernel: Kernel, case: Case) -> tuple[Launch, dict[str, int]]:
    """The case's arrays in the device's memory."""
    tensors, at = {}, 0
    for name, array in case.arrays.items():
        tensors[name] = Tensor(name, "activations", str(array.dtype), array.nbytes, offset=at)
        at += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    device.allocate_arena("step", ALIGNMENT)
    device.allocate_arena("activations", at)
    for name, tensor in tensors.items():
        device.write(tensor, case.arrays[name].reshape(-1).view(np.uint8))
    device.memory("step").view(np.int32)[: len(COUNTS)] = [case.counts[name] for name in COUNTS]
    bound = {buffer.name: tensors.get(buffer.name) for buffer in kernel.buffers}
    sizes = {name: bucket(case.counts[name], max(case.counts.values())) for name in COUNTS}
    return Launch(kernel, bound, case.scalars, kernel.name), sizes


def _add(total: Counts, i: Instruction) -> None:
    name, encoding = i.operation.name, i.operation.encoding
    if i.operation.bytes or encoding == Encoding.DS:
        m = total.memory.setdefault(name, MemoryCount())
        m.instructions += i.times
        m.lanes += i.lanes
        m.bytes += i.lanes * i.operation.bytes * (2 if "2addr" in name else 1)
        m.segments += i.segments
        m.cycles += i.cycles
    elif Encoding.VOP1 <= encoding <= Encoding.VOPD:
        total.valu += i.times
        total.dual += i.times * i.dual
        total.transcendental += i.times * name.startswith(TRANSCENDENTAL)
        total.dot += i.times * name.startswith("v_dot")
        total.wmma += i.times * name.startswith("v_wmma")
        total.packed += i.times * name.startswith("v_pk_")
    elif name.startswith("s_waitcnt"):
        total.waits += i.times
    elif name == "s_barrier":
        total.barriers += i.times
    elif name.startswith(("s_branch", "s_cbranch")):
        total.branches += i.times
    elif encoding in (Encoding.SOPP, Encoding.MUBUF):  # of the latter: what empties caches
        total.hints += i.times
    else:
        total.salu += i.times

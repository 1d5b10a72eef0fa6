"""RDNA3 machine code, executed on the CPU. A checker and a counter, never a device to time.

What a GPU would punish, or get wrong now and then, is a Fault that names the instruction and the shader: an access
outside of every buffer, a value that was never written, a register used before its load was waited for, and races
between waves or workgroups, which run a few at a time in an order that a seed decides.

    program = ShaderProgram(Compiler().compile(Job("glu", (), lanes=64)))
    program.run(grid=(4, 1, 1), push=push, buffers=[MemoryRange("gate", address, array), ...])

counting.py counts what a launch executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.devices.rdna3.compiler import POINTER_HIGH, MachineCode
from tandem.errors import DeviceError
from tandem.native import best_isa, ffi, load

PUSH_ADDRESS = POINTER_HIGH << 32 | 0x10000
DESCRIPTORS_ADDRESS = POINTER_HIGH << 32 | 0x20000
RAW_BUFFER = 3 << 28  # a descriptor's last word: as RADV makes them, bounds are checked for each dword
LIMIT = 1 << 36  # instructions of a launch


class Encoding(IntEnum):
    (SOP1, SOP2, SOPC, SOPK, SOPP, SMEM, VOP1, VOP2, VOPC, VOP3, VOP3SD, VOP3P, VOPD, DS, GLOBAL, SCRATCH,
     MUBUF) = range(17)  # fmt: skip


class Operation(NamedTuple):
    name: str
    encoding: Encoding
    opcode: int
    bytes: int


class Access(IntEnum):
    OUTSIDE = 0  # there, but not the launch's: it may be read as long as nothing depends on it
    READ = 1
    WRITE = 2


class MemoryRange(NamedTuple):
    """Memory that a launch sees. `data`: its bytes, from `address` on."""

    name: str
    address: int
    data: npt.NDArray[Any]
    access: Access = Access.READ


class Fault(DeviceError):
    """What the machine code does that a GPU would punish."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


# In the order of FaultKind in wave.h.
FAULTS = ("", "bad instruction", "read outside", "write outside", "LDS outside", "not waited", "undefined address",
          "undefined store", "undefined branch", "undefined exec", "race", "not replicated", "too long",
          "misaligned", "stale")  # fmt: skip
COUNTERS = ("vmcnt", "vscnt", "lgkmcnt", "lgkmcnt")


@cache
def operations() -> list[Operation]:
    if best_isa() == "plain":
        raise DeviceError("the emulated GPU needs a CPU with AVX2")
    core, found, one = load(), [], ffi.new("rdna3_operation *")
    for i in range(core.tandem_rdna3_operations()):
        core.tandem_rdna3_operation(i, one)
        found.append(Operation(ffi.string(one.name).decode(), Encoding(one.encoding), one.opcode, one.bytes))
    return found


class Instruction(NamedTuple):
    operation: Operation
    at: int
    dual: bool
    result: int
    times: int  # that it ran, by a wave
    lanes: int
    segments: int
    cycles: int


class ShaderProgram:
    """A shader's machine code, decoded."""

    def __init__(self, machine_code: MachineCode) -> None:
        self.machine_code, self.shader = machine_code, machine_code.job.shader
        operations()
        words = np.frombuffer(machine_code.code, np.uint32)
        bad = ffi.new("uint32_t *")
        program = load().tandem_rdna3_decode(ffi.from_buffer("uint32_t[]", words), len(words), bad)
        if program == ffi.NULL:
            raise Fault(
                "bad instruction",
                f"{self.shader}: the emulator does not know the instruction {words[bad[0]]:08x} at {4 * bad[0]:#x}",
            )
        self._program = ffi.gc(program, load().tandem_rdna3_free)

    def instructions(self) -> Iterator[Instruction]:
        """With their counts of the last launch."""
        core, known = load(), operations()
        count = core.tandem_rdna3_instructions(self._program, ffi.NULL)
        found = ffi.new("rdna3_instruction[]", count)
        core.tandem_rdna3_instructions(self._program, found)
        for i in found:
            yield Instruction(
                known[i.operation], i.at, bool(i.dual), i.result, i.count, i.lanes, i.segments, i.cycles
            )

    # ---- running

    def run(
        self,
        grid: tuple[int, int, int],
        push: bytes,
        buffers: Sequence[MemoryRange],
        seed: int = 1,
        counting: bool = False,
        limit: int = LIMIT,
        bindings: int = 0,
    ) -> int:
        """Runs a launch; returns how many instructions its waves executed. `push`: the push constants. `bindings`: how
        many of the buffers, the first, the shader finds by their descriptors in set 0."""
        code = self.machine_code
        constants = np.frombuffer(push, np.uint8).copy()
        memory = [
            *buffers,
            MemoryRange("push constants", PUSH_ADDRESS, constants),
            MemoryRange("descriptors", DESCRIPTORS_ADDRESS, descriptors(buffers[:bindings])),
        ]
        regions = ffi.new("rdna3_region[]", len(memory))
        for region, buffer in zip(regions, memory, strict=True):
            region.address, region.bytes, region.access = buffer.address, buffer.data.nbytes, buffer.access
            region.host = ffi.cast("uint8_t *", buffer.data.ctypes.data)
        user = ffi.new("uint32_t[]", self._user_sgprs(grid, constants.view(np.uint32)))
        launch = ffi.new(
            "rdna3_launch *",
            {
                "lanes": code.job.lanes, "threads": code.threads, "groups": grid, "lds_bytes": code.lds_bytes,
                "scratch_bytes": code.scratch_bytes, "vgprs": code.vgprs, "user_sgprs": code.user_sgprs,
                "group_ids": code.group_ids, "wave_number": code.wave_number, "user": user,
                "flush_denormals": code.flush_denormals, "counting": counting, "regions": regions,
                "region_count": len(memory), "seed": seed, "limit": limit,
            },
        )  # fmt: skip
        fault = ffi.new("rdna3_fault *")
        done = load().tandem_rdna3_run(self._program, launch, fault)
        if done < 0:
            raise DeviceError(f"{self.shader}: no memory for the emulated launch")
        if done:
            raise Fault(FAULTS[fault.kind], f"{self.shader}: {self._explain(fault, memory)}")
        return int(fault.executed)

    def _user_sgprs(self, grid: tuple[int, int, int], push: npt.NDArray[np.uint32]) -> list[int]:
        """What the driver sets before the first instruction."""
        code = self.machine_code
        values = [0] * code.user_sgprs
        if code.push_pointer is not None:
            values[code.push_pointer] = PUSH_ADDRESS & 0xFFFFFFFF
        for dword, register in code.push_values.items():
            values[register] = int(push[dword])
        if code.descriptor_set is not None:
            values[code.descriptor_set] = DESCRIPTORS_ADDRESS & 0xFFFFFFFF
        if code.grid_size is not None:
            values[code.grid_size : code.grid_size + 3] = grid
        return values

    # ---- faults

    def _explain(self, fault: Any, buffers: Sequence[MemoryRange]) -> str:
        listed, kind = list(self.instructions()), FAULTS[fault.kind]

        def name(index: int) -> str:
            return f"{listed[index].operation.name} at {listed[index].at:#x}"

        here = listed[fault.instruction].operation
        other = name(fault.other) if fault.other >= 0 else "itself"
        place = (
            f"LDS byte {fault.address}" if here.encoding == Encoding.DS else _place(fault.address, buffers)
        )
        whose = (
            f"wave {fault.other_wave}"
            if fault.group == fault.other_group
            else f"workgroup {fault.other_group}"
        )
        if kind == "race":
            problem = f"races with {other} of {whose} for {place}"
        elif kind == "stale":
            wrote = f"{place}, which {other} of {whose} wrote"
            problem = f"may read a stale cache line for {wrote}: no GLC, no buffer_gl0_inv"
        elif kind.endswith("outside"):
            problem = f"{'reads' if 'load' in here.name else 'writes'} {fault.bytes} bytes outside: {place}"
        elif kind == "not waited":
            problem = (
                f"uses a register before s_waitcnt {COUNTERS[fault.bytes]} waits for the load by {other}"
            )
        elif kind.startswith("undefined"):
            what = "a value that was never written"
            if fault.address:
                what = f"what is outside of the launch's buffers ({_place(fault.address, buffers)})"
            problem = f"depends on {what} ({kind}), read by {other}"
        else:
            problem = kind
        return f"{name(fault.instruction)} {problem} (workgroup {fault.group}, wave {fault.wave}, lane {fault.lane})"


def descriptors(buffers: Sequence[MemoryRange]) -> npt.NDArray[np.uint32]:
    """Four words each (V#): where it begins, its bytes, its kind."""
    words = [(b.address & 0xFFFFFFFF, b.address >> 32, b.data.nbytes, RAW_BUFFER) for b in buffers]
    return np.array(words, np.uint32).reshape(-1)


def _place(address: int, buffers: Sequence[MemoryRange]) -> str:
    """The nearest of the launch's own buffers."""
    near = min((b for b in buffers if b.access), key=lambda b: _distance(b, address))
    return f"byte {address - near.address} of {near.name}, which has {near.data.nbytes}"


def _distance(buffer: MemoryRange, address: int) -> int:
    return max(buffer.address - address, address - buffer.address - buffer.data.nbytes + 1, 0)

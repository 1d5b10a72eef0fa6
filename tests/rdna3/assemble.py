"""RDNA3 instructions as words, and a wave to run them: what tests of single instructions need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem.devices.rdna3.compiler import Job, MachineCode
from tandem.devices.rdna3.emulator import (
    RAW_BUFFER,
    Access,
    Encoding,
    MemoryRange,
    Operation,
    ShaderProgram,
    operations,
)

Array = npt.NDArray[np.uint32]
ADDRESS = 1 << 40
VCC, NULL, EXEC, LITERAL = 106, 124, 126, 255
LDS_BYTES, SCRATCH_BYTES = 4096, 64


def V(register: int) -> int:
    """A vector register as a source."""
    return 256 + register


def constant(value: int) -> int:
    """An inline constant from -16 to 64, as a source."""
    return 128 + value if value >= 0 else 192 - value


def find(name: str) -> Operation:
    return next(o for o in operations() if o.name == name)


# ---- encodings; each returns the words of an instruction


def sop1(name: str, result: int, a: int) -> list[int]:
    return [0xBE800000 | result << 16 | find(name).opcode << 8 | a]


def sop2(name: str, result: int, a: int, b: int) -> list[int]:
    return [0x80000000 | find(name).opcode << 23 | result << 16 | b << 8 | a]


def sopc(name: str, a: int, b: int) -> list[int]:
    return [0xBF000000 | find(name).opcode << 16 | b << 8 | a]


def sopk(name: str, result: int, k: int) -> list[int]:
    return [0xB0000000 | find(name).opcode << 23 | result << 16 | k & 0xFFFF]


def sopp(name: str, k: int = 0) -> list[int]:
    return [0xBF800000 | find(name).opcode << 16 | k & 0xFFFF]


def smem(name: str, result: int, base: int, offset: int = 0, register: int = NULL) -> list[int]:
    return [
        0xF4000000 | find(name).opcode << 18 | result << 6 | base >> 1,
        register << 25 | offset & 0x1FFFFF,
    ]


def vop1(name: str, result: int, a: int) -> list[int]:
    return [0x7E000000 | result << 17 | find(name).opcode << 9 | a]


def vop2(name: str, result: int, a: int, b: int) -> list[int]:
    return [find(name).opcode << 25 | result << 17 | b << 9 | a]


def vopc(name: str, a: int, b: int) -> list[int]:
    return [0x7C000000 | find(name).opcode << 17 | b << 9 | a]


def vop3(
    name: str, result: int, *sources: int, absolute: int = 0, negate: int = 0, high: int = 0, multiply: int = 0,
    clamp: int = 0, scalar: int | None = None,
) -> list[int]:  # fmt: skip
    """Of any vector operation: VOP1, VOP2 and VOPC have a VOP3 form. `scalar`: the register of a carry."""
    operation = find(name)
    code = operation.opcode + {Encoding.VOP1: 384, Encoding.VOP2: 256}.get(operation.encoding, 0)
    middle = absolute << 8 | high << 11 if scalar is None else scalar << 8
    a, b, c = (*sources, 0, 0, 0)[:3]
    return [
        0xD4000000 | code << 16 | clamp << 15 | middle | result,
        a | b << 9 | c << 18 | multiply << 27 | negate << 29,
    ]


def vop3p(
    name: str,
    result: int,
    *sources: int,
    high: int = 0,
    select_high: int = 7,
    negate: int = 0,
    negate_high: int = 0,
) -> list[int]:
    a, b, c = (*sources, 0, 0, 0)[:3]
    first = (
        0xCC000000
        | find(name).opcode << 16
        | (select_high >> 2) << 14
        | high << 11
        | negate_high << 8
        | result
    )
    return [first, a | b << 9 | c << 18 | (select_high & 3) << 27 | negate << 29]


def dpp16(
    name: str, result: int, a: int, b: int, control: int, rows: int = 15, bound: int = 0, inactive: int = 0
) -> list[int]:
    """VOP2, or VOP1 if b is negative; a and b are vector registers."""
    [word] = vop2(name, result, 250, b) if b >= 0 else vop1(name, result, 250)
    return [word, a | control << 8 | inactive << 18 | bound << 19 | 15 << 24 | rows << 28]


def dpp8(name: str, result: int, a: int, lanes: Sequence[int]) -> list[int]:
    [word] = vop1(name, result, 233)
    return [word, a | sum(lane << 8 + 3 * i for i, lane in enumerate(lanes))]


def ds(name: str, address: int, data: int = 0, data1: int = 0, result: int = 0, offset: int = 0) -> list[int]:
    return [0xD8000000 | find(name).opcode << 18 | offset, address | data << 8 | data1 << 16 | result << 24]


def memory(
    name: str, address: int, data: int = 0, result: int = 0, base: int = NULL, offset: int = 0, glc: int = 0,
    sve: int = 1,
) -> list[int]:  # fmt: skip
    """Global and scratch memory. `sve`: whether an address in scratch memory has a vector register."""
    segment, sve = (2, 0) if name.startswith("global") else (1, sve)
    first = 0xDC000000 | find(name).opcode << 18 | segment << 16 | glc << 14 | offset & 0x1FFF
    return [first, address | data << 8 | base << 16 | sve << 23 | result << 24]


def mubuf(
    name: str,
    data: int = 0,
    address: int | None = None,
    base: int = 0,
    offset: int = 0,
    scalar: int = NULL,
    glc: int = 0,
) -> list[int]:
    """Buffers with descriptors, in four registers from `base` on. `address`: the register of each lane's offset."""
    first = 0xE0000000 | find(name).opcode << 18 | glc << 14 | offset
    return [first, (address or 0) | data << 8 | base // 4 << 16 | (address is not None) << 22 | scalar << 24]


def descriptor(base: int, nbytes: int, kind: int = RAW_BUFFER) -> list[list[int]]:
    """Of the first bytes of the memory that `run` gives."""
    return [
        sop1("s_mov_b64", base, 0),
        [*sop1("s_mov_b32", base + 2, LITERAL), nbytes],
        [*sop1("s_mov_b32", base + 3, LITERAL), kind],
    ]


WAIT = [0xBF890000, 0xBC7C0000]  # for everything
END = [0xBFB00000]


def program_of(parts: Sequence[Sequence[int]], lanes: int = 32, waves: int = 1) -> ShaderProgram:
    """Instructions as a shader. s[0:1] are push constants, s2 the number of the workgroup, v0 the thread's."""
    words = np.array([word for part in parts for word in part] + END, np.uint32)
    code = MachineCode(
        Job("test", (), lanes), words.tobytes(), (lanes * waves, 1, 1), 256, LDS_BYTES, SCRATCH_BYTES, False, 2, 1,
        None, {0: 0, 1: 1}, None,
    )  # fmt: skip
    return ShaderProgram(code)


def run(
    parts: Sequence[Sequence[int]], data: Array, lanes: int = 32, groups: int = 1, waves: int = 1
) -> Array:
    """What instructions make of memory, whose address is in s[0:1]."""
    result = data.copy()
    push = np.array([ADDRESS & 0xFFFFFFFF, ADDRESS >> 32], np.uint32).tobytes()
    program = program_of(parts, lanes, waves)
    program.run((groups, 1, 1), push, [MemoryRange("memory", ADDRESS, result, Access.WRITE)])
    return result

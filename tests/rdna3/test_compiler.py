"""RADV's record of a pipeline, as compiler.py reads it: one with descriptors, which our own shaders do not have."""

from __future__ import annotations

import struct

import pytest

from tandem.devices.rdna3.compiler import (
    CONFIG,
    DESCRIPTOR_SETS,
    GRID_SIZE,
    HEADER_BYTES,
    LOCATIONS_AT,
    OBJECT,
    PUSH_MASK_AT,
    PUSH_POINTER,
    PUSH_VALUES,
    RSRC2_WORD,
    THREADS_AT,
    VGPRS_WORD,
    Job,
    read_record,
)
from tandem.errors import DeviceError

CODE, SIZES_AT = bytes(range(16)), 900
GIVEN = {  # where user data lies, and how many registers it has
    -DESCRIPTOR_SETS: (2, 1),
    PUSH_POINTER: (3, 1),
    PUSH_VALUES: (4, 2),
    GRID_SIZE: (6, 3),
}
USER_SGPRS = 9


def cache_of(user_sgprs: int) -> bytes:
    """A pipeline cache with one shader. All registers that the driver sets are used, with the wave's number."""
    record = bytearray(SIZES_AT + 16)
    words = [0] * 14
    words[VGPRS_WORD], words[RSRC2_WORD] = 40, user_sgprs << 1 | 5 << 7 | 1 << 10 | 3 << 15
    CONFIG.pack_into(record, 0, *words)
    struct.pack_into("<Q", record, PUSH_MASK_AT, 0b1001)
    for kind in range(-DESCRIPTOR_SETS, 32):
        struct.pack_into(
            "<bB", record, LOCATIONS_AT + 2 * (DESCRIPTOR_SETS + kind), *GIVEN.get(kind, (-1, 0))
        )
    struct.pack_into("<3I", record, THREADS_AT, 256, 1, 1)
    struct.pack_into("<4I", record, SIZES_AT, len(record) + len(CODE), 0, len(CODE), 8)
    data = bytes(HEADER_BYTES) + struct.pack("<I", 1) + OBJECT.pack(0, 4, len(record) + len(CODE)) + bytes(4)
    return data + bytes(-len(data) % 8) + record + CODE


def test_what_registers_hold() -> None:
    found = read_record(Job("shader", (), 64), cache_of(USER_SGPRS))
    assert (found.descriptor_set, found.push_pointer, found.push_values, found.grid_size) == (
        2,
        3,
        {0: 4, 3: 5},
        6,
    )
    assert found.wave_number and found.group_ids == 5
    assert (found.threads, found.vgprs, found.lds_bytes) == ((256, 1, 1), 40, 3 * 512)
    assert found.code == CODE[:8]


def test_registers_that_nothing_explains() -> None:
    with pytest.raises(DeviceError, match="RADV's record of shader is not as in"):
        read_record(Job("shader", (), 64), cache_of(USER_SGPRS + 1))

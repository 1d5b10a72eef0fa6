"""Every load, store and atomic operation, on buffers, scratch memory and LDS, against AMD's RDNA3 ISA guide."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from tandem.devices.rdna3.compiler import POINTER_HIGH, Job, MachineCode
from tandem.devices.rdna3.emulator import Access, Encoding, Fault, MemoryRange, ShaderProgram, operations
from tests.rdna3.assemble import (
    ADDRESS,
    END,
    EXEC,
    LITERAL,
    WAIT,
    Array,
    V,
    constant,
    descriptor,
    ds,
    find,
    memory,
    mubuf,
    run,
    smem,
    sop1,
    sop2,
    sopp,
    vop1,
    vop2,
    vop3,
)

RNG = np.random.default_rng(11)
LANES, WIDTH = 32, 4  # dwords that each lane loads and stores
FROM, TO = 0, 1024  # bytes: lane l has those from 16 l on
LOADS = [
    n for n in (o.name for o in operations()) if re.search(r"_load_(?!2addr)", n) and not n.startswith("s_")
]
STORES = [n for n in (o.name for o in operations()) if re.search(r"_store_(?!2addr)", n)]
ATOMICS: dict[str, Callable[[int, int], int]] = {
    "swap": lambda a, b: b, "storexchg": lambda a, b: b, "add": lambda a, b: a + b, "sub": lambda a, b: a - b,
    "min": min, "max": max, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
}  # fmt: skip
BUFFER = 8  # registers of a descriptor of all memory
# v1: 16 * lane; v2 to v5: four dwords of the lane; v6 to v9: the same of another place.
START = [*descriptor(BUFFER, 2048), vop2("v_lshlrev_b32", 1, constant(4), 0),
         memory("global_load_b128", 1, result=2, base=0, offset=FROM),
         memory("global_load_b128", 1, result=6, base=0, offset=512), WAIT]  # fmt: skip
FINISH = [WAIT, memory("global_store_b128", 1, data=6, base=0, offset=TO)]


def filled() -> Array:
    return RNG.integers(0, 1 << 32, 512, np.uint32)


def lanes_of(data: Array, at: int) -> Array:
    return data[at // 4 : at // 4 + LANES * WIDTH].reshape(LANES, WIDTH)


def through(name: str) -> tuple[str, list[list[int]], list[list[int]]]:
    """The kind of memory of an operation, and how v2 to v5 get there and v6 to v9 back."""
    kind = name.split("_")[0]
    if kind == "ds":
        return kind, [ds("ds_store_b128", 1, 2), WAIT], [ds("ds_load_b128", 1, result=6)]
    if kind == "scratch":
        return (
            kind,
            [memory("scratch_store_b128", 10, data=2), WAIT],
            [memory("scratch_load_b128", 10, result=6)],
        )
    return kind, [], [memory("global_load_b128", 1, result=6, base=0)]


def access(name: str, data: int, result: int, offset: int = 0) -> list[int]:
    if name.startswith("ds"):
        return ds(name, 1, data, result=result, offset=offset)
    if name.startswith("scratch"):
        return memory(name, 10, data=data, result=result, offset=offset)
    if name.startswith("buffer"):
        return mubuf(name, data if "store" in name else result, 1, BUFFER, offset)
    return memory(name, 1, data=data, result=result, base=0, offset=offset)


ZERO = [vop1("v_mov_b32", 10, constant(0))]  # the address in scratch memory


def test_the_names() -> None:
    assert {n.split("_")[0] for n in LOADS} == {"global", "buffer", "scratch", "ds"}
    assert len(LOADS) == 3 * 14 + 14 and len(STORES) == 3 * 8 + 8


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("offset", [0, 4])
def test_load(name: str, offset: int) -> None:
    bytes_ = find(name).bytes
    if offset + bytes_ > 16:
        return
    _, put, _ = through(name)
    data = filled()
    after = run([*START, *ZERO, *put, access(name, 0, 6, offset), *FINISH], data)
    got, old, source = lanes_of(after, TO), lanes_of(data, 512), lanes_of(data, FROM)
    raw = source.view(np.uint8)[:, offset : offset + bytes_]
    want = old.copy()
    if bytes_ >= 4:
        want[:, : bytes_ // 4] = np.ascontiguousarray(raw).view(np.uint32)
    else:
        sign = "i" if re.search(r"_i(8|16)", name) else "u"
        value = np.ascontiguousarray(raw).view(f"{sign}{bytes_}")[:, 0].astype(np.int64)
        if "d16_hi" in name:
            want[:, 0] = old[:, 0] & 0xFFFF | (value.astype(np.uint32) & 0xFFFF) << 16
        elif "d16" in name:
            want[:, 0] = old[:, 0] & 0xFFFF0000 | value.astype(np.uint32) & 0xFFFF
        else:
            want[:, 0] = value.astype(np.uint32)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("offset", [0, 4])
def test_store(name: str, offset: int) -> None:
    bytes_ = find(name).bytes
    if offset + bytes_ > 16:
        return
    _, put, back = through(name)
    data = filled()
    store = access(name, 6, 0, offset)
    after = run([*START, *ZERO, *put, store, WAIT, *back, *FINISH], data)
    want = lanes_of(data, FROM).copy()
    given = lanes_of(data, 512)
    if "d16_hi" in name:
        given = given >> 16
    want.view(np.uint8)[:, offset : offset + bytes_] = np.ascontiguousarray(given).view(np.uint8)[:, :bytes_]
    np.testing.assert_array_equal(lanes_of(after, TO), want)


@pytest.mark.parametrize("bytes_", [4, 8])
@pytest.mark.parametrize("stride", ["", "stride64_"])
def test_two_addresses(bytes_: int, stride: str) -> None:
    """Lanes store their first and second part to two places, and load them in the other order."""
    unit, data = bytes_ * (64 if stride else 1), filled()
    first, second = (0, 2) if stride else (0, 128)
    narrow = [vop2("v_lshlrev_b32", 1, constant(3 if bytes_ == 8 else 2), 0)]
    wide = [vop2("v_lshlrev_b32", 1, constant(4), 0)]
    suffix = f"2addr_{stride}b{8 * bytes_}"
    code = [*START, *narrow, ds(f"ds_store_{suffix}", 1, 2, 4, offset=first | second << 8), WAIT,
            ds(f"ds_load_{suffix}", 1, result=6, offset=second | first << 8), WAIT, *wide, *FINISH]  # fmt: skip
    assert second * unit >= LANES * bytes_
    got, source, part = lanes_of(run(code, data), TO), lanes_of(data, FROM), bytes_ // 4
    np.testing.assert_array_equal(got[:, :part], source[:, 2 : 2 + part])
    np.testing.assert_array_equal(got[:, part : 2 * part], source[:, :part])


BUFFER_ATOMICS = [o.name for o in operations() if "_atomic_" in o.name]
LDS_ATOMICS = [
    o.name
    for o in operations()
    if re.fullmatch(r"ds_(?!load|store)\w+_[ubi]32", o.name) and "permute" not in o.name
]


@pytest.mark.parametrize("name", [*BUFFER_ATOMICS, *LDS_ATOMICS])
@pytest.mark.parametrize("returns", [False, True])
def test_atomic(name: str, returns: bool) -> None:
    lds = name.startswith("ds")
    if lds and returns != ("_rtn_" in name):
        return
    _, put, _ = through(name)
    data = filled()
    data[: LANES * WIDTH : WIDTH] = RNG.choice([0, 1, 1 << 31, (1 << 32) - 1, 7], LANES)
    change = (
        ds(name, 1, 6, result=11)
        if lds
        else mubuf(name, 11, 1, BUFFER, glc=int(returns))
        if name.startswith("buffer")
        else memory(name, 1, data=11, result=11, base=0, glc=int(returns))
    )
    change = [*vop1("v_mov_b32", 11, 256 + 6), *change]
    take = [vop1("v_mov_b32", 7, 256 + 11)] if returns else []
    after = run([*START, *put, change, WAIT, *take, *read_first(lds), *FINISH], data)
    stem, kind = next(s for s in ATOMICS if f"_{s}_" in f"_{name}_"), name.split("_")[-1]
    for got, old, given in zip(lanes_of(after, TO), lanes_of(data, FROM), lanes_of(data, 512), strict=True):
        a, b = (int(np.int32(x.astype(np.int32))) if kind == "i32" else int(x) for x in (old[0], given[0]))
        assert int(got[0]) == ATOMICS[stem](a, b) & 0xFFFFFFFF
        assert int(got[1]) == int(old[0] if returns else given[1])


def read_first(lds: bool) -> list[list[int]]:
    return [ds("ds_load_b32", 1, result=6) if lds else memory("global_load_b32", 1, result=6, base=0)]


def test_lanes_that_add_to_one_place_each_count() -> None:
    data = np.zeros(64, np.uint32)
    code = [vop1("v_mov_b32", 1, constant(0)), vop1("v_mov_b32", 2, constant(1)),
            memory("global_atomic_add_u32", 1, data=2, base=0)]  # fmt: skip
    assert run(code, data, groups=5)[0] == 5 * LANES


def test_append() -> None:
    data = np.zeros(512, np.uint32)
    code = [vop1("v_mov_b32", 3, constant(10)), vop1("v_mov_b32", 2, constant(0)),
            ds("ds_store_b32", 2, 3, offset=8), WAIT,
            sop1("s_mov_b32", EXEC, constant(15)), ds("ds_append", 0, result=4, offset=8), WAIT,
            ds("ds_append", 0, result=5, offset=8), WAIT, vop2("v_lshlrev_b32", 1, constant(3), 0),
            memory("global_store_b64", 1, data=4, base=0)]  # fmt: skip
    np.testing.assert_array_equal(run(code, data)[:8].reshape(4, 2), [[10, 14]] * 4)


def test_bpermute() -> None:
    data, order = filled(), RNG.permutation(LANES)
    data[: LANES * WIDTH : WIDTH] = 4 * order
    after = run([*START, ds("ds_bpermute_b32", 2, 6, result=6), *FINISH], data)
    np.testing.assert_array_equal(lanes_of(after, TO)[:, 0], lanes_of(data, 512)[order, 0])


@pytest.mark.parametrize("dwords", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("buffer", ["", "buffer_"])
def test_scalar_load(dwords: int, buffer: str) -> None:
    data = filled()
    name, base = f"s_{buffer}load_b{32 * dwords}", BUFFER if buffer else 0
    code = [
        *descriptor(BUFFER, 2048),
        smem(name, 16, base, 36),
        WAIT,
        vop1("v_mov_b32", 1, constant(0)),
        sop1("s_mov_b64", EXEC, constant(1)),
    ]
    for i in range(dwords):
        code += [
            vop1("v_mov_b32", 2, 16 + i),
            memory("global_store_b32", 1, data=2, base=0, offset=TO + 4 * i),
        ]
    after = run(code, data)
    np.testing.assert_array_equal(after[TO // 4 : TO // 4 + dwords], data[9 : 9 + dwords])
    by_register = [*code[:3], sop1("s_mov_b32", 5, constant(36)), smem(name, 16, base, 0, 5), *code[4:]]
    np.testing.assert_array_equal(run(by_register, data), after)


def test_a_buffer_ends_where_its_descriptor_says() -> None:
    """Dwords beyond read as 0 and are not written; offsets of lane, register and instruction add up."""
    data, end = filled(), 16 * 20 + 8
    start = [*descriptor(BUFFER, end), sop1("s_mov_b32", 5, constant(16)), *START[3:]]
    after = run([*start, mubuf("buffer_load_b128", 6, 1, BUFFER, 16, 5), *FINISH], data)
    inside = np.where(np.arange(512) < end // 4, data, 0)
    np.testing.assert_array_equal(lanes_of(after, TO), lanes_of(inside, 32))
    after = run([*start, mubuf("buffer_store_b128", 6, 1, BUFFER)], data)
    written = np.concatenate([data[128 : 128 + end // 4], data[end // 4 :]])
    np.testing.assert_array_equal(after, written)
    code = [*start, mubuf("buffer_atomic_add_u32", 6, 1, BUFFER, glc=1), *FINISH]
    after = run(code, data)
    last = -(-end // 16)
    np.testing.assert_array_equal(
        lanes_of(after, TO)[:, 0], np.r_[lanes_of(data, 0)[:last, 0], [0] * (LANES - last)]
    )
    np.testing.assert_array_equal(lanes_of(after, 0)[last:], lanes_of(data, 0)[last:])
    load = smem("s_buffer_load_b128", 16, BUFFER, end - 8)
    code = [*start, load, WAIT, *(vop1("v_mov_b32", 6 + i, 16 + i) for i in range(4)), *FINISH]
    np.testing.assert_array_equal(lanes_of(run(code, data), TO)[0], [*data[end // 4 - 2 : end // 4], 0, 0])


def test_a_buffer_without_an_offset_a_lane() -> None:
    after = run([*START, mubuf("buffer_load_b32", 6, None, BUFFER, 36), *FINISH], data := filled())
    assert (lanes_of(after, TO)[:, 0] == data[9]).all()


@pytest.mark.parametrize("kind", [0, 1 << 28, 1 << 30])
def test_other_kinds_of_descriptors_are_refused(kind: int) -> None:
    with pytest.raises(Fault, match=r"buffer_load_b32 at \w+ bad instruction"):
        run([*descriptor(BUFFER, 64, kind), mubuf("buffer_load_b32", 6, None, BUFFER)], filled())


def test_descriptors_lie_in_set_0() -> None:
    """A shader adds up the buffers of two bindings, in registers that the driver sets."""
    load = [smem("s_load_b256", 8, 4), WAIT, vop2("v_lshlrev_b32", 1, constant(2), 0)]
    add = [mubuf("buffer_load_b32", 2, 1, 8), mubuf("buffer_load_b32", 3, 1, 12), WAIT,
           vop2("v_add_nc_u32", 2, V(3), 2), mubuf("buffer_store_b32", 2, 1, 8), END]  # fmt: skip
    high = [[*sop1("s_mov_b32", 5, LITERAL), POINTER_HIGH], sop1("s_mov_b32", 4, 2)]
    words = np.array([word for part in [*high, *load, *add] for word in part], np.uint32)
    code = MachineCode(Job("test", (), 32), words.tobytes(), (32, 1, 1), 8, 0, 0, False, 3, 0, None, {}, None,
                       descriptor_set=2)  # fmt: skip
    a, b = filled()[:32], filled()[:30]
    want = a + np.pad(b, (0, 2))
    buffers = [MemoryRange("a", ADDRESS, a, Access.WRITE), MemoryRange("b", 2 * ADDRESS, b)]
    ShaderProgram(code).run((1, 1, 1), b"", buffers, bindings=2)
    np.testing.assert_array_equal(a, want)


def test_the_number_of_a_wave() -> None:
    store = [
        vop1("v_mov_b32", 2, 3),
        vop2("v_lshlrev_b32", 1, constant(2), 0),
        memory("global_store_b32", 1, data=2, base=0),
    ]
    words = np.array([word for part in [*store, END] for word in part], np.uint32)
    code = MachineCode(Job("test", (), 32), words.tobytes(), (96, 1, 1), 8, 0, 0, False, 2, 1, None, {0: 0, 1: 1}, None,
                       wave_number=True)  # fmt: skip
    out = np.zeros(96, np.uint32)
    push = np.array([ADDRESS & 0xFFFFFFFF, ADDRESS >> 32], np.uint32).tobytes()
    ShaderProgram(code).run((1, 1, 1), push, [MemoryRange("out", ADDRESS, out, Access.WRITE)])
    np.testing.assert_array_equal(out, np.repeat([3, 3 | 1 << 20, 3 | 2 << 20], 32))


def test_addresses_of_64_bits() -> None:
    data = filled()
    code = [vop2("v_lshlrev_b32", 1, constant(2), 0), vop1("v_mov_b32", 3, 1), vop1("v_mov_b32", 2, 0),
            vop2("v_add_nc_u32", 2, 256 + 1, 2), memory("global_load_b32", 2, result=4, offset=64), WAIT,
            memory("global_store_b32", 2, data=4, offset=1024)]  # fmt: skip
    after = run(code, data)
    np.testing.assert_array_equal(after[256 : 256 + LANES], data[16 : 16 + LANES])


@pytest.mark.parametrize(
    ("operation", "offset", "message"),
    [
        ("global_load_b32", -4, "reads 4 bytes outside"),
        ("global_store_b32", -4, "writes 4 bytes outside"),
        ("ds_load_b32", 4096 - 64, "outside: LDS byte 4096"),
        ("ds_store_b32", 4096 - 64, "outside: LDS byte 4096"),
    ],
)
def test_outside(operation: str, offset: int, message: str) -> None:
    words = (
        ds(operation, 1, 2, result=6, offset=offset)
        if operation[0] == "d"
        else access(operation, 2, 6, offset)
    )
    with pytest.raises(Fault, match=f"test: {operation} at 0x\\w+ .*{message}"):
        run([*START, words], filled())


def test_waits_are_counted() -> None:
    """Of two loads, waiting until one is left is enough for the first, not for the second."""
    data = filled()
    loads = [memory("global_load_b32", 1, result=6 + i, base=0, offset=4 * i) for i in range(2)]
    one_left = sopp("s_waitcnt", 1 << 10 | 63 << 4 | 7)
    begin = [vop2("v_lshlrev_b32", 1, constant(4), 0), *loads, one_left]
    run([*begin, vop1("v_mov_b32", 9, 256 + 6)], data)
    with pytest.raises(Fault, match=r"v_mov_b32 at 0x\w+ uses a register before s_waitcnt vmcnt"):
        run([*begin, vop1("v_mov_b32", 9, 256 + 7)], data)
    scalars = [smem("s_load_b32", 4 + i, 0) for i in range(2)]
    with pytest.raises(Fault, match="before s_waitcnt lgkmcnt"):  # scalar loads may answer in any order
        run([*scalars, sopp("s_waitcnt", 63 << 10 | 1 << 4 | 7), sop1("s_mov_b32", 6, 4)], data)


def test_waves_of_a_workgroup_race_without_a_barrier() -> None:
    """Each wave stores its number, and reads what the first one stored."""
    store = [vop2("v_lshlrev_b32", 1, constant(2), 0), ds("ds_store_b32", 1, 0), WAIT]
    load = [
        vop1("v_mov_b32", 2, constant(0)),
        ds("ds_load_b32", 2, result=3),
        WAIT,
        memory("global_store_b32", 1, data=3, base=0),
    ]
    with pytest.raises(
        Fault, match=r"races with ds_\w+ at 0x\w+ of wave|never written .*, read by ds_load_b32"
    ):
        run([*store, *load], filled(), waves=4)
    assert not run([*store, sopp("s_barrier"), *load], filled(), waves=4)[: 4 * LANES].any()
    with pytest.raises(Fault, match="races"):  # the barrier does not wait for what is in flight
        run([store[0], store[1], sopp("s_barrier"), *load], filled(), waves=4)


def test_workgroups_race_for_memory() -> None:
    code = [vop2("v_lshlrev_b32", 1, constant(2), 0), memory("global_store_b32", 1, data=0, base=0)]
    with pytest.raises(
        Fault, match=r"global_store_b32 at 0x4 races with global_store_b32 at 0x4 of workgroup"
    ):
        run(code, filled(), groups=2)


def test_every_memory_operation_is_tested() -> None:
    pairs = {
        f"ds_{way}_2addr_{stride}b{bits}"
        for way in ("load", "store")
        for stride in ("", "stride64_")
        for bits in (32, 64)
    }
    here = {*LOADS, *STORES, *BUFFER_ATOMICS, *LDS_ATOMICS, *pairs, "ds_append", "ds_bpermute_b32"}
    here |= {f"s_{kind}_b{32 * dwords}" for kind in ("load", "buffer_load") for dwords in (1, 2, 4, 8, 16)}
    assert {o.name for o in operations() if o.bytes or o.encoding == Encoding.DS} == here


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ([memory("global_store_b32", 1, data=9, base=0)], "undefined store"),
        (
            [vop2("v_add_nc_u32", 3, 256 + 9, 1), memory("global_store_b32", 1, data=3, base=0)],
            "undefined store",
        ),
        ([memory("global_load_b32", 9, result=3, base=0)], "undefined address"),
        ([sopp("s_cbranch_scc0", 0)], "undefined branch"),
        ([sop1("s_mov_b32", EXEC, 20)], "undefined exec"),
    ],
)
def test_registers_that_were_never_written(code: list[list[int]], kind: str) -> None:
    with pytest.raises(Fault, match=rf"depends on a value that was never written \({kind}\)") as fault:
        run([vop2("v_lshlrev_b32", 1, constant(2), 0), *code, sopp("s_nop")], filled())
    assert fault.value.kind == kind


def test_undefined_values_may_be_computed_with() -> None:
    """As compilers do: lanes that are not chosen, bits that are masked."""
    choose = [sop1("s_mov_b32", 106, constant(0)), vop2("v_cndmask_b32", 3, 256 + 1, 9)]
    masked = [sop2("s_and_b32", 5, 20, constant(0)), sopp("s_cbranch_scc1", 0)]
    code = [
        vop2("v_lshlrev_b32", 1, constant(2), 0),
        *choose,
        *masked,
        memory("global_store_b32", 1, data=3, base=0),
    ]
    assert run(code, np.full(64, 5, np.uint32))[0] == 0


@pytest.mark.parametrize(
    ("selectors", "undefined"), [(0x07060500, False), (0x07060600, True), (0x07060501, False)]
)
def test_a_byte_that_is_put_into_a_register_leaves_the_others(selectors: int, undefined: bool) -> None:
    """v9 is undefined; of v1, which is 4 * lane, a byte goes into it."""
    put = [*vop3("v_perm_b32", 9, V(9), V(1), LITERAL), selectors]
    code = [vop2("v_lshlrev_b32", 1, constant(2), 0), put, memory("global_store_b8", 1, data=9, base=0)]
    if undefined:
        with pytest.raises(Fault, match="never written"):
            run(code, filled())
    else:
        stored = run(code, filled()).view(np.uint8)[: 4 * LANES : 4]
        np.testing.assert_array_equal(stored, 4 * np.arange(LANES) >> 8 * (selectors & 1))


def test_scratch_memory_with_a_scalar_offset() -> None:
    """The field of the vector register is then unused: here it names one that a load is still filling."""
    data = filled()
    offset = [sop1("s_mov_b32", 20, constant(8))]
    busy = memory("global_load_b32", 1, result=30, base=0)
    code = [*START, *ZERO, memory("scratch_store_b128", 10, data=2), WAIT, *offset, busy,
            memory("scratch_load_b64", 30, result=6, base=20, sve=0), *FINISH]  # fmt: skip
    np.testing.assert_array_equal(lanes_of(run(code, data), TO)[:, :2], lanes_of(data, FROM)[:, 2:])

"""Every scalar operation and branch, against its meaning in AMD's RDNA3 ISA guide."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tandem.devices.rdna3.emulator import Encoding, Fault, operations
from tests.rdna3.assemble import (
    END,
    EXEC,
    VCC,
    WAIT,
    constant,
    find,
    memory,
    mubuf,
    run,
    smem,
    sop1,
    sop2,
    sopc,
    sopk,
    sopp,
    vop1,
)

RNG = np.random.default_rng(9)
M32, M64 = (1 << 32) - 1, (1 << 64) - 1
GROUPS = 64  # pairs of values, each of which a workgroup computes
SPECIAL = [0, 1, 2, 31, 32, 33, M32, 1 << 31, (1 << 31) - 1, 0xFFFF, 0x50003]
Result = tuple[int, int | None]  # and SCC; None: unchanged


def signed(x: int, bits: int = 32) -> int:
    return (x & ((1 << bits) - 1) ^ 1 << (bits - 1)) - (1 << (bits - 1))


def nonzero(x: int) -> Result:
    return x, int(x != 0)


def field(a: int, b: int) -> int:
    return a >> (b & 31) & ((1 << (b >> 16 & 127)) - 1)


def added(x: int, shift: int, y: int) -> Result:
    total = ((x << shift) & M32) + y
    return total & M32, int((x << shift) + y > M32)


def overflowing(x: int) -> Result:
    return x & M32, int(signed(x) != x)


# (a, b, SCC) -> result and SCC. 64-bit sources where the name says so.
TWO: dict[str, Callable[[int, int, int], Result]] = {
    "s_add_u32": lambda a, b, s: ((a + b) & M32, int(a + b > M32)),
    "s_sub_u32": lambda a, b, s: ((a - b) & M32, int(b > a)),
    "s_add_i32": lambda a, b, s: overflowing(signed(a) + signed(b)),
    "s_sub_i32": lambda a, b, s: overflowing(signed(a) - signed(b)),
    "s_addc_u32": lambda a, b, s: ((a + b + s) & M32, int(a + b + s > M32)),
    "s_subb_u32": lambda a, b, s: ((a - b - s) & M32, int(b + s > a)),
    "s_absdiff_i32": lambda a, b, s: nonzero(abs(signed(a) - signed(b)) & M32),
    "s_lshl_b32": lambda a, b, s: nonzero(a << (b & 31) & M32),
    "s_lshl_b64": lambda a, b, s: nonzero(a << (b & 63) & M64),
    "s_lshr_b32": lambda a, b, s: nonzero(a >> (b & 31)),
    "s_lshr_b64": lambda a, b, s: nonzero(a >> (b & 63)),
    "s_ashr_i32": lambda a, b, s: nonzero(signed(a) >> (b & 31) & M32),
    "s_ashr_i64": lambda a, b, s: nonzero(signed(a, 64) >> (b & 63) & M64),
    **{f"s_lshl{n}_add_u32": lambda a, b, s, n=n: added(a, n, b) for n in range(1, 5)},  # type: ignore[misc]
    "s_min_i32": lambda a, b, s: (min(signed(a), signed(b)) & M32, int(signed(a) < signed(b))),
    "s_min_u32": lambda a, b, s: (min(a, b), int(a < b)),
    "s_max_i32": lambda a, b, s: (max(signed(a), signed(b)) & M32, int(signed(a) >= signed(b))),
    "s_max_u32": lambda a, b, s: (max(a, b), int(a >= b)),
    **{f"s_{name}_b{bits}": lambda a, b, s, f=f, m=m: nonzero(f(a, b) & m)  # type: ignore[misc]
       for bits, m in ((32, M32), (64, M64))
       for name, f in {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
                       "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b), "xnor": lambda a, b: ~(a ^ b),
                       "and_not1": lambda a, b: a & ~b, "or_not1": lambda a, b: a | ~b}.items()},
    "s_bfe_u32": lambda a, b, s: nonzero(field(a, b) & M32),
    "s_bfe_i32": lambda a, b, s: nonzero(signed_field(a, b)),
    "s_bfm_b32": lambda a, b, s: (((1 << (a & 31)) - 1) << (b & 31) & M32, None),
    "s_bfm_b64": lambda a, b, s: (((1 << (a & 63)) - 1) << (b & 63) & M64, None),
    "s_mul_i32": lambda a, b, s: (a * b & M32, None),
    "s_mul_hi_u32": lambda a, b, s: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b, s: (signed(a) * signed(b) >> 32 & M32, None),
    "s_cselect_b32": lambda a, b, s: (a if s else b, None),
    "s_cselect_b64": lambda a, b, s: (a if s else b, None),
    "s_pack_ll_b32_b16": lambda a, b, s: (a & 0xFFFF | (b & 0xFFFF) << 16, None),
    "s_pack_lh_b32_b16": lambda a, b, s: (a & 0xFFFF | b & 0xFFFF0000, None),
    "s_pack_hh_b32_b16": lambda a, b, s: (a >> 16 | b & 0xFFFF0000, None),
}  # fmt: skip


def signed_field(a: int, b: int) -> int:
    width = b >> 16 & 127
    value = signed(a) >> (b & 31) & ((1 << width) - 1)
    return (value - (1 << width) if width and value >> (width - 1) else value) & M32


ONE: dict[str, Callable[[int, int, int], Result]] = {  # (a, the register before, SCC)
    "s_mov_b32": lambda a, d, s: (a, None),
    "s_mov_b64": lambda a, d, s: (a, None),
    "s_cmov_b32": lambda a, d, s: (a if s else d & M32, None),
    "s_brev_b32": lambda a, d, s: (int(f"{a:032b}"[::-1], 2), None),
    "s_ctz_i32_b32": lambda a, d, s: (((a & -a).bit_length() - 1) & M32, None),
    "s_ctz_i32_b64": lambda a, d, s: (((a & -a).bit_length() - 1) & M32, None),
    "s_clz_i32_u32": lambda a, d, s: ((32 - a.bit_length() if a else -1) & M32, None),
    "s_clz_i32_u64": lambda a, d, s: ((64 - a.bit_length() if a else -1) & M32, None),
    "s_sext_i32_i8": lambda a, d, s: (signed(a, 8) & M32, None),
    "s_sext_i32_i16": lambda a, d, s: (signed(a, 16) & M32, None),
    "s_abs_i32": lambda a, d, s: nonzero(abs(signed(a)) & M32),
    "s_bcnt1_i32_b32": lambda a, d, s: nonzero(a.bit_count()),
    "s_bcnt1_i32_b64": lambda a, d, s: nonzero(a.bit_count()),
    "s_not_b32": lambda a, d, s: nonzero(~a & M32),
    "s_not_b64": lambda a, d, s: nonzero(~a & M64),
}
COMPARE: dict[str, Callable[[int, int], bool]] = {
    **{f"s_cmp_{name}_{t}": lambda a, b, f=f, t=t: f(signed(a), signed(b)) if t == "i32" else f(a, b)  # type: ignore[misc]
       for t in ("i32", "u32", "u64")
       for name, f in {"eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b,
                       "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b}.items()
       if t != "u64" or name in ("eq", "lg")},
    "s_bitcmp0_b32": lambda a, b: not a >> (b & 31) & 1,
    "s_bitcmp1_b32": lambda a, b: bool(a >> (b & 31) & 1),
    "s_bitcmp0_b64": lambda a, b: not a >> (b & 63) & 1,
    "s_bitcmp1_b64": lambda a, b: bool(a >> (b & 63) & 1),
}  # fmt: skip
SAVE = {"and": lambda a, e: a & e, "or": lambda a, e: a | e, "xor": lambda a, e: a ^ e, "and_not0": lambda a, e: ~a & e,
        "and_not1": lambda a, e: a & ~e}  # fmt: skip
IMMEDIATE: dict[str, Callable[[int, int, int], Result]] = {  # (the register, the immediate, SCC)
    "s_movk_i32": lambda d, k, s: (signed(k, 16) & M32, None),
    "s_cmovk_i32": lambda d, k, s: (signed(k, 16) & M32 if s else d, None),
    "s_addk_i32": lambda d, k, s: overflowing(signed(d) + signed(k, 16)),
    "s_mulk_i32": lambda d, k, s: (signed(d) * signed(k, 16) & M32, None),
    **{f"s_cmpk_{name}_{t}": lambda d, k, s, f=f, t=t: (d, int(f(signed(d), signed(k, 16)) if t == "i32" else f(d, k)))  # type: ignore[misc]
       for t in ("i32", "u32")
       for name, f in {"eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b,
                       "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b}.items()},
}  # fmt: skip


def compute(
    words: list[int], a: list[int], b: list[int], old: list[int], scc: list[int]
) -> list[tuple[int, int]]:
    """s[8:9] and SCC after an instruction. s[4:5] is a, s[6:7] is b, s[8:9] the old value."""
    data = np.zeros((GROUPS, 16), np.uint32)
    for i, values in enumerate(zip(a, b, old, scc, strict=True)):
        data[i, :8] = np.array(values, np.uint64).view(np.uint32)
    code = [
        sop2("s_lshl_b32", 3, 2, constant(6)), smem("s_load_b128", 4, 0, 0, 3), smem("s_load_b128", 8, 0, 16, 3), WAIT,
        sopc("s_cmp_lg_u32", 10, constant(0)), words, sop2("s_cselect_b32", 12, constant(1), constant(0)),
        sop1("s_mov_b64", EXEC, constant(1)), vop1("v_mov_b32", 1, 3), vop1("v_mov_b32", 2, 8), vop1("v_mov_b32", 3, 9),
        vop1("v_mov_b32", 4, 12), memory("global_store_b96", 1, data=2, base=0, offset=32),
    ]  # fmt: skip
    after = run(code, data.reshape(-1), groups=GROUPS).reshape(GROUPS, 16)[:, 8:11]
    return [(int(low) | int(high) << 32, int(flag)) for low, high, flag in after]


def values(wide: bool) -> list[int]:
    top = M64 if wide else M32
    some = [*SPECIAL, *RNG.integers(0, top, GROUPS, np.uint64, endpoint=True).tolist()]
    return [int(x) for x in RNG.permutation(np.array(some, np.uint64))[:GROUPS]]


def is_wide(name: str) -> bool:
    return name.endswith(("b64", "u64", "i64")) and name != "s_bfm_b64"


def check(
    name: str, words: list[int], meaning: Callable[[int, int, int], Result], wide: bool, wide_result: bool
) -> None:
    a, b, old = values(wide), values(wide), values(True)
    scc = RNG.integers(0, 2, GROUPS).tolist()
    for i, (got, flag) in enumerate(compute(words, a, b, old, scc)):
        want, expected = meaning(a[i], b[i] if meaning in TWO.values() else old[i], scc[i])
        low = got if wide_result else got & M32
        assert (low, flag) == (want, scc[i] if expected is None else expected), (
            f"{name} of {a[i]:#x}, {b[i]:#x}"
        )


@pytest.mark.parametrize("name", TWO)
def test_two_sources(name: str) -> None:
    check(name, sop2(name, 8, 4, 6), TWO[name], is_wide(name), name.endswith("64"))


@pytest.mark.parametrize("name", ONE)
def test_one_source(name: str) -> None:
    check(name, sop1(name, 8, 4), ONE[name], is_wide(name), name in ("s_mov_b64", "s_not_b64"))


@pytest.mark.parametrize("name", COMPARE)
def test_comparison(name: str) -> None:
    a, b = values(is_wide(name)), values(is_wide(name))
    b = [x if RNG.random() < 0.3 else y for x, y in zip(a, b, strict=True)]
    for i, (_, flag) in enumerate(compute(sopc(name, 4, 6), a, b, a, [0] * GROUPS)):
        assert flag == COMPARE[name](a[i], b[i]), f"{name} of {a[i]:#x}, {b[i]:#x}"


@pytest.mark.parametrize("name", IMMEDIATE)
@pytest.mark.parametrize("k", [0, 1, 100, 0x7FFF, 0x8000, 0xFFFF])
def test_immediate(name: str, k: int) -> None:
    old, scc = values(False), RNG.integers(0, 2, GROUPS).tolist()
    old[:8] = [k, k + 1, max(k - 1, 0), signed(k, 16) & M32, M32, 0, 1 << 31, (1 << 31) - 1]
    for i, (got, flag) in enumerate(compute(sopk(name, 8, k), old, old, old, scc)):
        want, expected = IMMEDIATE[name](old[i], k, scc[i])
        assert (got & M32, flag) == (want, scc[i] if expected is None else expected), (
            f"{name} of {old[i]:#x}, {k:#x}"
        )


@pytest.mark.parametrize("stem", SAVE)
@pytest.mark.parametrize("bits", [32, 64])
def test_saveexec(stem: str, bits: int) -> None:
    name, a = f"s_{stem}_saveexec_b{bits}", values(bits == 64)
    top = (1 << bits) - 1
    move = sop1(f"s_mov_b{bits}", EXEC, 6)  # exec is b
    b = values(bits == 64)
    for i, (got, flag) in enumerate(compute([*move, *sop1(name, 8, 4)], a, b, a, [0] * GROUPS)):
        assert (got & top, flag) == (b[i] & top, int(SAVE[stem](a[i], b[i]) & top != 0))
    words = [*move, *sop1(name, 10, 4), *sop1(f"s_mov_b{bits}", 8, EXEC)]
    for i, (got, _) in enumerate(compute(words, a, b, a, [0] * GROUPS)):
        assert got & top == SAVE[stem](a[i], b[i]) & top


BRANCHES = {  # what makes it go, and what does not
    "s_branch": ([], None),
    "s_cbranch_scc0": (
        sopc("s_cmp_eq_u32", constant(1), constant(2)),
        sopc("s_cmp_eq_u32", constant(1), constant(1)),
    ),
    "s_cbranch_scc1": (
        sopc("s_cmp_eq_u32", constant(1), constant(1)),
        sopc("s_cmp_eq_u32", constant(1), constant(2)),
    ),
    "s_cbranch_vccz": (sop1("s_mov_b64", VCC, constant(0)), sop1("s_mov_b64", VCC, constant(8))),
    "s_cbranch_vccnz": (sop1("s_mov_b64", VCC, constant(8)), sop1("s_mov_b64", VCC, constant(0))),
    "s_cbranch_execz": (sop1("s_mov_b64", EXEC, constant(0)), sop1("s_mov_b64", EXEC, constant(1))),
    "s_cbranch_execnz": (sop1("s_mov_b64", EXEC, constant(1)), sop1("s_mov_b64", EXEC, constant(0))),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branch(name: str) -> None:
    for taken, before in zip((True, False), BRANCHES[name], strict=True):
        if before is None:
            continue
        code = [sop1("s_mov_b32", 4, constant(1)), before, sopp(name, 1), sop1("s_mov_b32", 4, constant(2)),
                sop1("s_mov_b64", EXEC, constant(1)), vop1("v_mov_b32", 1, 4), vop1("v_mov_b32", 2, constant(0)),
                memory("global_store_b32", 2, data=1, base=0)]  # fmt: skip
        assert run(code, np.zeros(4, np.uint32))[0] == (1 if taken else 2)


def test_a_loop_ends_where_it_should() -> None:
    body = [sopk("s_addk_i32", 4, 3), sopk("s_cmpk_lt_i32", 4, 30), sopp("s_cbranch_scc1", -3)]
    code = [sop1("s_mov_b32", 4, constant(0)), *body, vop1("v_mov_b32", 1, 4), vop1("v_mov_b32", 2, constant(0)),
            sop1("s_mov_b64", EXEC, constant(1)), memory("global_store_b32", 2, data=1, base=0)]  # fmt: skip
    assert run(code, np.zeros(4, np.uint32))[0] == 30


HINTS = ["s_nop", "s_sleep", "s_set_inst_prefetch_distance", "s_clause", "s_delay_alu", "s_waitcnt_depctr", "s_setprio",
         "s_sendmsg", "s_icache_inv", "s_barrier", "s_waitcnt"]  # fmt: skip


def test_hints_change_nothing() -> None:
    hints = [
        *(sopp(name) for name in HINTS),
        sopk("s_waitcnt_vscnt", 124, 0),
        mubuf("buffer_gl0_inv"),
        mubuf("buffer_gl1_inv"),
    ]
    code = [vop1("v_mov_b32", 1, constant(7)), vop1("v_mov_b32", 2, constant(0)), *hints,
            sop1("s_mov_b64", EXEC, constant(1)), memory("global_store_b32", 2, data=1, base=0), END]  # fmt: skip
    assert run(code, np.zeros(4, np.uint32))[0] == 7


def test_an_unknown_instruction_is_refused() -> None:
    with pytest.raises(Fault, match=r"test: the emulator does not know the instruction bf9e0000 at 0x4"):
        run([sopp("s_nop"), [0xBF9E0000]], np.zeros(4, np.uint32))


def test_every_scalar_operation_is_tested() -> None:
    here = {
        *TWO,
        *ONE,
        *COMPARE,
        *IMMEDIATE,
        *BRANCHES,
        *HINTS,
        "s_waitcnt_vscnt",
        "s_endpgm",
        "buffer_gl0_inv",
    }
    here |= {"buffer_gl1_inv", *(f"s_{stem}_saveexec_b{bits}" for stem in SAVE for bits in (32, 64))}
    caches = {o.name for o in operations() if o.encoding == Encoding.MUBUF and not o.bytes}
    scalar = caches | {o.name for o in operations() if o.encoding <= Encoding.SOPP}
    assert scalar == here and find("s_endpgm").opcode == 48

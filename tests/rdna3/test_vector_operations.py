"""Every operation that the emulator knows, against its meaning in AMD's RDNA3 ISA guide, written again in NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path

import numpy as np
import pytest

from tandem.devices.rdna3.emulator import Encoding, operations
from tests.rdna3.assemble import (
    EXEC,
    VCC,
    WAIT,
    Array,
    V,
    constant,
    dpp8,
    dpp16,
    find,
    memory,
    run,
    smem,
    sop1,
    vop1,
    vop2,
    vop3,
    vop3p,
    vopc,
)
from tests.rdna3.meanings import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    INEXACT,
    LANES,
    RNG,
    U8,
    U16,
    U32,
    U64,
    VECTOR,
    Values,
    bits,
    dot,
    floats,
    fma,
    halves,
    integers,
    make,
)

# v1: 4 * lane. Sources are v2, v4 and v6 (and the next ones), the result is v8 and v9.
PROLOGUE = [vop2("v_lshlrev_b32", 1, constant(2), 0), *(
    memory("global_load_b32", 1, result=2 + i, base=0, offset=256 * i) for i in range(8)
), smem("s_load_b64", VCC, 0, 2048), sop1("s_mov_b64", 10, constant(0)), WAIT]  # fmt: skip
EPILOGUE = [sop1("s_mov_b64", EXEC, constant(-1)), *(
    memory("global_store_b32", 1, data=8 + i, base=0, offset=2304 + 256 * i) for i in range(2)
), vop1("v_mov_b32", 10, 10), memory("global_store_b32", 1, data=10, base=0, offset=2816)]  # fmt: skip


def compute(
    words: list[int], sources: list[Array], old: Array | None = None, vcc: int = 0
) -> tuple[Array, Array]:
    """The result of an instruction as 64 bits a lane, and s10. Sources: 64 bits a lane."""
    data = np.zeros(1024, U32)
    for i, values in enumerate(
        [*sources, *[np.zeros(LANES, U64)] * (3 - len(sources)), np.zeros(LANES) if old is None else old]
    ):
        both = values.astype(U64).view(U32).reshape(-1, 2)
        data[128 * i : 128 * i + LANES], data[128 * i + 64 : 128 * i + 64 + LANES] = both[:, 0], both[:, 1]
    data[512] = vcc
    after = run([*PROLOGUE, words, *EPILOGUE], data)
    low, high = after[576 : 576 + LANES].astype(U64), after[640 : 640 + LANES].astype(U64)
    return low | high << U64(32), after[704 : 704 + LANES]


def encode(name: str, count: int, **modifiers: int) -> list[int]:
    """With v2, v4, v6 as sources and v8 as result, in the shortest encoding if there are no modifiers."""
    encoding, sources = find(name).encoding, [V(2), V(4), V(6)][:count]
    if encoding == Encoding.VOP3P:
        return vop3p(name, 8, *sources, **{"select_high": 0, **modifiers})
    if encoding == Encoding.VOP1 and not modifiers:
        return vop1(name, 8, V(2))
    if encoding == Encoding.VOP2 and not modifiers:
        return vop2(name, 8, V(2), 4)
    return vop3(name, 8, *sources, **modifiers)


def assert_same(name: str, got: Array, want: Values, kind: type, old: Array) -> None:
    expected = bits(want, kind)
    if kind in (F32, F16):
        low = got.astype(U32) if kind is F32 else got.astype(U16)
        found, wanted = (
            low.view(kind).astype(np.float64),
            expected.astype(low.dtype).view(kind).astype(np.float64),
        )
        np.testing.assert_allclose(
            found, wanted, 4e-7 if name in INEXACT else 0, 1e-6 if name in INEXACT else 0, err_msg=name
        )
    elif kind in (U64, I64):
        np.testing.assert_array_equal(got, expected, name)
    else:
        np.testing.assert_array_equal(
            got.astype(U32) & (0xFFFF if kind in (U16, I16) else 0xFFFFFFFF), expected, name
        )
    if kind in (U16, I16, F16):
        np.testing.assert_array_equal(
            got >> U64(16) & U64(0xFFFF), old >> U64(16) & U64(0xFFFF), f"{name}: high half"
        )


@pytest.mark.parametrize("name", VECTOR)
@np.errstate(all="ignore")
def test_vector(name: str) -> None:
    kind, result, meaning = VECTOR[name]
    count = sum(p.default is p.empty for p in signature(meaning).parameters.values())
    for _ in range(4):
        given = [make(kind, LANES) for _ in range(count)]
        old = RNG.integers(0, 1 << 64, LANES, U64)
        typed = [a.astype(U16).view(kind) if kind in (U16, I16, F16) else a.view(kind) for a in given]
        want = meaning(*typed)
        got, _ = compute(encode(name, count), [a.astype(U64) for a in given], old)
        assert_same(name, got, want, result, old)
        if find(name).encoding in (Encoding.VOP1, Encoding.VOP2):  # and in the long encoding
            got, _ = compute(vop3(name, 8, *[V(2), V(4)][:count]), [a.astype(U64) for a in given], old)
            assert_same(name, got, want, result, old)


WIDE: dict[str, Callable[[Values, Values], Values]] = {
    "v_lshlrev_b64": lambda a, b: b << (a & U64(63)),
    "v_lshrrev_b64": lambda a, b: b >> (a & U64(63)),
    "v_ashrrev_i64": lambda a, b: (b.view(I64) >> (a & U64(63)).astype(I64)).view(U64),
}


@pytest.mark.parametrize("name", WIDE)
def test_64_bits(name: str) -> None:
    a, b = RNG.integers(0, 1 << 32, LANES, U64), RNG.integers(0, 1 << 64, LANES, U64)
    got, _ = compute(encode(name, 2), [a, b])
    np.testing.assert_array_equal(got, WIDE[name](a, b))


RELATIONS: dict[str, Callable[[Values, Values], Values]] = {
    "lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ne": lambda a, b: a != b, "ge": lambda a, b: a >= b, "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: (a == a) & (b == b), "u": lambda a, b: (a != a) | (b != b), "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)), "ngt": lambda a, b: ~(a > b), "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b), "nlt": lambda a, b: ~(a < b),
}  # fmt: skip
TYPES = {"f16": F16, "f32": F32, "i16": I16, "u16": U16, "i32": I32, "u32": U32, "i64": I64, "u64": U64}
OF_INTEGERS = ("lt", "eq", "le", "gt", "ne", "ge")
COMPARED = [f"{r}_{t}" for t in TYPES for r in (set(RELATIONS) - {"ne"} if t[0] == "f" else OF_INTEGERS)]
COMPARED.sort()


@pytest.mark.parametrize("suffix", COMPARED)
def test_comparison(suffix: str) -> None:
    relation, kind = RELATIONS[suffix.split("_")[0]], TYPES[suffix.split("_")[1]]
    size = np.dtype(kind).itemsize
    a = RNG.integers(0, 1 << 64, LANES, U64) if size == 8 else make(kind, LANES).astype(U64)
    b = np.where(RNG.random(LANES) < 0.3, a, RNG.permutation(a))
    x, y = (v.view(kind) if size == 8 else v.astype(f"u{size}").view(kind) for v in (a, b))
    want = sum(int(bit) << lane for lane, bit in enumerate(relation(x, y)))
    _, found = compute(vop3(f"v_cmp_{suffix}", 10, V(2), V(4)), [a, b])
    assert int(found[0]) == want
    short = [*vopc(f"v_cmp_{suffix}", V(2), 4), *sop1("s_mov_b32", 10, VCC)]
    assert int(compute(short, [a, b])[1][0]) == want
    exec_ = [*vopc(f"v_cmpx_{suffix}", V(2), 4), *sop1("s_mov_b32", 10, EXEC)]
    assert int(compute(exec_, [a, b])[1][0]) == want


@pytest.mark.parametrize(("suffix", "kind", "width"), [("class_f16", F16, 10), ("class_f32", F32, 23)])
def test_class(suffix: str, kind: type, width: int) -> None:
    a, wanted = make(kind, LANES), RNG.integers(0, 1024, LANES).astype(U32)
    x = a.astype(U16).view(F16) if kind is F16 else a.view(F32)
    tiny = np.finfo(kind).tiny
    sign, quiet = np.signbit(x), a >> (width - 1) & 1 == 1
    classes = [np.isnan(x) & ~quiet, np.isnan(x) & quiet, np.isneginf(x), sign & np.isfinite(x) & (np.abs(x) >= tiny),
               sign & (x != 0) & (np.abs(x) < tiny), sign & (x == 0), ~sign & (x == 0), ~sign & (x != 0) & (x < tiny),
               ~sign & np.isfinite(x) & (x >= tiny), np.isposinf(x)]  # fmt: skip
    want = sum(
        1 << lane
        for lane in range(LANES)
        if any(classes[i][lane] and wanted[lane] >> i & 1 for i in range(10))
    )
    for name in (f"v_cmp_{suffix}", f"v_cmpx_{suffix}"):
        code = [*vopc(name, V(2), 4), *sop1("s_mov_b32", 10, EXEC if "cmpx" in name else VCC)]
        assert int(compute(code, [a.astype(U64), wanted.astype(U64)])[1][0]) == want


# ---- accumulators, literals, modifiers


def test_fused_multiply_adds() -> None:
    a, b, d = (floats(LANES).view(F32) for _ in range(3))
    given = [x.view(U32).astype(U64) for x in (a, b)]
    k = np.float32(0.75)
    literal = int(k.view(U32))
    for words, want in (
        (vop2("v_fmac_f32", 8, V(2), 4), fma(a, b, d)),
        ([*vop2("v_fmamk_f32", 8, V(2), 4), literal], fma(a, np.full(LANES, k), b)),
        ([*vop2("v_fmaak_f32", 8, V(2), 4), literal], fma(a, b, np.full(LANES, k))),
    ):
        got, _ = compute(words, given, d.view(U32).astype(U64))
        np.testing.assert_array_equal(got.astype(U32).view(F32), want)
    a, b, d = (halves(LANES).astype(U16).view(F16) for _ in range(3))
    got, _ = compute(
        vop2("v_fmac_f16", 8, V(2), 4), [x.view(U16).astype(U64) for x in (a, b)], d.view(U16).astype(U64)
    )
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got.astype(U16).view(F16), (a.astype(np.float64) * b + d).astype(F16))


@np.errstate(all="ignore")
def test_modifiers() -> None:
    a, b = floats(LANES).view(F32), floats(LANES).view(F32)
    given = [x.view(U32).astype(U64) for x in (a, b)]
    for modifiers, want in (
        ({"negate": 1}, -a + b), ({"negate": 2}, a - b), ({"absolute": 1}, np.abs(a) + b),
        ({"absolute": 2, "negate": 2}, a - np.abs(b)), ({"multiply": 1}, (a + b) * 2), ({"multiply": 2}, (a + b) * 4),
        ({"multiply": 3}, (a + b) / 2), ({"clamp": 1}, np.nan_to_num(np.clip(a + b, 0, 1), nan=0.0)),
    ):  # fmt: skip
        got, _ = compute(vop3("v_add_f32", 8, V(2), V(4), **modifiers), given)
        np.testing.assert_array_equal(got.astype(U32).view(F32), want.astype(F32), str(modifiers))
    h = RNG.integers(0, 1 << 32, LANES, U32)
    got, _ = compute(vop3("v_cvt_f32_f16", 8, V(2), high=1), [h.astype(U64)])
    np.testing.assert_array_equal(got.astype(U32).view(F32), (h >> 16).astype(U16).view(F16).astype(F32))
    # The high half, in the short encoding.
    got, _ = compute(vop1("v_cvt_f32_f16", 8, V(2 + 128)), [h.astype(U64)])
    np.testing.assert_array_equal(got.astype(U32).view(F32), (h >> 16).astype(U16).view(F16).astype(F32))
    old = RNG.integers(0, 1 << 32, LANES, U64)
    got, _ = compute(vop1("v_cvt_f16_f32", 8 + 128, V(2)), [given[0]], old)
    np.testing.assert_array_equal(got >> U64(16), a.astype(F16).view(U16))
    np.testing.assert_array_equal(got & U64(0xFFFF), old & U64(0xFFFF))


def test_constants_are_those_of_the_guide() -> None:
    inline = {128: 0, 192: 64, 193: -1, 208: -16}
    for source, want in inline.items():
        got, _ = compute(vop1("v_mov_b32", 8, source), [])
        assert (got.astype(U32).view(I32) == want).all()
    for source, value in zip(range(240, 249), (0.5, -0.5, 1, -1, 2, -2, 4, -4, 1 / (2 * np.pi)), strict=True):
        got, _ = compute(vop1("v_mov_b32", 8, source), [])
        np.testing.assert_array_equal(got.astype(U32).view(F32), F32(value))
        got, _ = compute(vop2("v_add_f16", 8, source, 4), [np.zeros(LANES, U64)] * 2)
        np.testing.assert_array_equal(got.astype(U16).view(F16), F16(value))


# ---- carries, selection, lanes


def test_carries() -> None:
    a, b = integers(LANES).astype(U64), integers(LANES).astype(U64)
    vcc = int(RNG.integers(0, 1 << 32))
    given = np.array([vcc >> lane & 1 for lane in range(LANES)], U64)
    for name, total in (("add", a + b), ("sub", a - b)):
        got, out = compute(vop3(f"v_{name}_co_u32", 8, V(2), V(4), scalar=10), [a, b])
        np.testing.assert_array_equal(got.astype(U32), total.astype(U32))
        assert int(out[0]) == sum(int(x >> U64(32) != 0) << lane for lane, x in enumerate(total))
    for name, total in (("add", a + b + given), ("sub", a - b - given)):
        short = [*vop2(f"v_{name}_co_ci_u32", 8, V(2), 4), *sop1("s_mov_b32", 10, VCC)]
        for words in (short, vop3(f"v_{name}_co_ci_u32", 8, V(2), V(4), VCC, scalar=10)):
            got, out = compute(words, [a, b], vcc=vcc)
            np.testing.assert_array_equal(got.astype(U32), total.astype(U32))
            assert int(out[0]) == sum(int(x >> U64(32) != 0) << lane for lane, x in enumerate(total))
    c = RNG.integers(0, 1 << 64, LANES, U64)
    got, out = compute(vop3("v_mad_u64_u32", 8, V(2), V(4), V(6), scalar=10), [a, b, c])
    np.testing.assert_array_equal(got, a * b + c)
    assert int(out[0]) == sum(
        int(int(x) * int(y) + int(z) >> 64) << i for i, (x, y, z) in enumerate(zip(a, b, c, strict=True))
    )


def test_selection() -> None:
    a, b = integers(LANES).astype(U64), integers(LANES).astype(U64)
    vcc = int(RNG.integers(0, 1 << 32))
    want = [y if vcc >> lane & 1 else x for lane, (x, y) in enumerate(zip(a, b, strict=True))]
    for words in (vop2("v_cndmask_b32", 8, V(2), 4), vop3("v_cndmask_b32", 8, V(2), V(4), VCC)):
        np.testing.assert_array_equal(compute(words, [a, b], vcc=vcc)[0].astype(U32), want)


def test_lanes() -> None:
    a, old = integers(LANES).astype(U64), integers(LANES).astype(U64)
    assert int(compute(vop1("v_readfirstlane_b32", 10, V(2)), [a])[1][0]) == a[0]
    later = [*sop1("s_mov_b32", EXEC, constant(-16)), *vop1("v_readfirstlane_b32", 10, V(2))]
    assert int(compute(later, [a])[1][0]) == a[4]
    assert int(compute(vop3("v_readlane_b32", 10, V(2), constant(7)), [a])[1][0]) == a[7]
    got, _ = compute(vop3("v_writelane_b32", 8, constant(5), constant(3)), [], old)
    np.testing.assert_array_equal(got, [5 if lane == 3 else x for lane, x in enumerate(old)])
    got, _ = compute(vop1("v_permlane64_b32", 8, V(2)), [a])
    np.testing.assert_array_equal(got.astype(U32), a)  # does nothing to 32 lanes
    select = RNG.integers(0, 16, 16)
    s = [sum(int(x) << 4 * i for i, x in enumerate(half)) for half in (select[:8], select[8:])]
    load = [*sop1("s_mov_b32", 4, 255), s[0], *sop1("s_mov_b32", 5, 255), s[1]]
    for name, row in (("v_permlane16_b32", 0), ("v_permlanex16_b32", 16)):
        got, _ = compute([*load, *vop3(name, 8, V(2), 4, 5)], [a])
        np.testing.assert_array_equal(
            got.astype(U32), [a[(lane & 16 ^ row) + select[lane & 15]] for lane in range(LANES)]
        )
    got, _ = compute([*vop1("v_swap_b32", 8, V(2)), *vop1("v_mov_b32", 9, V(2))], [a], old)
    np.testing.assert_array_equal(got, a | old << U64(32))
    got, _ = compute([*vop1("v_swap_b16", 8 + 128, V(2)), *vop1("v_mov_b32", 9, V(2))], [a], old)
    mask = U64(0xFFFF)
    low = old & mask | (a & mask) << U64(16)
    np.testing.assert_array_equal(got, low | (a & ~mask | old >> U64(16)) << U64(32))


def test_permlane64_of_64_lanes() -> None:
    data = np.zeros(128, U32)
    code = [vop2("v_lshlrev_b32", 1, constant(2), 0), vop1("v_permlane64_b32", 2, V(0)),
            memory("global_store_b32", 1, data=2, base=0)]  # fmt: skip
    np.testing.assert_array_equal(run(code, data, lanes=64)[:64], np.arange(64) ^ 32)


DPP: dict[str, tuple[int, Callable[[int], int]]] = {
    "quad_perm": (0b00011011, lambda i: i & ~3 | 3 - (i & 3)),
    "row_shl": (0x103, lambda i: i + 3 if i & 15 < 13 else -1),
    "row_shr": (0x113, lambda i: i - 3 if i & 15 >= 3 else -1),
    "row_ror": (0x125, lambda i: i & 16 | i - 5 & 15),
    "row_mirror": (0x140, lambda i: i ^ 15),
    "row_half_mirror": (0x141, lambda i: i ^ 7),
    "row_share": (0x152, lambda i: i & 16 | 2),
    "row_xmask": (0x166, lambda i: i ^ 6),
}


@pytest.mark.parametrize("name", DPP)
def test_dpp(name: str) -> None:
    control, source = DPP[name]
    a, b, old = (integers(LANES).astype(U64) for _ in range(3))
    got, _ = compute(dpp16("v_add_nc_u32", 8, 2, 4, control), [a, b], old)
    want = [(a[source(i)] + b[i]) & U64(0xFFFFFFFF) if source(i) >= 0 else old[i] for i in range(LANES)]
    np.testing.assert_array_equal(got.astype(U32), want)
    got, _ = compute(dpp16("v_mov_b32", 8, 2, -1, control, bound=1), [a], old)
    np.testing.assert_array_equal(
        got.astype(U32), [a[source(i)] if source(i) >= 0 else 0 for i in range(LANES)]
    )
    got, _ = compute(dpp16("v_mov_b32", 8, 2, -1, control, rows=1, bound=1), [a], old)
    np.testing.assert_array_equal(got.astype(U32)[16:], old[16:].astype(U32))


def test_dpp8() -> None:
    a, order = integers(LANES).astype(U64), [3, 1, 0, 2, 7, 7, 5, 4]
    got, _ = compute(dpp8("v_mov_b32", 8, 2, order), [a])
    np.testing.assert_array_equal(got.astype(U32), [a[i & ~7 | order[i & 7]] for i in range(LANES)])


# ---- packed halves, dot products, matrices


@np.errstate(all="ignore")
def test_packed_halves() -> None:
    a, b, c = ((halves(LANES) | halves(LANES) << 16) for _ in range(3))
    x, y, z = (v.view(F16).reshape(-1, 2).astype(np.float64) for v in (a, b, c))
    given = [v.astype(U64) for v in (a, b, c)]
    for name, count, want in (
        ("v_pk_add_f16", 2, x + y), ("v_pk_mul_f16", 2, x * y), ("v_pk_fma_f16", 3, x * y + z),
        ("v_pk_min_f16", 2, np.fmin(x, y)), ("v_pk_max_f16", 2, np.fmax(x, y)),
    ):  # fmt: skip
        got, _ = compute(encode(name, count, select_high=7), given)
        np.testing.assert_array_equal(got.astype(U32).view(F16).reshape(-1, 2), want.astype(F16), name)
    got, _ = compute(
        vop3p("v_pk_add_f16", 8, V(2), V(4), high=1, select_high=1, negate=2, negate_high=1), given
    )
    want = np.stack([x[:, 1] - y[:, 0], -x[:, 1] + y[:, 0]], axis=1)
    np.testing.assert_array_equal(got.astype(U32).view(F16).reshape(-1, 2), want.astype(F16))


def test_packed_integers() -> None:
    a, b, c = (integers(LANES) for _ in range(3))
    x, y, z = (v.view(U16).reshape(-1, 2).astype(U32) for v in (a, b, c))
    for name, count, want in (
        ("v_pk_mul_lo_u16", 2, x * y), ("v_pk_lshlrev_b16", 2, y << (x & 15)), ("v_pk_lshrrev_b16", 2, y >> (x & 15)),
        ("v_pk_mad_u16", 3, x * y + z), ("v_pk_add_u16", 2, x + y), ("v_pk_sub_u16", 2, x - y),
    ):  # fmt: skip
        got, _ = compute(encode(name, count, select_high=7), [v.astype(U64) for v in (a, b, c)])
        np.testing.assert_array_equal(got.astype(U32).view(U16).reshape(-1, 2), want.astype(U16), name)


def test_dot_products() -> None:
    a, b, c = (integers(LANES) for _ in range(3))
    given = [v.astype(U64) for v in (a, b, c)]
    for negate, kinds in enumerate([(U8, U8), (I8, U8), (U8, I8), (I8, I8)]):
        got, _ = compute(vop3p("v_dot4_i32_iu8", 8, V(2), V(4), V(6), negate=negate), given)
        np.testing.assert_array_equal(got.astype(U32), dot(a, b, c, *kinds))
    x, y = (RNG.normal(size=(LANES, 2)).astype(F16) for _ in range(2))
    z = RNG.normal(size=LANES).astype(F32)
    got, _ = compute(encode("v_dot2_f32_f16", 3), [v.view(U32).reshape(-1).astype(U64) for v in (x, y, z)])
    want = (x.astype(F32) * y).sum(axis=1) + z
    np.testing.assert_allclose(got.astype(U32).view(F32), want, 1e-5, 1e-6)


def test_mixed_fma() -> None:
    a, b, c = (RNG.normal(size=LANES).astype(F32).view(U32) for _ in range(3))
    given, old = [v.astype(U64) for v in (a, b, c)], integers(LANES).astype(U64)
    high = (b >> 16).astype(U16).view(F16).astype(F32)
    low = (a & 0xFFFF).astype(U16).view(F16).astype(F32)
    with np.errstate(all="ignore"):
        cases = (
            ({"select_high": 0}, fma(a.view(F32), b.view(F32), c.view(F32))),
            ({"select_high": 3, "high": 2}, fma(low, high, c.view(F32))),
            (
                {"select_high": 3, "high": 2, "negate": 4, "negate_high": 1},
                fma(np.abs(low), high, -c.view(F32)),
            ),
        )
        for modifiers, want in cases:
            got, _ = compute(vop3p("v_fma_mix_f32", 8, V(2), V(4), V(6), **modifiers), given)
            np.testing.assert_array_equal(got.astype(U32).view(F32), want)
            got, _ = compute(vop3p("v_fma_mixlo_f16", 8, V(2), V(4), V(6), **modifiers), given, old)
            np.testing.assert_array_equal(got, old & U64(0xFFFF0000) | want.astype(F16).view(U16))
            got, _ = compute(vop3p("v_fma_mixhi_f16", 8, V(2), V(4), V(6), **modifiers), given, old)
            np.testing.assert_array_equal(
                got, old & U64(0xFFFF) | want.astype(F16).view(U16).astype(U64) << U64(16)
            )


@pytest.mark.parametrize("lanes", [32, 64])
@pytest.mark.parametrize(
    ("name", "high"),
    [("v_wmma_f32_16x16x16_f16", 0), ("v_wmma_f16_16x16x16_f16", 0), ("v_wmma_f16_16x16x16_f16", 1),
     ("v_wmma_i32_16x16x16_iu8", 0)],
)  # fmt: skip
def test_matrices(name: str, high: int, lanes: int) -> None:
    """Lane l holds row l % 16 of A and column l % 16 of B; C's rows go over groups of 16 lanes, then over registers.
    Halves of C lie in the low or the high half of a dword, of which the other half stays."""
    if name.endswith("f16"):
        a, b = (RNG.normal(size=(16, 16)).astype(F16) for _ in range(2))
        c = RNG.normal(size=(16, 16)).astype(F32)
        want, signed = a.astype(F32) @ b.astype(F32) + c, 0
        if "_f16_16" in name:
            halves_of_c = c.astype(F16)
            want = a.astype(F32) @ b.astype(F32) + halves_of_c.astype(F32)
            c = np.stack([halves_of_c.view(U16)] * 2, axis=-1)
            c[..., 1 - high] = 77
            c = c.view(U32)[..., 0]
    else:
        a, b = RNG.integers(-128, 128, (16, 16)).astype(I8), RNG.integers(0, 256, (16, 16)).astype(U8)
        c = RNG.integers(-1000, 1000, (16, 16)).astype(I32)
        want, signed = a.astype(I32) @ b.astype(I32) + c, 1
    words, groups = a.itemsize * 4, lanes // 16
    data = np.zeros(64 * 40, U32)
    rows = data.reshape(-1, 64)[:, :lanes]
    for lane in range(lanes):
        rows[:words, lane] = a[lane % 16].view(U32)
        rows[8 : 8 + words, lane] = np.ascontiguousarray(b[:, lane % 16]).view(U32)
    for m in range(16):
        rows[16 + m // groups, m % groups * 16 : m % groups * 16 + 16] = c[m].view(U32)
    load = [memory("global_load_b32", 1, result=8 + i, base=0, offset=4 * 64 * i % 4096) for i in range(16)]
    far = [vop2("v_add_nc_u32", 2, 255, 1), [4096]]
    load += [
        *far,
        *(memory("global_load_b32", 2, result=24 + i, base=0, offset=256 * i) for i in range(16 // groups)),
    ]
    store = [memory("global_store_b32", 2, data=24 + i, base=0, offset=256 * i) for i in range(16 // groups)]
    code = [vop2("v_lshlrev_b32", 1, constant(2), 0), *load, WAIT,
            vop3p(name, 24, V(8), V(16), V(24), negate=signed, select_high=0, high=4 * high), *store]  # fmt: skip
    after = run(code, data, lanes=lanes).reshape(-1, 64)
    found = np.stack([after[16 + m // groups, m % groups * 16 : m % groups * 16 + 16] for m in range(16)])
    if "_f16_16" in name:
        pairs = found.view(U16).reshape(16, 16, 2)
        assert (pairs[..., 1 - high] == 77).all()
        np.testing.assert_allclose(pairs[..., high].copy().view(F16), want, 1e-3, 1e-3)
        return
    got = found.view(want.dtype)
    np.testing.assert_allclose(got, want, 1e-5, 1e-5)


def test_ldexp() -> None:
    a, b = RNG.normal(size=LANES).astype(F32), RNG.integers(-20, 20, LANES).astype(I32)
    got, _ = compute(vop3("v_ldexp_f32", 8, V(2), V(4)), [a.view(U32).astype(U64), b.view(U32).astype(U64)])
    np.testing.assert_array_equal(got.astype(U32).view(F32), np.ldexp(a, b))


def test_every_vector_operation_is_tested() -> None:
    compared = {f"v_cmp{x}_{suffix}" for x in ("", "x") for suffix in [*COMPARED, "class_f16", "class_f32"]}
    carries = {f"v_{name}_{carry}_u32" for name in ("add", "sub") for carry in ("co", "co_ci")}
    here = {*VECTOR, *WIDE, *compared, *carries, *re.findall(r'"(v_\w+)"', Path(__file__).read_text())}
    assert not {o.name for o in operations() if Encoding.VOP1 <= o.encoding <= Encoding.VOP3P} - here


# VOPD: number, and the operation alone. The last three are for the second half only.
DUAL = {0: "v_fmac_f32", 3: "v_mul_f32", 4: "v_add_f32", 5: "v_sub_f32", 6: "v_subrev_f32", 8: "v_mov_b32",
        9: "v_cndmask_b32", 10: "v_max_f32", 11: "v_min_f32", 16: "v_add_nc_u32", 17: "v_lshlrev_b32",
        18: "v_and_b32"}  # fmt: skip


@pytest.mark.parametrize("first", [number for number in DUAL if number < 16])
def test_dual_instructions_read_before_they_write(first: int) -> None:
    """v8 = first(v9, v4), v9 = second(v8, v6): each reads what the other had."""
    a, b, old = (RNG.integers(0, 1 << 31, LANES, U64) for _ in range(3))
    old |= RNG.integers(0, 1 << 31, LANES, U64) << U64(32)
    for second, name in DUAL.items():
        words = [
            0xC8000000 | first << 22 | second << 17 | 4 << 9 | V(9),
            V(8) | 6 << 9 | 9 >> 1 << 17 | 8 << 24,
        ]
        got, _ = compute(words, [a, a, b], old, vcc=0xF0F0F0F0)

        def alone(name: str, result: int, source: int, other: int) -> Array:
            words = (
                vop1(name, result, V(source)) if name == "v_mov_b32" else vop2(name, result, V(source), other)
            )
            return compute(words, [a, a, b], old, vcc=0xF0F0F0F0)[0]

        want = alone(DUAL[first], 8, 9, 4) & U64(0xFFFFFFFF) | alone(name, 9, 8, 6) & ~U64(0xFFFFFFFF)
        np.testing.assert_array_equal(got, want, f"{DUAL[first]} and {name}")

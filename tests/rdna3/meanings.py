"""What vector operations mean, in NumPy, and values to try them on."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from tests.rdna3.assemble import Array

Values = Any  # NumPy arrays, a value a lane
RNG = np.random.default_rng(7)
U8, I8, U16, I16, F16 = np.uint8, np.int8, np.uint16, np.int16, np.float16
U32, I32, F32, U64, I64 = np.uint32, np.int32, np.float32, np.uint64, np.int64
LANES = 32


def floats(count: int) -> Array:
    """Float32 values of all sizes as bits, the special ones among them."""
    special = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, 3.5, np.inf, -np.inf, np.nan, 1e30, -1e30, 2.0**31, 2.0**32]
    values = np.concatenate([special, RNG.normal(size=count) * 10.0 ** RNG.integers(-6, 7, count)]).astype(
        F32
    )
    return RNG.permutation(values[:count]).view(U32)


def halves(count: int) -> Array:
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 6e-8, 65504.0, 0.1]
    values = np.concatenate([special, RNG.normal(size=count) * 10.0 ** RNG.integers(-2, 3, count)]).astype(
        F16
    )
    return RNG.permutation(values[:count]).view(U16).astype(U32)


def integers(count: int) -> Array:
    special = [0, 1, 2, 31, 32, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 0xFFFF, 0x10000, 0x00FFFFFF]
    values = np.concatenate([special, RNG.integers(0, 1 << 32, count), RNG.integers(0, 40, count)]).astype(
        U32
    )
    return RNG.permutation(values)[:count].astype(U32)


def make(kind: type, count: int) -> Array:
    return floats(count) if kind is F32 else halves(count) if kind is F16 else integers(count)


def bits(values: Values, kind: type) -> Array:
    """Results as 32 bits, or as 64."""
    if kind in (U64, I64):
        return np.asarray(values).astype(kind).view(U64)
    if kind is F16:
        return np.asarray(values).astype(F16).view(U16).astype(U32)
    if kind in (U16, I16):
        return np.asarray(values).astype(U32) & 0xFFFF
    return np.asarray(values).astype(kind).view(U32)


# ---- meanings


def reversed_bits(a: Values) -> Values:
    return np.array([int(f"{int(x):032b}"[::-1], 2) for x in a], U32)


def leading(a: Values, width: int = 32) -> Values:
    return np.array([width - int(x).bit_length() if x else -1 for x in a], I32)


def trailing(a: Values) -> Values:
    return np.array([(int(x) & -int(x)).bit_length() - 1 if x else -1 for x in a], I32)


def ones(a: Values) -> Values:
    return np.array([int(x).bit_count() for x in a], U32)


def fma(a: Values, b: Values, c: Values) -> Values:
    """Rounded once: the float32 that is nearest to the exact value."""
    with np.errstate(all="ignore"):
        near = (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(F32)
        for i in np.flatnonzero(np.isfinite(near) & np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
            exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
            around = [np.nextafter(near[i], F32(to)) for to in (-np.inf, np.inf)]
            near[i] = min([near[i], *around], key=lambda x: abs(Fraction(float(x)) - exact))
        return near


def field(a: Values, offset: Values, width: Values) -> Values:
    return np.array(
        [int(x) >> int(o) & ((1 << int(w)) - 1) for x, o, w in zip(a, offset, width, strict=True)], U32
    )


def signed_field(a: Values, offset: Values, width: Values) -> Values:
    found = []
    for x, o, w in zip(a.astype(U32).view(I32), offset, width, strict=True):
        value = (int(x) >> int(o)) & ((1 << int(w)) - 1)
        found.append(value - (1 << int(w)) if w and value >> (int(w) - 1) else value)
    return np.array(found, I64).astype(I32)


def to_integer(a: Values, low: int, high: int) -> Values:
    return np.array([0 if np.isnan(x) else int(min(max(np.trunc(float(x)), low), high)) for x in a], I64)


def toward_zero(a: Values) -> Values:
    """Float16 bits, rounded toward 0."""
    near = a.astype(F16)
    past = np.abs(near.astype(np.float64)) > np.abs(a.astype(np.float64))
    past |= np.isinf(near) & np.isfinite(a)
    return (near.view(U16) - past.astype(U16)).astype(U32)


def permuted(a: Values, b: Values, c: Values) -> Values:
    found = []
    for high, low, select in zip(a, b, c, strict=True):
        sources = list(int(low).to_bytes(4, "little") + int(high).to_bytes(4, "little"))
        signs = [255 * (x >> 7) for x in (sources[1], sources[3], sources[5], sources[7])]
        chosen = [(sources + signs + [0])[s] if s < 13 else 255 for s in int(select).to_bytes(4, "little")]
        found.append(int.from_bytes(bytes(chosen), "little"))
    return np.array(found, U32)


def low24(a: Values) -> Values:
    return ((a.astype(I64) & 0xFFFFFF) ^ 0x800000) - 0x800000


def middle(a: Values, b: Values, c: Values) -> Values:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def dot(a: Values, b: Values, c: Values, kind_a: type, kind_b: type) -> Values:
    x, y = a.view(kind_a).reshape(-1, 4).astype(I64), b.view(kind_b).reshape(-1, 4).astype(I64)
    return (c.astype(I64) + (x * y).sum(axis=1)).astype(U32)


LANE = np.arange(LANES)
BELOW = ((1 << LANE.astype(I64)) - 1).astype(U32)
# Operation: type of the sources and of the result, and meaning.
VECTOR: dict[str, tuple[type, type, Callable[..., Values]]] = {
    "v_mov_b32": (U32, U32, lambda a: a),
    "v_cvt_f32_i32": (I32, F32, lambda a: a),
    "v_cvt_f32_u32": (U32, F32, lambda a: a),
    "v_cvt_u32_f32": (F32, U32, lambda a: to_integer(a, 0, 2**32 - 1)),
    "v_cvt_i32_f32": (F32, I32, lambda a: to_integer(a, -(2**31), 2**31 - 1)),
    "v_cvt_f16_f32": (F32, F16, lambda a: a),
    "v_cvt_f32_f16": (F16, F32, lambda a: a),
    **{f"v_cvt_f32_ubyte{i}": (U32, F32, lambda a, i=i: a >> 8 * i & 255) for i in range(4)},
    "v_mov_b16": (U16, U16, lambda a: a),
    "v_fract_f32": (F32, F32, lambda a: np.minimum(a - np.floor(a), np.nextafter(F32(1), F32(0)))),
    "v_trunc_f32": (F32, F32, lambda a: np.trunc(a)),
    "v_ceil_f32": (F32, F32, lambda a: np.ceil(a)),
    "v_rndne_f32": (F32, F32, lambda a: np.rint(a)),
    "v_floor_f32": (F32, F32, lambda a: np.floor(a)),
    "v_exp_f32": (F32, F32, lambda a: np.exp2(a.astype(np.float64))),
    "v_log_f32": (F32, F32, lambda a: np.log2(a.astype(np.float64))),
    "v_rcp_f32": (F32, F32, lambda a: 1 / a),
    "v_rcp_iflag_f32": (F32, F32, lambda a: 1 / a),
    "v_rsq_f32": (F32, F32, lambda a: 1 / np.sqrt(a.astype(np.float64))),
    "v_sqrt_f32": (F32, F32, lambda a: np.sqrt(a)),
    "v_sin_f32": (F32, F32, lambda a: np.sin(2 * np.pi * a.astype(np.float64))),
    "v_cos_f32": (F32, F32, lambda a: np.cos(2 * np.pi * a.astype(np.float64))),
    "v_not_b32": (U32, U32, lambda a: ~a),
    "v_bfrev_b32": (U32, U32, reversed_bits),
    "v_clz_i32_u32": (U32, I32, lambda a: leading(a)),
    "v_ctz_i32_b32": (U32, I32, trailing),
    "v_frexp_exp_i32_f32": (F32, I32, lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0)),
    "v_frexp_mant_f32": (F32, F32, lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a)),
    "v_cvt_f16_u16": (U16, F16, lambda a: a.astype(F32)),
    "v_cvt_f16_i16": (I16, F16, lambda a: a.astype(F32)),
    "v_rcp_f16": (F16, F16, lambda a: 1 / a.astype(F32)),
    "v_sqrt_f16": (F16, F16, lambda a: np.sqrt(a.astype(F32))),
    "v_exp_f16": (F16, F16, lambda a: np.exp2(a.astype(F32))),
    "v_cvt_i32_i16": (I16, I32, lambda a: a),
    "v_cvt_u32_u16": (U16, U32, lambda a: a),
    "v_add_f32": (F32, F32, lambda a, b: a + b),
    "v_sub_f32": (F32, F32, lambda a, b: a - b),
    "v_subrev_f32": (F32, F32, lambda a, b: b - a),
    "v_mul_f32": (F32, F32, lambda a, b: a * b),
    "v_mul_i32_i24": (U32, I32, lambda a, b: (low24(a) * low24(b)).astype(I32)),
    "v_mul_u32_u24": (U32, U32, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    "v_min_f32": (F32, F32, lambda a, b: np.fmin(a, b)),
    "v_max_f32": (F32, F32, lambda a, b: np.fmax(a, b)),
    "v_min_i32": (I32, I32, lambda a, b: np.minimum(a, b)),
    "v_max_i32": (I32, I32, lambda a, b: np.maximum(a, b)),
    "v_min_u32": (U32, U32, lambda a, b: np.minimum(a, b)),
    "v_max_u32": (U32, U32, lambda a, b: np.maximum(a, b)),
    "v_lshlrev_b32": (U32, U32, lambda a, b: b << (a & 31)),
    "v_lshrrev_b32": (U32, U32, lambda a, b: b >> (a & 31)),
    "v_ashrrev_i32": (I32, I32, lambda a, b: b >> (a & 31)),
    "v_and_b32": (U32, U32, lambda a, b: a & b),
    "v_or_b32": (U32, U32, lambda a, b: a | b),
    "v_xor_b32": (U32, U32, lambda a, b: a ^ b),
    "v_xnor_b32": (U32, U32, lambda a, b: ~(a ^ b)),
    "v_add_nc_u32": (U32, U32, lambda a, b: a + b),
    "v_sub_nc_u32": (U32, U32, lambda a, b: a - b),
    "v_subrev_nc_u32": (U32, U32, lambda a, b: b - a),
    "v_cvt_pk_rtz_f16_f32": (F32, U32, lambda a, b: toward_zero(a) | toward_zero(b) << 16),
    "v_add_f16": (F16, F16, lambda a, b: a + b),
    "v_sub_f16": (F16, F16, lambda a, b: a - b),
    "v_subrev_f16": (F16, F16, lambda a, b: b - a),
    "v_mul_f16": (F16, F16, lambda a, b: a * b),
    "v_max_f16": (F16, F16, lambda a, b: np.fmax(a, b)),
    "v_min_f16": (F16, F16, lambda a, b: np.fmin(a, b)),
    "v_mad_i32_i24": (U32, U32, lambda a, b, c: (low24(a) * low24(b) + c).astype(U32)),
    "v_mad_u32_u24": (U32, U32, lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
    "v_bfe_u32": (U32, U32, lambda a, b, c: field(a, b & 31, c & 31)),
    "v_bfe_i32": (U32, I32, lambda a, b, c: signed_field(a, b & 31, c & 31)),
    "v_bfi_b32": (U32, U32, lambda a, b, c: (a & b) | (~a & c)),
    "v_fma_f32": (F32, F32, fma),
    "v_alignbit_b32": (U32, U32, lambda a, b, c: (a.astype(U64) << U64(32) | b) >> (c & 31).astype(U64)),
    "v_alignbyte_b32": (
        U32,
        U32,
        lambda a, b, c: (a.astype(U64) << U64(32) | b) >> (8 * (c & 3)).astype(U64),
    ),
    "v_min3_f32": (F32, F32, lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "v_min3_i32": (I32, I32, lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_min3_u32": (U32, U32, lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_f32": (F32, F32, lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "v_max3_i32": (I32, I32, lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_max3_u32": (U32, U32, lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_f32": (F32, F32, lambda a, b, c: np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))),
    "v_med3_i32": (I32, I32, middle),
    "v_med3_u32": (U32, U32, middle),
    "v_xor3_b32": (U32, U32, lambda a, b, c: a ^ b ^ c),
    "v_perm_b32": (U32, U32, permuted),
    "v_xad_u32": (U32, U32, lambda a, b, c: (a ^ b) + c),
    "v_lshl_add_u32": (U32, U32, lambda a, b, c: (a << (b & 31)) + c),
    "v_add_lshl_u32": (U32, U32, lambda a, b, c: (a + b) << (c & 31)),
    "v_fma_f16": (F16, F16, lambda a, b, c: a.astype(np.float64) * b + c),
    "v_add3_u32": (U32, U32, lambda a, b, c: a + b + c),
    "v_lshl_or_b32": (U32, U32, lambda a, b, c: (a << (b & 31)) | c),
    "v_and_or_b32": (U32, U32, lambda a, b, c: (a & b) | c),
    "v_or3_b32": (U32, U32, lambda a, b, c: a | b | c),
    "v_maxmin_f32": (F32, F32, lambda a, b, c: np.fmin(np.fmax(a, b), c)),
    "v_minmax_f32": (F32, F32, lambda a, b, c: np.fmax(np.fmin(a, b), c)),
    "v_maxmin_f16": (F16, F16, lambda a, b, c: np.fmin(np.fmax(a, b), c)),
    "v_minmax_f16": (F16, F16, lambda a, b, c: np.fmax(np.fmin(a, b), c)),
    "v_maxmin_u32": (U32, U32, lambda a, b, c: np.minimum(np.maximum(a, b), c)),
    "v_minmax_u32": (U32, U32, lambda a, b, c: np.maximum(np.minimum(a, b), c)),
    "v_maxmin_i32": (I32, I32, lambda a, b, c: np.minimum(np.maximum(a, b), c)),
    "v_minmax_i32": (I32, I32, lambda a, b, c: np.maximum(np.minimum(a, b), c)),
    "v_add_nc_u16": (U16, U16, lambda a, b: a + b),
    "v_sub_nc_u16": (U16, U16, lambda a, b: a - b),
    "v_mul_lo_u16": (U16, U16, lambda a, b: a * b),
    "v_pack_b32_f16": (U16, U32, lambda a, b: a.astype(U32) | b.astype(U32) << 16),
    "v_bfm_b32": (U32, U32, lambda a, b: ((U32(1) << (a & 31)) - U32(1)) << (b & 31)),
    "v_bcnt_u32_b32": (U32, U32, lambda a, b: ones(a) + b),
    "v_mbcnt_lo_u32_b32": (U32, U32, lambda a, b: ones(a & BELOW) + b),
    "v_mbcnt_hi_u32_b32": (U32, U32, lambda a, b: b),
    "v_mul_lo_u32": (U32, U32, lambda a, b: a * b),
    "v_mul_hi_u32": (U32, U32, lambda a, b: a.astype(U64) * b >> U64(32)),
    "v_mul_hi_i32": (I32, I32, lambda a, b: a.astype(I64) * b >> 32),
    "v_lshlrev_b16": (U16, U16, lambda a, b: b << (a & 15)),
    "v_lshrrev_b16": (U16, U16, lambda a, b: b >> (a & 15)),
    "v_and_b16": (U16, U16, lambda a, b: a & b),
    "v_or_b16": (U16, U16, lambda a, b: a | b),
    "v_xor_b16": (U16, U16, lambda a, b: a ^ b),
    "v_dot4_u32_u8": (U32, U32, lambda a, b, c: dot(a, b, c, U8, U8)),
}
INEXACT = {"v_exp_f32", "v_log_f32", "v_rcp_f32", "v_rcp_iflag_f32", "v_rsq_f32", "v_sin_f32", "v_cos_f32", "v_exp_f16",
           "v_rcp_f16"}  # fmt: skip

// Operands of an instruction, a value a lane, and the arithmetic that operations.h uses. Part of operations.c.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "wave.h"

typedef union {
    u32 u[MAX_LANES];
    float f[MAX_LANES];
    u64 q[MAX_LANES];
} Lanes;

#define EACH_LANE for (int lane = 0; lane < w->lanes; lane++)

// ---- what the table's expressions use

static inline u32 bits_of(float x) { u32 y; memcpy(&y, &x, 4); return y; }
static inline float as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
static inline float from_half(u32 x) { return _cvtsh_ss((u16)x); }
static inline u32 to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
static inline u32 half_toward_zero(float x) { return _cvtss_sh(x, _MM_FROUND_TO_ZERO); }
static inline float fma_half(float a, float b, float c) { return (float)((double)a * b + c); }
// A NaN loses against a number.
static inline float most(float a, float b) { return a > b || b != b ? a : b; }
static inline float least(float a, float b) { return a < b || b != b ? a : b; }
#define MOST(a, b) ((a) > (b) ? (a) : (b))
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
static inline float fract(float a) { float f = a - floorf(a); return f >= 1.0f ? 0x1.fffffep-1f : f; }
// Of a = mantissa * 2 ** exponent, with a mantissa from 0.5 to 1.
static inline float mantissa_of(float a) { int e; return isfinite(a) ? frexpf(a, &e) : a; }
static inline i32 exponent_of(float a) {
    int e = 0;
    if (isfinite(a)) frexpf(a, &e);
    return e;
}
static inline i32 low24(u32 a) { return (i32)(a << 8) >> 8; }
static inline u32 float_to_unsigned(float a) { return !(a > 0) ? 0 : a >= 4294967296.0f ? 0xffffffff : (u32)a; }
static inline i32 float_to_signed(float a) {
    return a != a ? 0 : a >= 2147483648.0f ? INT32_MAX : a <= -2147483648.0f ? INT32_MIN : (i32)a;
}
static inline u32 reverse_bits(u32 a) {
    u32 r = 0;
    for (int i = 0; i < 32; i++) r |= (a >> i & 1) << (31 - i);
    return r;
}
static inline u32 bit_field(u32 a, u32 offset, u32 width) { return (a >> offset) & (width < 32 ? (1u << width) - 1 : ~0u); }
static inline i32 signed_bit_field(u32 a, u32 offset, u32 width) {
    if (!width) return 0;
    if (offset + width >= 32) return (i32)a >> offset;
    return (i32)(a << (32 - offset - width)) >> (32 - width);
}
// A selector is 0 to 7: a byte of {a, b}; 8 to 11: a sign of a half; 12: 0; above: 255.
static inline u32 permute_bytes(u32 a, u32 b, u32 selectors) {
    u64 both = (u64)a << 32 | b;
    u32 r = 0;
    for (int i = 0; i < 4; i++) {
        u32 s = selectors >> 8 * i & 255;
        u32 byte = s < 8 ? both >> 8 * s & 255 : s < 12 ? (both >> (16 * (s - 8) + 15) & 1) * 255 : s == 12 ? 0 : 255;
        r |= byte << 8 * i;
    }
    return r;
}
// `is_signed`: a bit for a and one for b.
static inline u32 dot4(u32 a, u32 b, u32 c, u32 is_signed) {
    for (int i = 0; i < 32; i += 8) {
        i32 x = is_signed & 1 ? (i8)(a >> i) : (u8)(a >> i), y = is_signed & 2 ? (i8)(b >> i) : (u8)(b >> i);
        c += (u32)(x * y);
    }
    return c;
}
static inline float dot2(u32 a, u32 b, float c) {
    return fmaf(from_half(a >> 16), from_half(b >> 16), fmaf(from_half(a), from_half(b), c));
}
// Bits: signalling NaN, quiet NaN, -infinity, -normal, -denormal, -0, +0, +denormal, +normal, +infinity.
static u32 class_of(u32 sign, u32 exponent, u32 most_exponent, u32 fraction, u32 quiet) {
    if (exponent == most_exponent && fraction) return fraction & quiet ? 2 : 1;
    u32 size = exponent == most_exponent ? 0 : exponent ? 1 : fraction ? 2 : 3;  // infinity, normal, denormal, 0
    return sign ? 4u << size : 512u >> size;
}
static inline u32 class_of_half(u32 a) { return class_of(a >> 15 & 1, a >> 10 & 31, 31, a & 1023, 512); }
static inline u32 class_of_float(u32 a) { return class_of(a >> 31, a >> 23 & 255, 255, a & 0x7fffff, 0x400000); }

// ---- reading operands

static u64 scalar_value(Wave *w, const Instruction *in, int i, bool wide) {
    u32 n = in->source[i];
    if (n >= FIRST_VGPR) return vgpr(w, n - FIRST_VGPR)[0];
    if (n < SGPRS) return wide ? sgpr_pair(w, n) : sgpr(w, n);
    switch (n) {
    case 251: return !lane_mask(w, VCC);
    case 252: return !exec_of(w);
    case 253: if (w->undefined_scc) w->taint = ~0ull; return w->scc;
    default: return in->constant[i];
    }
}

// The same for scalar operations, which follow undefined bits: `*undefined` gets those of the value.
static u64 scalar_bits(Wave *w, const Instruction *in, int i, bool wide, u64 *undefined) {
    u32 n = in->source[i], next = (n + 1) % SGPRS;
    *undefined = n == 253 && w->undefined_scc ? ~0ull : 0;
    if (n >= SGPRS || n == NULL_SGPR) return n == NULL_SGPR ? 0 : scalar_value(w, in, i, wide);
    settle_s(w, n);
    *undefined = w->undefined_s[n];
    if (*undefined) w->taint_origin = w->origin_s[n];
    if (!wide) return w->s[n];
    settle_s(w, next);
    *undefined |= (u64)w->undefined_s[next] << 32;
    if (*undefined) w->taint_origin = w->origin_s[w->undefined_s[n] ? n : next];
    return w->s[n] | (u64)w->s[next] << 32;
}

// 32 bits of a lane, or a half of them where the source is one.
static const u32 *read_bits(Wave *w, const Instruction *in, int i, int part, Lanes *room) {
    u32 n = in->source[i];
    if (n >= FIRST_VGPR) return i == 0 && in->dpp ? w->dpp_source : vgpr(w, n - FIRST_VGPR + (u32)part);
    u32 x = (u32)(scalar_value(w, in, i, part) >> 32 * part);
    for (int l = 0; l < w->lanes; l++) room->u[l] = x;
    return room->u;
}

static const u32 *read_U32(Wave *w, const Instruction *in, int i, Lanes *room) {
    const u32 *from = read_bits(w, in, i, 0, room);
    bool absolute = in->absolute >> i & 1, negate = in->negate >> i & 1;
    if (!absolute && !negate) return from;
    for (int l = 0; l < w->lanes; l++) room->u[l] = (from[l] & (absolute ? 0x7fffffff : ~0u)) ^ (u32)negate << 31;
    return room->u;
}
static const i32 *read_I32(Wave *w, const Instruction *in, int i, Lanes *room) {
    return (const i32 *)read_bits(w, in, i, 0, room);
}
static const float *read_F32(Wave *w, const Instruction *in, int i, Lanes *room) {
    return (const float *)read_U32(w, in, i, room);
}
static const u32 *read_U16(Wave *w, const Instruction *in, int i, Lanes *room) {
    const u32 *from = read_bits(w, in, i, 0, room);
    int shift = in->high >> i & 1 ? 16 : 0;
    u32 keep = in->absolute >> i & 1 ? 0x7fff : 0xffff, flip = in->negate >> i & 1 ? 0x8000 : 0;
    for (int l = 0; l < w->lanes; l++) room->u[l] = ((from[l] >> shift) & keep) ^ flip;
    return room->u;
}
static const i32 *read_I16(Wave *w, const Instruction *in, int i, Lanes *room) {
    const u32 *from = read_U16(w, in, i, room);
    for (int l = 0; l < w->lanes; l++) room->u[l] = (u32)(i32)(i16)from[l];
    return (const i32 *)room->u;
}
static void halves_to_floats(const u32 *from, float *to, int lanes) {
    for (int l = 0; l < lanes; l += 8) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(from + l));
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
        _mm256_storeu_ps(to + l, _mm256_cvtph_ps(_mm256_castsi256_si128(packed)));
    }
}
static void floats_to_halves(const float *from, u32 *to, int lanes) {
    for (int l = 0; l < lanes; l += 8) {
        __m128i x = _mm256_cvtps_ph(_mm256_loadu_ps(from + l), _MM_FROUND_TO_NEAREST_INT);
        _mm256_storeu_si256((__m256i *)(to + l), _mm256_cvtepu16_epi32(x));
    }
}
static const float *read_F16(Wave *w, const Instruction *in, int i, Lanes *room) {
    halves_to_floats(read_U16(w, in, i, room), room->f, w->lanes);
    return room->f;
}
static const u64 *read_U64(Wave *w, const Instruction *in, int i, Lanes *room) {
    Lanes low, high;
    const u32 *a = read_bits(w, in, i, 0, &low), *b = read_bits(w, in, i, 1, &high);
    for (int l = 0; l < w->lanes; l++) room->q[l] = a[l] | (u64)b[l] << 32;
    return room->q;
}
static const i64 *read_I64(Wave *w, const Instruction *in, int i, Lanes *room) {
    return (const i64 *)read_U64(w, in, i, room);
}

// ---- writing results

static const u32 *lane_masks(Wave *w) {
    if (w->mask_of != w->active) {
        for (int l = 0; l < w->lanes; l++) w->mask[l] = -(u32)(w->active >> l & 1);
        w->mask_of = w->active;
    }
    return w->mask;
}

static void mark_defined(Wave *w, u32 r) {
    u64 tainted = w->taint & w->active;
    if (w->undefined[r] | tainted) {
        w->undefined[r] = (w->undefined[r] & ~w->active) | tainted;
        if (tainted) w->origin[r] = w->taint_origin;
    }
}

static void write_bits(Wave *w, u32 r, const u32 *d) {
    r &= VGPRS - 1;
    settle(w, r);
    if (w->active == all_lanes(w)) {
        memcpy(w->v[r], d, 4 * (size_t)w->lanes);
    } else {
        const u32 *m = lane_masks(w);
        u32 *to = w->v[r];
        for (int l = 0; l < w->lanes; l++) to[l] = (d[l] & m[l]) | (to[l] & ~m[l]);
    }
    mark_defined(w, r);
}
static void write_half(Wave *w, const Instruction *in, const u32 *d) {
    int shift = in->high >> 3 & 1 ? 16 : 0;
    u32 keep = 0xffff0000u >> shift, merged[MAX_LANES];
    settle(w, in->result);
    const u32 *old = w->v[in->result];
    for (int l = 0; l < w->lanes; l++) merged[l] = (old[l] & keep) | (d[l] & 0xffff) << shift;
    write_bits(w, in->result, merged);
}
static void finish_floats(Wave *w, const Instruction *in, float *d) {
    static const float FACTOR[] = {1.0f, 2.0f, 4.0f, 0.5f};
    for (int l = 0; l < w->lanes && in->multiply; l++) d[l] *= FACTOR[in->multiply];
    for (int l = 0; l < w->lanes && in->clamp; l++) d[l] = d[l] > 1.0f ? 1.0f : d[l] > 0.0f ? d[l] : 0.0f;
}
static void write_U32(Wave *w, const Instruction *in, Lanes *d) { write_bits(w, in->result, d->u); }
static void write_I32(Wave *w, const Instruction *in, Lanes *d) { write_bits(w, in->result, d->u); }
static void write_F32(Wave *w, const Instruction *in, Lanes *d) {
    if (in->multiply | in->clamp) finish_floats(w, in, d->f);
    write_bits(w, in->result, d->u);
}
static void write_U16(Wave *w, const Instruction *in, Lanes *d) { write_half(w, in, d->u); }
static void write_F16(Wave *w, const Instruction *in, Lanes *d) {
    if (in->multiply | in->clamp) finish_floats(w, in, d->f);
    u32 halves[MAX_LANES];
    floats_to_halves(d->f, halves, w->lanes);
    write_half(w, in, halves);
}
static void write_U64(Wave *w, const Instruction *in, Lanes *d) {
    u32 part[MAX_LANES];
    for (int half = 0; half < 2; half++) {
        for (int l = 0; l < w->lanes; l++) part[l] = (u32)(d->q[l] >> 32 * half);
        write_bits(w, in->result + (u32)half, part);
    }
}
static void write_I64(Wave *w, const Instruction *in, Lanes *d) { write_U64(w, in, d); }

static void write_sgpr_bits(Wave *w, u32 r, u32 x, u32 undefined) {
    if (r == NULL_SGPR) return;
    settle_s(w, r);
    w->s[r] = x;
    w->undefined_s[r] = undefined;
    if (undefined) w->origin_s[r] = w->taint_origin;
    if (undefined && (r == EXEC || (r == EXEC + 1 && w->lanes == 64))) fault(w, UNDEFINED_EXEC);
}
static void write_sgpr_pair(Wave *w, u32 r, u64 x, u64 undefined) {
    write_sgpr_bits(w, r, (u32)x, (u32)undefined);
    if (r != NULL_SGPR) write_sgpr_bits(w, (r + 1) % SGPRS, (u32)(x >> 32), (u32)(undefined >> 32));
}
static void write_sgpr(Wave *w, u32 r, u32 x) { write_sgpr_bits(w, r, x, w->taint ? ~0u : 0); }
static void write_lane_mask(Wave *w, u32 r, u64 x) {
    u64 undefined = w->taint & w->active;
    if (w->lanes == 64) write_sgpr_pair(w, r, x, undefined);
    else write_sgpr_bits(w, r, (u32)x, (u32)undefined);
}
static u64 pack_mask(const u32 *d, int lanes) {
    u64 r = 0;
    for (int l = 0; l < lanes; l += 8) {
        __m256 x = _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i *)(d + l)));
        r |= (u64)(u32)_mm256_movemask_ps(x) << l;
    }
    return r;
}

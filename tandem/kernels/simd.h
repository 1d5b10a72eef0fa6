// Vectors of sixteen float32 or int32 lanes, on AVX-512, AVX2 and plain C. Kernels are written once with these functions.
//
// Kernels put rows or keys in lanes and process the summed dimension in order, so that a result does not depend on batch
// size or threads. The only sums across lanes are reductions over a fixed width.
#pragma once
#include "core.h"
#if defined(ISA_avx512) || defined(ISA_avx2)
#include <immintrin.h>
#endif

typedef uint16_t half;  // the bits of an IEEE float16

#define LANES 16

#if defined(ISA_avx512)  // ------------------------------------------------------------------------------------

typedef __m512 f32x16;
typedef __m512i i32x16;

ALWAYS_INLINE f32x16 f_zero(void) { return _mm512_setzero_ps(); }
ALWAYS_INLINE f32x16 f_set(float x) { return _mm512_set1_ps(x); }
ALWAYS_INLINE f32x16 f_load(const float *p) { return _mm512_loadu_ps(p); }
ALWAYS_INLINE void f_store(float *p, f32x16 v) { _mm512_storeu_ps(p, v); }
ALWAYS_INLINE f32x16 f_add(f32x16 a, f32x16 b) { return _mm512_add_ps(a, b); }
ALWAYS_INLINE f32x16 f_sub(f32x16 a, f32x16 b) { return _mm512_sub_ps(a, b); }
ALWAYS_INLINE f32x16 f_mul(f32x16 a, f32x16 b) { return _mm512_mul_ps(a, b); }
ALWAYS_INLINE f32x16 f_div(f32x16 a, f32x16 b) { return _mm512_div_ps(a, b); }
ALWAYS_INLINE f32x16 f_fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
ALWAYS_INLINE f32x16 f_max(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }
ALWAYS_INLINE f32x16 f_min(f32x16 a, f32x16 b) { return _mm512_min_ps(a, b); }
ALWAYS_INLINE f32x16 f_abs(f32x16 a) { return _mm512_abs_ps(a); }
ALWAYS_INLINE f32x16 f_from_half(const half *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
ALWAYS_INLINE void f_to_half(half *p, f32x16 v) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
ALWAYS_INLINE f32x16 f_from_int(i32x16 v) { return _mm512_cvtepi32_ps(v); }
ALWAYS_INLINE i32x16 f_round(f32x16 v) { return _mm512_cvtps_epi32(v); }  // to nearest, ties to even
ALWAYS_INLINE f32x16 f_select_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {  // a < b ? yes : no
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
ALWAYS_INLINE float f_reduce_max(f32x16 v) { return _mm512_reduce_max_ps(v); }
ALWAYS_INLINE float f_reduce_add(f32x16 v) {  // a fixed tree: ((0+8)+(4+12))... the same on every call
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
ALWAYS_INLINE f32x16 f_exp2_int(i32x16 e) {  // 2^e for e in [-126, 127]; 0 for -127
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(e, _mm512_set1_epi32(127)), 23));
}

ALWAYS_INLINE i32x16 i_zero(void) { return _mm512_setzero_si512(); }
ALWAYS_INLINE i32x16 i_set(int32_t x) { return _mm512_set1_epi32(x); }
ALWAYS_INLINE i32x16 i_load(const void *p) { return _mm512_loadu_si512(p); }
ALWAYS_INLINE void i_store(void *p, i32x16 v) { _mm512_storeu_si512(p, v); }
ALWAYS_INLINE i32x16 i_add(i32x16 a, i32x16 b) { return _mm512_add_epi32(a, b); }
ALWAYS_INLINE i32x16 i_and(i32x16 a, i32x16 b) { return _mm512_and_si512(a, b); }
ALWAYS_INLINE i32x16 i_or(i32x16 a, i32x16 b) { return _mm512_or_si512(a, b); }
ALWAYS_INLINE i32x16 i_shl(i32x16 a, int n) { return _mm512_slli_epi32(a, n); }
ALWAYS_INLINE i32x16 i_shr(i32x16 a, int n) { return _mm512_srli_epi32(a, n); }
ALWAYS_INLINE i32x16 i_from_bytes(const int8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
ALWAYS_INLINE void i_to_bytes(int8_t *p, i32x16 v) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(v)); }
// Each byte of `v`, a number from 0 to 15, becomes the table's entry of that number.
ALWAYS_INLINE i32x16 i_table(const uint8_t table[16], i32x16 v) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), v);
}
// Each lane holds 4 unsigned bytes of `w`; `x` points to 4 signed bytes for all lanes: acc[l] += sum_j w[l][j] * x[j].
ALWAYS_INLINE i32x16 i_dot4(i32x16 acc, i32x16 w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four));
}

#elif defined(ISA_avx2)  // -------------------------------------------------------------------------------------

typedef struct { __m256 lo, hi; } f32x16;
typedef struct { __m256i lo, hi; } i32x16;
#define F2(op_lo, op_hi) ((f32x16){op_lo, op_hi})
#define I2(op_lo, op_hi) ((i32x16){op_lo, op_hi})

ALWAYS_INLINE f32x16 f_zero(void) { return F2(_mm256_setzero_ps(), _mm256_setzero_ps()); }
ALWAYS_INLINE f32x16 f_set(float x) { __m256 v = _mm256_set1_ps(x); return F2(v, v); }
ALWAYS_INLINE f32x16 f_load(const float *p) { return F2(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
ALWAYS_INLINE void f_store(float *p, f32x16 v) { _mm256_storeu_ps(p, v.lo); _mm256_storeu_ps(p + 8, v.hi); }
ALWAYS_INLINE f32x16 f_add(f32x16 a, f32x16 b) { return F2(_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)); }
ALWAYS_INLINE f32x16 f_sub(f32x16 a, f32x16 b) { return F2(_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)); }
ALWAYS_INLINE f32x16 f_mul(f32x16 a, f32x16 b) { return F2(_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)); }
ALWAYS_INLINE f32x16 f_div(f32x16 a, f32x16 b) { return F2(_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)); }
ALWAYS_INLINE f32x16 f_fma(f32x16 a, f32x16 b, f32x16 c) {
    return F2(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi));
}
ALWAYS_INLINE f32x16 f_max(f32x16 a, f32x16 b) { return F2(_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)); }
ALWAYS_INLINE f32x16 f_min(f32x16 a, f32x16 b) { return F2(_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)); }
ALWAYS_INLINE f32x16 f_abs(f32x16 a) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return F2(_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi));
}
ALWAYS_INLINE f32x16 f_from_half(const half *p) {
    return F2(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}
ALWAYS_INLINE void f_to_half(half *p, f32x16 v) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT));
}
ALWAYS_INLINE f32x16 f_from_int(i32x16 v) { return F2(_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)); }
ALWAYS_INLINE i32x16 f_round(f32x16 v) { return I2(_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi)); }
ALWAYS_INLINE f32x16 f_select_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {
    return F2(_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
              _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)));
}
ALWAYS_INLINE float f_reduce_max(f32x16 v) {
    __m256 a = _mm256_max_ps(v.lo, v.hi);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
ALWAYS_INLINE float f_reduce_add(f32x16 v) {
    __m256 a = _mm256_add_ps(v.lo, v.hi);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
ALWAYS_INLINE f32x16 f_exp2_int(i32x16 e) {
    __m256i bias = _mm256_set1_epi32(127);
    return F2(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e.lo, bias), 23)),
              _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e.hi, bias), 23)));
}

ALWAYS_INLINE i32x16 i_zero(void) { return I2(_mm256_setzero_si256(), _mm256_setzero_si256()); }
ALWAYS_INLINE i32x16 i_set(int32_t x) { __m256i v = _mm256_set1_epi32(x); return I2(v, v); }
ALWAYS_INLINE i32x16 i_load(const void *p) {
    return I2(_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1));
}
ALWAYS_INLINE void i_store(void *p, i32x16 v) {
    _mm256_storeu_si256((__m256i *)p, v.lo);
    _mm256_storeu_si256((__m256i *)p + 1, v.hi);
}
ALWAYS_INLINE i32x16 i_add(i32x16 a, i32x16 b) { return I2(_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)); }
ALWAYS_INLINE i32x16 i_and(i32x16 a, i32x16 b) { return I2(_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)); }
ALWAYS_INLINE i32x16 i_or(i32x16 a, i32x16 b) { return I2(_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)); }
ALWAYS_INLINE i32x16 i_shl(i32x16 a, int n) { return I2(_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)); }
ALWAYS_INLINE i32x16 i_shr(i32x16 a, int n) { return I2(_mm256_srli_epi32(a.lo, n), _mm256_srli_epi32(a.hi, n)); }
ALWAYS_INLINE i32x16 i_from_bytes(const int8_t *p) {
    return I2(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8))));
}
ALWAYS_INLINE void i_to_bytes(int8_t *p, i32x16 v) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.lo, v.hi), 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
ALWAYS_INLINE i32x16 i_table(const uint8_t table[16], i32x16 v) {
    __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return I2(_mm256_shuffle_epi8(entries, v.lo), _mm256_shuffle_epi8(entries, v.hi));
}
// Exact for weights to 8 bits: vpmaddubsw saturates at 16 bits, so even and odd bytes are multiplied apart.
ALWAYS_INLINE __m256i dot4_half(__m256i acc, __m256i w, __m256i x) {
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
ALWAYS_INLINE i32x16 i_dot4(i32x16 acc, i32x16 w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    __m256i xs = _mm256_set1_epi32(four);
    return I2(dot4_half(acc.lo, w.lo, xs), dot4_half(acc.hi, w.hi, xs));
}
// For weights to 7 bits (127 * 127 * 2 < 2^15): one multiply fewer.
ALWAYS_INLINE i32x16 i_dot4_small(i32x16 acc, i32x16 w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    __m256i xs = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
    return I2(_mm256_add_epi32(acc.lo, _mm256_madd_epi16(_mm256_maddubs_epi16(w.lo, xs), ones)),
              _mm256_add_epi32(acc.hi, _mm256_madd_epi16(_mm256_maddubs_epi16(w.hi, xs), ones)));
}

#else  // plain C ------------------------------------------------------------------------------------------------

typedef struct { float v[LANES]; } f32x16;
typedef struct { int32_t v[LANES]; } i32x16;
#define F_EACH(expression) f32x16 r; for (int l = 0; l < LANES; l++) r.v[l] = (expression); return r
#define I_EACH(expression) i32x16 r; for (int l = 0; l < LANES; l++) r.v[l] = (expression); return r

ALWAYS_INLINE float half_to_float(half h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13, bits;
    float f;
    if (rest >= 0x0f800000) bits = rest + 0x70000000;       // infinity, NaN
    else if (rest >= 0x00800000) bits = rest + 0x38000000;  // normal
    else {                                                  // zero, subnormal
        f = (float)(h & 0x7fff) * 0x1p-24f;
        memcpy(&bits, &f, 4);
    }
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}
ALWAYS_INLINE half float_to_half(float f) {  // to nearest, ties to even
    uint32_t bits, sign;
    memcpy(&bits, &f, 4);
    sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (half)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (half)(sign | 0x7c00);  // rounds to infinity
    if (bits < 0x38800000) {                               // subnormal: let the adder round
        float magnitude, shifted;
        memcpy(&magnitude, &bits, 4);
        shifted = magnitude + 0.5f;
        memcpy(&bits, &shifted, 4);
        return (half)(sign | (bits - 0x3f000000));
    }
    bits += 0xc8000fff + ((bits >> 13) & 1);
    return (half)(sign | (bits >> 13));
}
ALWAYS_INLINE f32x16 f_zero(void) { F_EACH(0.0f); }
ALWAYS_INLINE f32x16 f_set(float x) { F_EACH(x); }
ALWAYS_INLINE f32x16 f_load(const float *p) { f32x16 r; memcpy(&r, p, 64); return r; }
ALWAYS_INLINE void f_store(float *p, f32x16 v) { memcpy(p, &v, 64); }
ALWAYS_INLINE f32x16 f_add(f32x16 a, f32x16 b) { F_EACH(a.v[l] + b.v[l]); }
ALWAYS_INLINE f32x16 f_sub(f32x16 a, f32x16 b) { F_EACH(a.v[l] - b.v[l]); }
ALWAYS_INLINE f32x16 f_mul(f32x16 a, f32x16 b) { F_EACH(a.v[l] * b.v[l]); }
ALWAYS_INLINE f32x16 f_div(f32x16 a, f32x16 b) { F_EACH(a.v[l] / b.v[l]); }
ALWAYS_INLINE f32x16 f_fma(f32x16 a, f32x16 b, f32x16 c) { F_EACH(a.v[l] * b.v[l] + c.v[l]); }
ALWAYS_INLINE f32x16 f_max(f32x16 a, f32x16 b) { F_EACH(a.v[l] > b.v[l] ? a.v[l] : b.v[l]); }
ALWAYS_INLINE f32x16 f_min(f32x16 a, f32x16 b) { F_EACH(a.v[l] < b.v[l] ? a.v[l] : b.v[l]); }
ALWAYS_INLINE f32x16 f_abs(f32x16 a) { F_EACH(__builtin_fabsf(a.v[l])); }
ALWAYS_INLINE f32x16 f_from_half(const half *p) { F_EACH(half_to_float(p[l])); }
ALWAYS_INLINE void f_to_half(half *p, f32x16 v) { for (int l = 0; l < LANES; l++) p[l] = float_to_half(v.v[l]); }
ALWAYS_INLINE f32x16 f_from_int(i32x16 a) { F_EACH((float)a.v[l]); }
ALWAYS_INLINE i32x16 f_round(f32x16 a) {  // adding 1.5 * 2^23 rounds to nearest even; |a| < 2^22
    I_EACH((int32_t)((a.v[l] + 12582912.0f) - 12582912.0f));
}
ALWAYS_INLINE f32x16 f_select_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) { F_EACH(a.v[l] < b.v[l] ? yes.v[l] : no.v[l]); }
ALWAYS_INLINE float f_reduce_max(f32x16 v) {
    float m = v.v[0];
    for (int l = 1; l < LANES; l++) m = v.v[l] > m ? v.v[l] : m;
    return m;
}
ALWAYS_INLINE float f_reduce_add(f32x16 v) {
    for (int width = 8; width; width /= 2) for (int l = 0; l < width; l++) v.v[l] += v.v[l + width];
    return v.v[0];
}
ALWAYS_INLINE f32x16 f_exp2_int(i32x16 e) {
    f32x16 r;
    for (int l = 0; l < LANES; l++) { int32_t bits = (e.v[l] + 127) << 23; memcpy(&r.v[l], &bits, 4); }
    return r;
}

ALWAYS_INLINE i32x16 i_zero(void) { I_EACH(0); }
ALWAYS_INLINE i32x16 i_set(int32_t x) { I_EACH(x); }
ALWAYS_INLINE i32x16 i_load(const void *p) { i32x16 r; memcpy(&r, p, 64); return r; }
ALWAYS_INLINE void i_store(void *p, i32x16 v) { memcpy(p, &v, 64); }
ALWAYS_INLINE i32x16 i_add(i32x16 a, i32x16 b) { I_EACH(a.v[l] + b.v[l]); }
ALWAYS_INLINE i32x16 i_and(i32x16 a, i32x16 b) { I_EACH(a.v[l] & b.v[l]); }
ALWAYS_INLINE i32x16 i_or(i32x16 a, i32x16 b) { I_EACH(a.v[l] | b.v[l]); }
ALWAYS_INLINE i32x16 i_shl(i32x16 a, int n) { I_EACH((int32_t)((uint32_t)a.v[l] << n)); }
ALWAYS_INLINE i32x16 i_shr(i32x16 a, int n) { I_EACH((int32_t)((uint32_t)a.v[l] >> n)); }
ALWAYS_INLINE i32x16 i_from_bytes(const int8_t *p) { I_EACH(p[l]); }
ALWAYS_INLINE void i_to_bytes(int8_t *p, i32x16 v) { for (int l = 0; l < LANES; l++) p[l] = (int8_t)v.v[l]; }
ALWAYS_INLINE i32x16 i_table(const uint8_t table[16], i32x16 v) {
    uint8_t bytes[64];
    memcpy(bytes, &v, 64);
    for (int i = 0; i < 64; i++) bytes[i] = table[bytes[i]];
    memcpy(&v, bytes, 64);
    return v;
}
ALWAYS_INLINE i32x16 i_dot4(i32x16 acc, i32x16 w, const int8_t *x) {
    uint8_t bytes[64];
    memcpy(bytes, &w, 64);
    for (int l = 0; l < LANES; l++)
        for (int j = 0; j < 4; j++) acc.v[l] += (int32_t)bytes[4 * l + j] * x[j];
    return acc;
}

#endif

#if !defined(ISA_avx2)
#define i_dot4_small i_dot4  // there one instruction (or none) serves all widths
#endif
#if defined(ISA_avx512) || defined(ISA_avx2)
ALWAYS_INLINE float half_to_float(half h) { return _cvtsh_ss(h); }
ALWAYS_INLINE half float_to_half(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }
#endif

// e^x to about 1 ulp of float32 for x <= 88; e^-inf and anything below -87.3 is 0. NaN is not expected.
ALWAYS_INLINE f32x16 f_exp(f32x16 x) {
    f32x16 lowest = f_set(-87.3f);
    f32x16 t = f_max(f_min(x, f_set(88.0f)), lowest);
    i32x16 n = f_round(f_mul(t, f_set(1.44269504f)));
    f32x16 nf = f_from_int(n);
    f32x16 r = f_fma(nf, f_set(-0.693359375f), t);  // ln 2 in two parts: r is exact to the last bit that matters
    r = f_fma(nf, f_set(2.12194440e-4f), r);
    f32x16 p = f_set(1.9875691500e-4f);
    p = f_fma(p, r, f_set(1.3981999507e-3f));
    p = f_fma(p, r, f_set(8.3334519073e-3f));
    p = f_fma(p, r, f_set(4.1665795894e-2f));
    p = f_fma(p, r, f_set(1.6666665459e-1f));
    p = f_fma(p, r, f_set(5.0000001201e-1f));
    p = f_add(f_fma(p, f_mul(r, r), r), f_set(1.0f));
    return f_select_less(x, lowest, f_zero(), f_mul(p, f_exp2_int(n)));
}

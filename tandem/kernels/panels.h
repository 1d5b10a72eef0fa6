// Weights in panels of 16 rows: a row is a lane, and columns are processed in order.
//
// A panel consists of chunks of SPAN columns x 16 rows, each with exactly the bytes that the GGUF file has for them. In a
// chunk, the quants of 32 columns are 8 vectors w[s]: byte 4*row + j of w[s] is the (unsigned) quant of column 4*s + j.
// With 4 bits per weight, these are 4 vectors in memory: low nibbles are w[0..3], high nibbles w[4..7].
// A weight is  scale * quant + minimum;  formats with a zero point z have minimum = -z * scale.
// tandem/devices/cpu/repack.c makes panels from the blocks of the file.
#pragma once
#include "q8_tiles.h"

_Static_assert(PANEL_ROWS == LANES, "a row of a panel is a lane");

enum { NIBBLES = 256 };  // bytes of the low 4 bits of 32 columns

ALWAYS_INLINE void unpack_nibbles(const uint8_t *p, i32x16 w[8]) {
    i32x16 low = i_set(0x0f0f0f0f);
    for (int i = 0; i < 4; i++) {
        i32x16 v = i_load(p + 64 * i);
        w[i] = i_and(v, low);
        w[4 + i] = i_and(i_shr(v, 4), low);
    }
}

// Bit s of byte 4*row + j is the fifth bit of column 4*s + j.
ALWAYS_INLINE void unpack_fifth_bits(const uint8_t *p, i32x16 w[8]) {
    i32x16 bits = i_load(p), fifth = i_set(0x10101010);
    for (int s = 0; s < 8; s++)
        w[s] = i_or(w[s], i_and(s < 4 ? i_shl(bits, 4 - s) : i_shr(bits, s - 4), fifth));
}

ALWAYS_INLINE void q4_0_quants(const uint8_t *chunk, int block, i32x16 w[8]) { (void)block; unpack_nibbles(chunk, w); }
ALWAYS_INLINE void q4_0_scales(const uint8_t *chunk, f32x16 *scale, f32x16 *minimum) {
    scale[0] = f_from_half((const half *)(chunk + NIBBLES));
    minimum[0] = f_mul(scale[0], f_set(-8.0f));
}

ALWAYS_INLINE void q4_1_quants(const uint8_t *chunk, int block, i32x16 w[8]) { (void)block; unpack_nibbles(chunk, w); }
ALWAYS_INLINE void q4_1_scales(const uint8_t *chunk, f32x16 *scale, f32x16 *minimum) {
    scale[0] = f_from_half((const half *)(chunk + NIBBLES));
    minimum[0] = f_from_half((const half *)(chunk + NIBBLES + 32));
}

ALWAYS_INLINE void q5_0_quants(const uint8_t *chunk, int block, i32x16 w[8]) {
    (void)block;
    unpack_nibbles(chunk, w);
    unpack_fifth_bits(chunk + NIBBLES, w);
}
ALWAYS_INLINE void q5_0_scales(const uint8_t *chunk, f32x16 *scale, f32x16 *minimum) {
    scale[0] = f_from_half((const half *)(chunk + NIBBLES + 64));
    minimum[0] = f_mul(scale[0], f_set(-16.0f));
}

ALWAYS_INLINE void q5_1_quants(const uint8_t *chunk, int block, i32x16 w[8]) { q5_0_quants(chunk, block, w); }
ALWAYS_INLINE void q5_1_scales(const uint8_t *chunk, f32x16 *scale, f32x16 *minimum) {
    scale[0] = f_from_half((const half *)(chunk + NIBBLES + 64));
    minimum[0] = f_from_half((const half *)(chunk + NIBBLES + 96));
}

ALWAYS_INLINE void q8_0_quants(const uint8_t *chunk, int block, i32x16 w[8]) {
    (void)block;
    for (int s = 0; s < 8; s++) w[s] = i_load(chunk + 64 * s);
}
ALWAYS_INLINE void q8_0_scales(const uint8_t *chunk, f32x16 *scale, f32x16 *minimum) {
    scale[0] = f_from_half((const half *)(chunk + 512));
    minimum[0] = f_mul(scale[0], f_set(-128.0f));
}

// Two numbers of 6 bits for each of 8 blocks, so ordered that 4 rows of a block are 4 bytes next to each other, for GPUs:
// [8 blocks][16 rows] bytes with the low 4 bits of the first (low nibble) and the second number (high nibble), then [4 pairs
// of blocks][16 rows] bytes with the upper bits of the first block's two numbers and of the second block's.
ALWAYS_INLINE void six_bits(const uint8_t *p, int block, i32x16 *first, i32x16 *second) {
    i32x16 four = i_set(15), upper = i_set(48);
    i32x16 low = i_from_bytes((const int8_t *)p + 16 * block), bits = i_from_bytes((const int8_t *)p + 128 + 16 * (block / 2));
    *first = i_or(i_and(low, four), i_and(block % 2 ? bits : i_shl(bits, 4), upper));
    *second = i_or(i_and(i_shr(low, 4), four), i_and(block % 2 ? i_shr(bits, 2) : i_shl(bits, 2), upper));
}
ALWAYS_INLINE void k_scales(const uint8_t *p, f32x16 *scale, f32x16 *minimum) {
    f32x16 d = f_from_half((const half *)(p + 192));
    f32x16 dmin = f_mul(f_from_half((const half *)(p + 224)), f_set(-1.0f));
    for (int b = 0; b < 8; b++) {
        i32x16 s, m;
        six_bits(p, b, &s, &m);
        scale[b] = f_mul(f_from_int(s), d);
        minimum[b] = f_mul(f_from_int(m), dmin);
    }
}

ALWAYS_INLINE void q4_k_quants(const uint8_t *chunk, int block, i32x16 w[8]) { unpack_nibbles(chunk + NIBBLES * block, w); }
ALWAYS_INLINE void q4_k_scales(const uint8_t *chunk, f32x16 *scale, f32x16 *minimum) {
    k_scales(chunk + 8 * NIBBLES, scale, minimum);
}

ALWAYS_INLINE void q5_k_quants(const uint8_t *chunk, int block, i32x16 w[8]) {
    unpack_nibbles(chunk + NIBBLES * block, w);
    unpack_fifth_bits(chunk + 8 * NIBBLES + 64 * block, w);
}
ALWAYS_INLINE void q5_k_scales(const uint8_t *chunk, f32x16 *scale, f32x16 *minimum) {
    k_scales(chunk + 8 * NIBBLES + 512, scale, minimum);
}

// Bits 2f and 2f+1 of byte 4*row + j in vector h are the upper bits of column 4*(4h + f) + j.
ALWAYS_INLINE void q6_k_quants(const uint8_t *chunk, int block, i32x16 w[8]) {
    unpack_nibbles(chunk + NIBBLES * block, w);
    i32x16 upper = i_set(0x30303030);
    for (int h = 0; h < 2; h++) {
        i32x16 bits = i_load(chunk + 8 * NIBBLES + 128 * block + 64 * h);
        w[4 * h] = i_or(w[4 * h], i_and(i_shl(bits, 4), upper));
        w[4 * h + 1] = i_or(w[4 * h + 1], i_and(i_shl(bits, 2), upper));
        w[4 * h + 2] = i_or(w[4 * h + 2], i_and(bits, upper));
        w[4 * h + 3] = i_or(w[4 * h + 3], i_and(i_shr(bits, 2), upper));
    }
}
ALWAYS_INLINE void q6_k_scales(const uint8_t *chunk, f32x16 *scale, f32x16 *minimum) {  // one per 16 columns
    const int8_t *scales = (const int8_t *)chunk + 8 * NIBBLES + 1024;
    f32x16 d = f_from_half((const half *)(scales + 256));
    for (int j = 0; j < 16; j++) {
        scale[j] = f_mul(f_from_int(i_from_bytes(scales + 16 * j)), d);
        minimum[j] = f_mul(scale[j], f_set(-32.0f));
    }
}

// Quants of 2 bits: bits 2f and 2f+1 of byte 4*row + j in vector h are column 4*(4h + f) + j.
ALWAYS_INLINE void unpack_two_bits(const uint8_t *p, i32x16 w[8]) {
    i32x16 two = i_set(0x03030303);
    for (int s = 0; s < 8; s++) w[s] = i_and(i_shr(i_load(p + 64 * (s / 4)), 2 * (s % 4)), two);
}

// Bit s of byte 4*row + j, after the low bits of all blocks, is the third bit of column 4*s + j.
ALWAYS_INLINE void q3_k_quants(const uint8_t *chunk, int block, i32x16 w[8]) {
    unpack_two_bits(chunk + 128 * block, w);
    i32x16 bits = i_load(chunk + 1024 + 64 * block), third = i_set(0x04040404);
    for (int s = 0; s < 8; s++) w[s] = i_or(w[s], i_and(s < 2 ? i_shl(bits, 2 - s) : i_shr(bits, s - 2), third));
}
ALWAYS_INLINE void q3_k_scales(const uint8_t *chunk, f32x16 *scale, f32x16 *minimum) {  // one per 16 columns
    const uint8_t *p = chunk + 1536;
    f32x16 d = f_from_half((const half *)(p + 192));
    for (int b = 0; b < 8; b++) {
        i32x16 s[2];
        six_bits(p, b, &s[0], &s[1]);
        for (int i = 0; i < 2; i++) {
            scale[2 * b + i] = f_mul(f_from_int(i_add(s[i], i_set(-32))), d);
            minimum[2 * b + i] = f_mul(scale[2 * b + i], f_set(-4.0f));
        }
    }
}

ALWAYS_INLINE void q2_k_quants(const uint8_t *chunk, int block, i32x16 w[8]) { unpack_two_bits(chunk + 128 * block, w); }
// [16 groups of 16 columns][16 rows] bytes: scale in the low nibble, minimum in the high one.
ALWAYS_INLINE void q2_k_scales(const uint8_t *chunk, f32x16 *scale, f32x16 *minimum) {
    const uint8_t *p = chunk + 1024;
    i32x16 four = i_set(15);
    f32x16 d = f_from_half((const half *)(p + 256));
    f32x16 dmin = f_mul(f_from_half((const half *)(p + 288)), f_set(-1.0f));
    for (int j = 0; j < 16; j++) {
        i32x16 both = i_from_bytes((const int8_t *)p + 16 * j);
        scale[j] = f_mul(f_from_int(i_and(both, four)), d);
        minimum[j] = f_mul(f_from_int(i_and(i_shr(both, 4), four)), dmin);
    }
}

// ---- 4 bits that are an index into a table

ALWAYS_INLINE void unpack_table(const uint8_t *p, const uint8_t table[16], i32x16 w[8]) {
    unpack_nibbles(p, w);
    for (int s = 0; s < 8; s++) w[s] = i_table(table, w[s]);
}

// The values of IQ4_NL and IQ4_XS, -127 to 113, plus 128.
static const uint8_t iq4_values[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

ALWAYS_INLINE void iq4_nl_quants(const uint8_t *chunk, int block, i32x16 w[8]) { (void)block; unpack_table(chunk, iq4_values, w); }
ALWAYS_INLINE void iq4_nl_scales(const uint8_t *chunk, f32x16 *scale, f32x16 *minimum) {
    scale[0] = f_from_half((const half *)(chunk + NIBBLES));
    minimum[0] = f_mul(scale[0], f_set(-128.0f));
}

ALWAYS_INLINE void iq4_xs_quants(const uint8_t *chunk, int block, i32x16 w[8]) { unpack_table(chunk + NIBBLES * block, iq4_values, w); }
// 6-bit scales plus 32: [4 pairs of blocks][16 rows] bytes with the low 4 bits of two, [2][16 rows] with the upper bits of four.
ALWAYS_INLINE void iq4_xs_scales(const uint8_t *chunk, f32x16 *scale, f32x16 *minimum) {
    const int8_t *p = (const int8_t *)chunk + 8 * NIBBLES;
    f32x16 d = f_from_half((const half *)(p + 96));
    for (int b = 0; b < 8; b++) {
        i32x16 low = i_shr(i_from_bytes(p + 16 * (b / 2)), 4 * (b % 2)), bits = i_shr(i_from_bytes(p + 64 + 16 * (b / 4)), 2 * (b % 4));
        i32x16 s = i_or(i_and(low, i_set(15)), i_shl(i_and(bits, i_set(3)), 4));
        scale[b] = f_mul(f_from_int(i_add(s, i_set(-32))), d);
        minimum[b] = f_mul(scale[b], f_set(-128.0f));
    }
}

// Floats of 4 bits (sign, 2 of exponent, 1 of mantissa), doubled, -12 to 12, plus 12. Minus zero is zero.
static const uint8_t mxfp4_values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

ALWAYS_INLINE void mxfp4_quants(const uint8_t *chunk, int block, i32x16 w[8]) { (void)block; unpack_table(chunk, mxfp4_values, w); }
// [16 rows] bytes: the exponent field of half a row's scale as float32 (repack.c).
ALWAYS_INLINE void mxfp4_scales(const uint8_t *chunk, f32x16 *scale, f32x16 *minimum) {
    i32x16 exponents = i_and(i_from_bytes((const int8_t *)chunk + NIBBLES), i_set(255));
    scale[0] = f_exp2_int(i_add(exponents, i_set(-127)));
    minimum[0] = f_mul(scale[0], f_set(-12.0f));
}

// X(name) for every quantised format with panels. Float panels are [columns][16 rows] and need no unpacking.
#define EACH_PANEL_FORMAT(X) \
    X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q8_0) X(q4_k) X(q5_k) X(q6_k) X(q3_k) X(q2_k) X(iq4_nl) X(iq4_xs) X(mxfp4)

ALWAYS_INLINE f32x16 f_from_bf16(const uint16_t *p) {  // a bfloat16 is the upper half of a float32
    uint32_t bits[LANES];
    for (int l = 0; l < LANES; l++) bits[l] = (uint32_t)p[l] << 16;
    f32x16 v;
    memcpy(&v, bits, sizeof v);
    return v;
}

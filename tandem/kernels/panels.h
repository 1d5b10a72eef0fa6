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

// The 6-bit scales and minima of 8 blocks, so ordered that 4 rows of a block are 4 bytes next to each other, for GPUs:
// [8 blocks][16 rows] bytes with the low 4 bits of scale (low nibble) and minimum (high nibble), then [4 pairs of
// blocks][16 rows] bytes with the upper bits of the first block's scale and minimum and of the second block's.
ALWAYS_INLINE void k_scales(const uint8_t *p, f32x16 *scale, f32x16 *minimum) {
    i32x16 four = i_set(15), upper = i_set(48);
    f32x16 d = f_from_half((const half *)(p + 192));
    f32x16 dmin = f_mul(f_from_half((const half *)(p + 224)), f_set(-1.0f));
    for (int b = 0; b < 8; b++) {
        i32x16 low = i_from_bytes((const int8_t *)p + 16 * b), bits = i_from_bytes((const int8_t *)p + 128 + 16 * (b / 2));
        i32x16 s = i_or(i_and(low, four), i_and(b % 2 ? bits : i_shl(bits, 4), upper));
        i32x16 m = i_or(i_and(i_shr(low, 4), four), i_and(b % 2 ? i_shr(bits, 2) : i_shl(bits, 2), upper));
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

// X(name) for every quantised format with panels. Float panels are [columns][16 rows] and need no unpacking.
#define EACH_PANEL_FORMAT(X) X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q8_0) X(q4_k) X(q5_k) X(q6_k)

ALWAYS_INLINE f32x16 f_from_bf16(const uint16_t *p) {  // a bfloat16 is the upper half of a float32
    uint32_t bits[LANES];
    for (int l = 0; l < LANES; l++) bits[l] = (uint32_t)p[l] << 16;
    f32x16 v;
    memcpy(&v, bits, sizeof v);
    return v;
}

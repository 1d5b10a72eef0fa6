// Activations quantised on the fly to int8, with a scale for every 32 columns of a token, in tiles of 16 tokens: a matmul
// reads one linear stream. A matrix [T, K] is q8_block[ceil(T / Q8_TILE)][K / Q8_COLUMNS].
#pragma once
#include "simd.h"

// q8_write gives each half of a row's columns to one vector.
_Static_assert(Q8_COLUMNS == 2 * LANES, "a block's columns are two vectors");
_Static_assert(sizeof(q8_block) == Q8_BLOCK_BYTES, "q8_block has no padding");

ALWAYS_INLINE q8_block *q8_at(void *base, int32_t columns, int32_t token, int32_t column) {
    return (q8_block *)base + (size_t)(token / Q8_TILE) * (columns / Q8_COLUMNS) + column / Q8_COLUMNS;
}

// Quantises 32 values to row `token` of the matrix at `base`. Scale is max|x| / 127, rounding to nearest even.
ALWAYS_INLINE void q8_write(void *base, int32_t columns, int32_t token, int32_t column, f32x16 a, f32x16 b) {
    q8_block *block = q8_at(base, columns, token, column);
    int32_t t = token % Q8_TILE;
    float largest = f_reduce_max(f_max(f_abs(a), f_abs(b)));
    // Below 1e-30 the inverse would overflow; such a block is stored as 0.
    float scale = largest / 127.0f, inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
    i32x16 qa = f_round(f_mul(a, f_set(inverse))), qb = f_round(f_mul(b, f_set(inverse)));
    float low = f_reduce_add(f_from_int(qa)), high = f_reduce_add(f_from_int(qb));  // integers: exact in any order
    i_to_bytes(block->q[t], qa);
    i_to_bytes(block->q[t] + 16, qb);
    block->scale[t] = scale;
    block->sum[t] = scale * (low + high);
    block->low[t] = scale * low;
    block->high[t] = scale * high;
}

// Layouts that several kernels share: quantised activations and the paged KV cache.
#pragma once
#include "simd.h"

// Activations quantised on the fly: int8 with a scale per 32 columns, in tiles of 16 tokens so that a matrix
// kernel reads one linear stream. A matrix [T, K] is q8_block[ceil(T / TILE)][K / 32].
enum { TILE = 16, Q8_COLUMNS = 32 };
typedef struct {
    int8_t q[TILE][Q8_COLUMNS];
    float scale[TILE];  // x = q * scale
    float sum[TILE];    // scale * (sum of the 32 q): what a weight's minimum or zero point is multiplied by
    float low[TILE];    // the same of the first 16 columns, for formats with 16 weights a block (Q6_K)
    float high[TILE];   // and of the last 16
} q8_block;

ALWAYS_INLINE q8_block *q8_at(void *base, int32_t columns, int32_t token, int32_t column) {
    return (q8_block *)base + (size_t)(token / TILE) * (columns / Q8_COLUMNS) + column / Q8_COLUMNS;
}

// Quantises 32 values to row `token` of the matrix at `base`. Scale is max|x| / 127, rounding to nearest even.
ALWAYS_INLINE void q8_write(void *base, int32_t columns, int32_t token, int32_t column, f32x16 a, f32x16 b) {
    q8_block *block = q8_at(base, columns, token, column);
    int32_t t = token % TILE;
    float largest = f_reduce_max(f_max(f_abs(a), f_abs(b)));
    // Below 1e-30 the inverse would overflow; such a block is 0 for every purpose.
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

// One layer's KV cache is blocks of 16 tokens: [blocks][kv_heads]{K [head_dim][16 tokens], V [16 tokens][head_dim]}.
// K is transposed so that 16 keys are 16 lanes; elements are float16, float32 or int8. Of int8, each 32 elements of a
// token's head have a float16 scale, after K and V: {K's [scales][16 tokens], V's [scales][16 tokens]}.
// A slot is block * 16 + token.
enum { KV_BLOCK = 16, KV_SCALED = 32 };
enum { KV_F16 = 0, KV_F32 = 1, KV_Q8 = 2 };

ALWAYS_INLINE int32_t kv_scales(int32_t head_dim) { return (head_dim + KV_SCALED - 1) / KV_SCALED; }

// Of a block's keys and values of one head.
ALWAYS_INLINE size_t kv_head_bytes(int32_t head_dim, int32_t kv) {
    if (kv == KV_Q8) return (size_t)2 * KV_BLOCK * (head_dim + sizeof(half) * kv_scales(head_dim));
    return (size_t)2 * KV_BLOCK * head_dim * (kv == KV_F32 ? sizeof(float) : sizeof(half));
}

// StepInputs' token table: int32 [T][8].
enum { TOKEN_ID = 0, TOKEN_POSITION = 1, TOKEN_SEQUENCE = 2, TOKEN_SOURCE = 3, TOKEN_SLOT = 4 /* + KV group */, TOKEN_INTS = 8 };

// Results: int32 [R][64], the sampled token first.
enum { RESULT_INTS = 64 };

// StepInputs' attention work list: int32 [W][4]. Rows are consecutive tokens of one sequence.
enum { WORK_ROW = 0, WORK_ROWS = 1, WORK_SEQUENCE = 2, WORK_POSITION = 3, WORK_INTS = 4 };

// Head norm, RoPE and the KV store of one token; see rope.py.
#include "kv_layout.h"
#include "rows.h"

enum { Q, K, V, CACHE, TABLE, VECTORS, TOKENS };
enum { Q_HEADS, KV_HEADS, HEAD_DIM, ROT_DIM, Q_STRIDE, K_STRIDE, V_STRIDE, EPS, INTERLEAVED, SLOT_FIELD, KV, PARTS };

static void norm_head(float *x, const float *weight, int32_t dim, float eps) {
    const f32x16 inverse = f_set(rms_inverse(row_squares(x, dim), dim, eps));
    for (int32_t i = 0; i < dim; i += LANES) {
        const int32_t n = dim - i;
        f_store_first(x + i, f_mul(f_mul(f_load_first(x + i, n), inverse), f_load_first(weight + i, n)), n);
    }
}

// Rotates the pairs (a[i], b[i]) by the angles whose cosines and sines are in `table`. The loops are plain: the compiler
// vectorises both forms with their remainders, and without contraction a vector gives the same bits as a scalar.
static void rotate_halves(float *restrict a, float *restrict b, const float *restrict table, int32_t pairs) {
    for (int32_t i = 0; i < pairs; i++) {
        const float u = a[i], v = b[i], cosine = table[2 * i], sine = table[2 * i + 1];
        a[i] = u * cosine - v * sine;
        b[i] = u * sine + v * cosine;
    }
}

static void rotate_neighbours(float *restrict x, const float *restrict table, int32_t pairs) {
    for (int32_t i = 0; i < pairs; i++) {
        const float u = x[2 * i], v = x[2 * i + 1], cosine = table[2 * i], sine = table[2 * i + 1];
        x[2 * i] = u * cosine - v * sine;
        x[2 * i + 1] = u * sine + v * cosine;
    }
}

// Norm and rotation, in place, of `heads` heads; either is left out by a null pointer.
static void prepare(const launch_args *args, float *x, int32_t heads, const float *weight, const float *table) {
    const int32_t dim = args->scalar[HEAD_DIM].i, pairs = args->scalar[ROT_DIM].i / 2;
    for (float *end = x + (size_t)heads * dim; x < end; x += dim) {
        if (weight) norm_head(x, weight, dim, args->scalar[EPS].f);
        if (!table) continue;
        if (args->scalar[INTERLEAVED].i) rotate_neighbours(x, table, pairs);
        else rotate_halves(x, x + pairs, table, pairs);
    }
}

// Element d of x goes to element `at + d * stride` of a head: stride 1 for values, KV_BLOCK for keys.
ALWAYS_INLINE void store_floats(float *to, size_t at, int32_t stride, const float *x, int32_t dim) {
    for (int32_t d = 0; d < dim; d++) to[at + (size_t)d * stride] = x[d];
}

ALWAYS_INLINE void store_halves(half *to, size_t at, int32_t stride, const float *x, int32_t dim) {
    for (int32_t i = 0; i < dim; i += LANES) {
        half rounded[LANES];
        f_to_half(rounded, f_load_first(x + i, dim - i));
        for (int32_t d = 0; d < LANES && i + d < dim; d++) to[at + (size_t)(i + d) * stride] = rounded[d];
    }
}

// The scales of 32 elements each go to scales[0], [KV_BLOCK], ... A scale is max|x| / 127 as float16, and quants
// use the inverse of the stored scale; where rounding makes that too large (numbers below 1e-5), quants end at 127.
ALWAYS_INLINE void store_q8(int8_t *to, size_t at, int32_t stride, half *scales, const float *x, int32_t dim) {
    for (int32_t i = 0; i < dim; i += KV_SCALED, scales += KV_BLOCK) {
        f32x16 v[2] = {f_load_first(x + i, dim - i), i + LANES < dim ? f_load_first(x + i + LANES, dim - i - LANES) : f_zero()};
        *scales = float_to_half(f_reduce_max(f_max(f_abs(v[0]), f_abs(v[1]))) / 127.0f);
        const float scale = half_to_float(*scales), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        for (int32_t part = 0; part < 2; part++) {
            int8_t q[LANES];
            const f32x16 steps = f_max(f_min(f_mul(v[part], f_set(inverse)), f_set(127.0f)), f_set(-127.0f));
            i_to_bytes(q, f_round(steps));
            const int32_t first = i + part * LANES;
            for (int32_t d = 0; d < LANES && first + d < dim; d++) to[at + (size_t)(first + d) * stride] = q[d];
        }
    }
}

// `head`: this head's keys and values in the token's block, in which it is number `inside`.
ALWAYS_INLINE void store_head(char *head, int32_t kv, int32_t keys, int32_t inside, const float *x, int32_t dim) {
    const size_t plane = (size_t)dim * KV_BLOCK;  // elements of keys
    const size_t at = keys ? (size_t)inside : plane + (size_t)inside * dim;
    const int32_t stride = keys ? KV_BLOCK : 1;
    if (kv == KV_F32) store_floats((float *)head, at, stride, x, dim);
    else if (kv == KV_F16) store_halves((half *)head, at, stride, x, dim);
    else store_q8((int8_t *)head, at, stride, (half *)(head + 2 * plane) + (keys ? 0 : kv_scales(dim) * KV_BLOCK) + inside, x, dim);
}

KERNEL(rope) {
    (void)step;
    const int32_t dim = args->scalar[HEAD_DIM].i, kv_heads = args->scalar[KV_HEADS].i, parts = args->scalar[PARTS].i;
    const int32_t *token = (const int32_t *)args->buffer[TOKENS] + (size_t)item * TOKEN_INTS;
    const float *vectors = args->buffer[VECTORS], *norms = parts & PART_NORM ? vectors : NULL, *table = NULL;
    if (parts & PART_ROPE) table = (const float *)args->buffer[TABLE] + (size_t)token[TOKEN_POSITION] * args->scalar[ROT_DIM].i;
    float *q = args->buffer[Q], *k = args->buffer[K];
    const float *v = args->buffer[V];

    if (q) prepare(args, q + (size_t)item * args->scalar[Q_STRIDE].i, args->scalar[Q_HEADS].i, norms, table);
    if (k) {
        k += (size_t)item * args->scalar[K_STRIDE].i;
        prepare(args, k, kv_heads, norms ? norms + dim : NULL, table);
    }
    const int32_t slot = parts & PART_STORE ? token[args->scalar[SLOT_FIELD].i] : -1;
    if (slot < 0) return;

    const int32_t kv = args->scalar[KV].i;
    const size_t head_bytes = kv_head_bytes(dim, kv);
    char *block = (char *)args->buffer[CACHE] + (size_t)(slot / KV_BLOCK) * kv_heads * head_bytes;
    for (int32_t h = 0; h < kv_heads; h++) {
        const float *key = k ? k + (size_t)h * dim : NULL;
        float shifted[MAX_HEAD_DIM];
        if (key && parts & PART_SHIFT) {
            for (int32_t d = 0; d < dim; d++) shifted[d] = key[d] - vectors[h * dim + d];
            key = shifted;
        }
        if (key) store_head(block + h * head_bytes, kv, 1, slot % KV_BLOCK, key, dim);
        if (v) store_head(block + h * head_bytes, kv, 0, slot % KV_BLOCK, v + (size_t)item * args->scalar[V_STRIDE].i + (size_t)h * dim, dim);
    }
}

// Head normalisation, rotary positions and the KV store of one token; see rope.py.
#include "layouts.h"
#include "rows.h"

enum { Q, K, V, CACHE, TABLE, NORMS, TOKENS };
enum { Q_HEADS, KV_HEADS, HEAD_DIM, ROT_DIM, Q_STRIDE, K_STRIDE, V_STRIDE, EPS, INTERLEAVED, SLOT_FIELD, KV_F32, PARTS };
enum { PART_NORM = 1, PART_ROPE = 2, PART_STORE = 4 };

static void norm_head(float *x, const float *weight, int32_t dim, float eps) {
    const f32x16 inverse = f_set(rms_inverse(row_squares(x, dim), dim, eps));
    for (int32_t i = 0; i < dim; i += LANES) {
        const int32_t n = dim - i;
        f_store_first(x + i, f_mul(f_mul(f_load_first(x + i, n), inverse), f_load_first(weight + i, n)), n);
    }
}

// Turns the pairs (a[i], b[i]) by the angles whose cosine and sine stand in `table`. Plain loops: the compiler
// vectorises both forms with their remainders, and without contraction a vector gives the bits a scalar would.
static void turn_halves(float *restrict a, float *restrict b, const float *restrict table, int32_t pairs) {
    for (int32_t i = 0; i < pairs; i++) {
        const float u = a[i], v = b[i], cosine = table[2 * i], sine = table[2 * i + 1];
        a[i] = u * cosine - v * sine;
        b[i] = u * sine + v * cosine;
    }
}

static void turn_neighbours(float *restrict x, const float *restrict table, int32_t pairs) {
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
        if (args->scalar[INTERLEAVED].i) turn_neighbours(x, table, pairs);
        else turn_halves(x, x + pairs, table, pairs);
    }
}

// Element d of x goes to element `at + d * stride` of the cache: stride 1 for values, KV_BLOCK for keys.
ALWAYS_INLINE void store_head(const launch_args *args, size_t at, int32_t stride, const float *x) {
    const int32_t dim = args->scalar[HEAD_DIM].i;
    if (args->scalar[KV_F32].i) {
        float *to = (float *)args->buffer[CACHE] + at;
        for (int32_t d = 0; d < dim; d++) to[(size_t)d * stride] = x[d];
        return;
    }
    half *to = (half *)args->buffer[CACHE] + at;
    for (int32_t i = 0; i < dim; i += LANES) {
        half rounded[LANES];
        f_to_half(rounded, f_load_first(x + i, dim - i));
        for (int32_t d = 0; d < LANES && i + d < dim; d++) to[(size_t)(i + d) * stride] = rounded[d];
    }
}

KERNEL(rope) {
    (void)step;
    const int32_t dim = args->scalar[HEAD_DIM].i, kv_heads = args->scalar[KV_HEADS].i, parts = args->scalar[PARTS].i;
    const int32_t *token = (const int32_t *)args->buffer[TOKENS] + (size_t)item * TOKEN_INTS;
    const float *norms = parts & PART_NORM ? args->buffer[NORMS] : NULL, *table = NULL;
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

    const size_t plane = (size_t)dim * KV_BLOCK;  // elements of one block's keys or values of one head
    const size_t block = (size_t)(slot / KV_BLOCK) * kv_heads * 2 * plane, inside = slot % KV_BLOCK;
    for (int32_t h = 0; h < kv_heads; h++) {
        const size_t head = block + h * 2 * plane;
        if (k) store_head(args, head + inside, KV_BLOCK, k + (size_t)h * dim);
        if (v) store_head(args, head + plane + inside * dim, 1, v + (size_t)item * args->scalar[V_STRIDE].i + (size_t)h * dim);
    }
}

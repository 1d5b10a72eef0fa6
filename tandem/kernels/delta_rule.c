// The gated delta rule for 64 columns of one head's state, token by token; see delta_rule.py.
#include "rows.h"
#include "state_columns.h"
#include "states.h"

enum { QKV, BETA, ALPHA, VECTORS, STATE, CHUNKS, OUT };
enum { K_HEADS, V_HEADS, K_DIM, V_DIM, QKV_STRIDE, BETA_STRIDE, ALPHA_STRIDE, OUT_STRIDE, TILED, SEQUENCES };

// x at length `length`.
static void normalise(float *out, const float *x, int32_t n, float length) {
    const f32x16 factor = f_set(length / __builtin_sqrtf(f_reduce_add(row_squares(x, n)) + 1e-6f));
    for (int32_t i = 0; i < n; i += LANES) f_store_first(out + i, f_mul(f_load_first(x + i, n - i), factor), n - i);
}

// S = decay S + k delta with delta = beta (v - decay S^T k); returns S^T q.
ALWAYS_INLINE columns advance(float *state, const float *k, const float *q, columns v, int32_t rows, float decay,
                              float beta) {
    columns sums, out;
    for (int32_t j = 0; j < VECTORS_OF_ITEM; j++) sums.v[j] = out.v[j] = f_zero();
    for (int32_t i = 0; i < rows; i++)
        for (int32_t j = 0; j < VECTORS_OF_ITEM; j++)
            sums.v[j] = f_fma(f_set(k[i]), f_load(state + i * ITEM_COLUMNS + j * LANES), sums.v[j]);
    columns delta;
    for (int32_t j = 0; j < VECTORS_OF_ITEM; j++)
        delta.v[j] = f_mul(f_set(beta), f_sub(v.v[j], f_mul(f_set(decay), sums.v[j])));
    for (int32_t i = 0; i < rows; i++)
        for (int32_t j = 0; j < VECTORS_OF_ITEM; j++) {
            float *at = state + i * ITEM_COLUMNS + j * LANES;
            const f32x16 s = f_fma(f_set(k[i]), delta.v[j], f_mul(f_set(decay), f_load(at)));
            f_store(at, s);
            out.v[j] = f_fma(f_set(q[i]), s, out.v[j]);
        }
    return out;
}

KERNEL(delta_rule) {
    (void)step;
    const int32_t k_heads = args->scalar[K_HEADS].i, v_heads = args->scalar[V_HEADS].i;
    const int32_t rows = args->scalar[K_DIM].i, v_dim = args->scalar[V_DIM].i;
    const int32_t per_head = (v_dim + ITEM_COLUMNS - 1) / ITEM_COLUMNS, parts = v_heads * per_head;
    if (item / parts >= args->scalar[SEQUENCES].i) return;
    const state_chunk chunk = read_chunk(args->buffer[CHUNKS], args->scalar[SEQUENCES].i, item / parts);
    if (!chunk.tokens) return;
    const int32_t head = item % parts / per_head, column = item % per_head * ITEM_COLUMNS, n = v_dim - column;
    const int32_t key = args->scalar[TILED].i ? head % k_heads : head / (v_heads / k_heads);
    const float *vectors = args->buffer[VECTORS];
    const size_t slot = (size_t)v_heads * rows * v_dim;
    float *states = (float *)args->buffer[STATE] + (size_t)head * rows * v_dim + column;

    float state[MAX_STATE_ROWS * ITEM_COLUMNS], q[MAX_STATE_ROWS], k[MAX_STATE_ROWS];  // state: [k_dim][64]
    for (int32_t i = 0; i < rows; i++)
        store_columns(state + i * ITEM_COLUMNS,
                      load_columns(states + (chunk.source < 0 ? 0 : chunk.source) * slot + (size_t)i * v_dim,
                                   chunk.source == NO_STATE ? 0 : n),
                      ITEM_COLUMNS);
    for (int32_t t = 0; t < chunk.tokens; t++) {
        const size_t token = (size_t)(chunk.first + t);
        const float *row = (const float *)args->buffer[QKV] + token * args->scalar[QKV_STRIDE].i;
        const float *values = row + 2 * (size_t)k_heads * rows + (size_t)head * v_dim + column;
        const float beta = ((const float *)args->buffer[BETA])[token * args->scalar[BETA_STRIDE].i + head];
        const float alpha = ((const float *)args->buffer[ALPHA])[token * args->scalar[ALPHA_STRIDE].i + head];
        normalise(q, row + (size_t)key * rows, rows, 1.0f / __builtin_sqrtf((float)rows));
        normalise(k, row + (size_t)(k_heads + key) * rows, rows, 1.0f);
        const float decay = expf(vectors[v_heads + head] * softplus(alpha + vectors[head]));
        const columns out =
            advance(state, k, q, load_columns(values, n), rows, decay, 1.0f / (1.0f + expf(-beta)));
        store_columns((float *)args->buffer[OUT] + token * args->scalar[OUT_STRIDE].i + (size_t)head * v_dim + column,
                      out, n);
        if (chunk.targets[t] != NO_STATE)
            for (int32_t i = 0; i < rows; i++)
                store_columns(states + chunk.targets[t] * slot + (size_t)i * v_dim,
                              load_columns(state + i * ITEM_COLUMNS, n), n);
    }
}

// The Mamba-2 scan for 64 columns of one head's state, token by token; see ssm_scan.py.
#include "rows.h"
#include "state_columns.h"
#include "states.h"

enum { XBC, DT, VECTORS, STATE, CHUNKS, OUT };
enum { HEADS, GROUPS, HEAD_DIM, STATE_ROWS, XBC_STRIDE, DT_STRIDE, OUT_STRIDE, SEQUENCES };

// S = decay S + b x; returns S^T c.
ALWAYS_INLINE columns advance(float *state, const float *b, const float *c, columns x, int32_t rows, float decay) {
    columns out;
    for (int32_t j = 0; j < VECTORS_OF_ITEM; j++) out.v[j] = f_zero();
    for (int32_t i = 0; i < rows; i++)
        for (int32_t j = 0; j < VECTORS_OF_ITEM; j++) {
            float *at = state + i * ITEM_COLUMNS + j * LANES;
            const f32x16 s = f_fma(f_set(b[i]), x.v[j], f_mul(f_set(decay), f_load(at)));
            f_store(at, s);
            out.v[j] = f_fma(f_set(c[i]), s, out.v[j]);
        }
    return out;
}

KERNEL(ssm_scan) {
    (void)step;
    const int32_t heads = args->scalar[HEADS].i, groups = args->scalar[GROUPS].i;
    const int32_t dim = args->scalar[HEAD_DIM].i, rows = args->scalar[STATE_ROWS].i;
    const int32_t per_head = (dim + ITEM_COLUMNS - 1) / ITEM_COLUMNS, parts = heads * per_head;
    if (item / parts >= args->scalar[SEQUENCES].i) return;
    const state_chunk chunk = read_chunk(args->buffer[CHUNKS], args->scalar[SEQUENCES].i, item / parts);
    if (!chunk.tokens) return;
    const int32_t head = item % parts / per_head, column = item % per_head * ITEM_COLUMNS, n = dim - column;
    const float *vectors = args->buffer[VECTORS];
    const float bias = vectors[head], a = vectors[heads + head], d = vectors[2 * heads + head];
    const size_t slot = (size_t)heads * rows * dim;
    float *states = (float *)args->buffer[STATE] + (size_t)head * rows * dim + column;

    float state[MAX_STATE_ROWS * ITEM_COLUMNS];  // [state_rows][64]
    for (int32_t i = 0; i < rows; i++)
        store_columns(state + i * ITEM_COLUMNS,
                      load_columns(states + (chunk.source < 0 ? 0 : chunk.source) * slot + (size_t)i * dim,
                                   chunk.source == NO_STATE ? 0 : n),
                      ITEM_COLUMNS);
    for (int32_t t = 0; t < chunk.tokens; t++) {
        const size_t token = (size_t)(chunk.first + t);
        const float *row = (const float *)args->buffer[XBC] + token * args->scalar[XBC_STRIDE].i;
        const float *b = row + (size_t)heads * dim + (size_t)(head / (heads / groups)) * rows;
        const float dt = softplus(((const float *)args->buffer[DT])[token * args->scalar[DT_STRIDE].i + head] + bias);
        const columns x = load_columns(row + (size_t)head * dim + column, n);
        columns scaled = x;
        for (int32_t j = 0; j < VECTORS_OF_ITEM; j++) scaled.v[j] = f_mul(f_set(dt), x.v[j]);
        columns out = advance(state, b, b + (size_t)groups * rows, scaled, rows, expf(a * dt));
        for (int32_t j = 0; j < VECTORS_OF_ITEM; j++) out.v[j] = f_fma(f_set(d), x.v[j], out.v[j]);
        store_columns((float *)args->buffer[OUT] + token * args->scalar[OUT_STRIDE].i + (size_t)head * dim + column,
                      out, n);
        if (chunk.targets[t] != NO_STATE)
            for (int32_t i = 0; i < rows; i++)
                store_columns(states + chunk.targets[t] * slot + (size_t)i * dim,
                              load_columns(state + i * ITEM_COLUMNS, n), n);
    }
}

// RMS norm of each head of one token, times SiLU of a gate; see gated_norm.py.
#include "activation_functions.h"
#include "q8_tiles.h"
#include "rows.h"

enum { X, GATE, WEIGHT, OUT };
enum { HEADS, HEAD_DIM, X_STRIDE, GATE_STRIDE, OUT_STRIDE, EPS, OUT_Q8 };

ALWAYS_INLINE f32x16 gated(const float *x, const float *gate, const float *weight, f32x16 inverse, int32_t n) {
    const f32x16 scaled = f_mul(f_mul(f_load_first(x, n), inverse), f_load_first(weight, n));
    return f_mul(scaled, f_silu(f_load_first(gate, n)));
}

KERNEL(gated_norm) {
    (void)step;
    const int32_t heads = args->scalar[HEADS].i, dim = args->scalar[HEAD_DIM].i;
    const float *x = (const float *)args->buffer[X] + (size_t)item * args->scalar[X_STRIDE].i;
    const float *gate = (const float *)args->buffer[GATE] + (size_t)item * args->scalar[GATE_STRIDE].i;
    const float *weight = args->buffer[WEIGHT];
    for (int32_t at = 0; at < heads * dim; at += dim) {
        const f32x16 inverse = f_set(rms_inverse(row_squares(x + at, dim), dim, args->scalar[EPS].f));
        if (args->scalar[OUT_Q8].i) {
            for (int32_t i = 0; i < dim; i += Q8_COLUMNS)
                q8_write(args->buffer[OUT], heads * dim, item, at + i,
                         gated(x + at + i, gate + at + i, weight + i, inverse, LANES),
                         gated(x + at + i + LANES, gate + at + i + LANES, weight + i + LANES, inverse, LANES));
        } else {
            float *out = (float *)args->buffer[OUT] + (size_t)item * args->scalar[OUT_STRIDE].i + at;
            for (int32_t i = 0; i < dim; i += LANES)
                f_store_first(out + i, gated(x + at + i, gate + at + i, weight + i, inverse, dim - i), dim - i);
        }
    }
}

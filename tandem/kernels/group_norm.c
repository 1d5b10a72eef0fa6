// RMS norm of each group of columns of one token; see group_norm.py.
#include "q8_tiles.h"
#include "rows.h"

enum { X, WEIGHT, OUT };
enum { GROUPS, GROUP_DIM, X_STRIDE, OUT_STRIDE, EPS, OUT_Q8 };

ALWAYS_INLINE f32x16 scaled(const float *x, const float *weight, f32x16 inverse, int32_t n) {
    return f_mul(f_mul(f_load_first(x, n), inverse), f_load_first(weight, n));
}

KERNEL(group_norm) {
    (void)step;
    const int32_t groups = args->scalar[GROUPS].i, dim = args->scalar[GROUP_DIM].i;
    const float *x = (const float *)args->buffer[X] + (size_t)item * args->scalar[X_STRIDE].i;
    const float *weight = args->buffer[WEIGHT];
    for (int32_t at = 0; at < groups * dim; at += dim) {
        const f32x16 inverse = f_set(rms_inverse(row_squares(x + at, dim), dim, args->scalar[EPS].f));
        if (args->scalar[OUT_Q8].i) {
            for (int32_t i = at; i < at + dim; i += Q8_COLUMNS)
                q8_write(args->buffer[OUT], groups * dim, item, i, scaled(x + i, weight + i, inverse, LANES),
                         scaled(x + i + LANES, weight + i + LANES, inverse, LANES));
        } else {
            float *out = (float *)args->buffer[OUT] + (size_t)item * args->scalar[OUT_STRIDE].i;
            for (int32_t i = at; i < at + dim; i += LANES)
                f_store_first(out + i, scaled(x + i, weight + i, inverse, at + dim - i), at + dim - i);
        }
    }
}

// Layer normalisation of one row; see layer_norm.py.
#include "q8_tiles.h"
#include "rows.h"

enum { X, WEIGHT, BIAS, ROWS, OUT };
enum { DIM, X_STRIDE, OUT_STRIDE, EPS, OUT_Q8, USE_ROWS };

// Columns i to i + 15 of the result, `n` of which there are.
ALWAYS_INLINE f32x16 normalised(const float *x, f32x16 mean, f32x16 inverse, const float *weight, const float *bias,
                                int32_t i, int32_t n) {
    const f32x16 scaled = f_mul(f_sub(f_load_first(x + i, n), mean), inverse);
    return f_fma(scaled, f_load_first(weight + i, n), bias ? f_load_first(bias + i, n) : f_zero());
}

KERNEL(layer_norm) {
    (void)step;
    const int32_t dim = args->scalar[DIM].i;
    const int32_t row = args->scalar[USE_ROWS].i == 1 ? ((const int32_t *)args->buffer[ROWS])[item] : item;
    const float *x = (const float *)args->buffer[X] + (size_t)row * args->scalar[X_STRIDE].i;
    const float *weight = args->buffer[WEIGHT], *bias = args->buffer[BIAS];

    f32x16 sums = f_zero(), squares = f_zero();
    for (int32_t i = 0; i < dim; i += LANES) sums = f_add(sums, f_load_first(x + i, dim - i));
    const f32x16 mean = f_set(f_reduce_add(sums) / (float)dim);
    for (int32_t i = 0; i < dim; i += LANES) {
        float centred[LANES] = {0};  // 0 past the row's end
        f_store_first(centred, f_sub(f_load_first(x + i, dim - i), mean), dim - i);
        squares = f_fma(f_load(centred), f_load(centred), squares);
    }
    const f32x16 inverse = f_set(rms_inverse(squares, dim, args->scalar[EPS].f));
    if (args->scalar[OUT_Q8].i) {
        for (int32_t i = 0; i < dim; i += Q8_COLUMNS)
            q8_write(args->buffer[OUT], dim, item, i, normalised(x, mean, inverse, weight, bias, i, LANES),
                     normalised(x, mean, inverse, weight, bias, i + LANES, LANES));
    } else {
        float *out = (float *)args->buffer[OUT] + (size_t)item * args->scalar[OUT_STRIDE].i;
        for (int32_t i = 0; i < dim; i += LANES)
            f_store_first(out + i, normalised(x, mean, inverse, weight, bias, i, dim - i), dim - i);
    }
}

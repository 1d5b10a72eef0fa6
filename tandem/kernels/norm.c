// Residual addition and RMS normalisation of one row; see norm.py.
#include "q8_tiles.h"
#include "rows.h"

enum { X, ADD, POST_WEIGHT, WEIGHT, OUT, ROWS };
enum { DIM, X_STRIDE, ADD_STRIDE, OUT_STRIDE, EPS, OUT_Q8, USE_ROWS };

// x += add, or x += normalised add * weight. Returns the partial sums of the new x's squares.
static f32x16 add_row(float *x, const float *add, const float *weight, int32_t dim, float eps) {
    const f32x16 inverse = f_set(weight ? rms_inverse(row_squares(add, dim), dim, eps) : 1.0f);
    f32x16 squares = f_zero();
    for (int32_t i = 0; i < dim; i += LANES) {
        const int32_t n = dim - i;
        f32x16 v = f_load_first(add + i, n), old = f_load_first(x + i, n);
        if (weight) v = f_mul(f_mul(v, inverse), f_load_first(weight + i, n));  // rounded as a norm of its own would
        v = f_add(old, v);
        f_store_first(x + i, v, n);
        squares = f_fma(v, v, squares);
    }
    return squares;
}

KERNEL(norm) {
    (void)step;
    const int32_t dim = args->scalar[DIM].i;
    const int32_t row = args->scalar[USE_ROWS].i ? ((const int32_t *)args->buffer[ROWS])[item] : item;
    const float *add = args->buffer[ADD], *weight = args->buffer[WEIGHT], eps = args->scalar[EPS].f;
    float *x = (float *)args->buffer[X] + (size_t)row * args->scalar[X_STRIDE].i;
    f32x16 squares;
    if (add)
        squares = add_row(x, add + (size_t)row * args->scalar[ADD_STRIDE].i, args->buffer[POST_WEIGHT], dim, eps);
    else
        squares = row_squares(x, dim);
    if (!weight) return;

    const f32x16 inverse = f_set(rms_inverse(squares, dim, eps));
    if (args->scalar[OUT_Q8].i) {
        for (int32_t i = 0; i < dim; i += Q8_COLUMNS) {
            f32x16 a = f_mul(f_mul(f_load(x + i), inverse), f_load(weight + i));
            f32x16 b = f_mul(f_mul(f_load(x + i + LANES), inverse), f_load(weight + i + LANES));
            q8_write(args->buffer[OUT], dim, item, i, a, b);
        }
    } else {
        float *out = (float *)args->buffer[OUT] + (size_t)item * args->scalar[OUT_STRIDE].i;
        for (int32_t i = 0; i < dim; i += LANES) {
            const int32_t n = dim - i;
            f_store_first(out + i, f_mul(f_mul(f_load_first(x + i, n), inverse), f_load_first(weight + i, n)), n);
        }
    }
}

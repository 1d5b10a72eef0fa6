// Rows of float32 whose length need not be a multiple of 16: the last, shorter vector is padded with zeros.
#pragma once
#include "simd.h"

// The first `n` floats (1 to 16), then zeros; reads nothing past them.
ALWAYS_INLINE f32x16 f_load_first(const float *p, int32_t n) {
    if (n >= LANES) return f_load(p);
    float padded[LANES] = {0};
    memcpy(padded, p, (size_t)n * sizeof(float));
    return f_load(padded);
}

ALWAYS_INLINE void f_store_first(float *p, f32x16 v, int32_t n) {
    if (n >= LANES) {
        f_store(p, v);
        return;
    }
    float padded[LANES];
    f_store(padded, v);
    memcpy(p, padded, (size_t)n * sizeof(float));
}

// 1 / sqrt(mean of squares + eps), from 16 partial sums of squares.
ALWAYS_INLINE float rms_inverse(f32x16 squares, int32_t n, float eps) {
    return 1.0f / __builtin_sqrtf(f_reduce_add(squares) / (float)n + eps);
}

ALWAYS_INLINE f32x16 row_squares(const float *x, int32_t n) {
    f32x16 squares = f_zero();
    for (int32_t i = 0; i < n; i += LANES) {
        f32x16 v = f_load_first(x + i, n - i);
        squares = f_fma(v, v, squares);
    }
    return squares;
}

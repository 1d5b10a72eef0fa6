// 64 columns of a head's state matrix, as vectors: what one item of a scan computes.
#pragma once
#include <math.h>

#include "simd.h"

enum { VECTORS_OF_ITEM = 4, ITEM_COLUMNS = VECTORS_OF_ITEM * LANES };

typedef struct {
    f32x16 v[VECTORS_OF_ITEM];
} columns;

// The first n of 64 floats, then zeros.
ALWAYS_INLINE columns load_columns(const float *p, int32_t n) {
    columns c;
    for (int32_t i = 0; i < VECTORS_OF_ITEM; i++)
        c.v[i] = n > i * LANES ? f_load_first(p + i * LANES, n - i * LANES) : f_zero();
    return c;
}

ALWAYS_INLINE void store_columns(float *p, columns c, int32_t n) {
    for (int32_t i = 0; i < VECTORS_OF_ITEM && n > i * LANES; i++) f_store_first(p + i * LANES, c.v[i], n - i * LANES);
}

static inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

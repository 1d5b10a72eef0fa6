// The mean of neighbouring rows, or these rows one after the other; see pool.py.
#include "rows.h"

enum { X, WEIGHT, BIAS, OUT };
enum { DIM, GROUP, CONCATENATE, X_STRIDE, OUT_STRIDE };

KERNEL(pool) {
    (void)step;
    const int32_t dim = args->scalar[DIM].i, group = args->scalar[GROUP].i, stride = args->scalar[X_STRIDE].i;
    const float *x = (const float *)args->buffer[X] + (size_t)item * group * stride;
    float *out = (float *)args->buffer[OUT] + (size_t)item * args->scalar[OUT_STRIDE].i;
    if (args->scalar[CONCATENATE].i) {
        for (int32_t g = 0; g < group; g++)
            memcpy(out + (size_t)g * dim, x + (size_t)g * stride, sizeof(float) * dim);
        return;
    }
    const f32x16 factor = f_set(1.0f / (float)group);
    const float *weight = args->buffer[WEIGHT], *bias = args->buffer[BIAS];
    for (int32_t i = 0; i < dim; i += LANES) {
        f32x16 sum = f_zero();
        for (int32_t g = 0; g < group; g++) sum = f_add(sum, f_load_first(x + (size_t)g * stride + i, dim - i));
        f32x16 mean = f_mul(sum, factor);
        if (weight) mean = f_fma(mean, f_load_first(weight + i, dim - i), f_load_first(bias + i, dim - i));
        f_store_first(out + i, mean, dim - i);
    }
}

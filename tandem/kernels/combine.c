// Adds what the experts of one token computed; see combine.py.
#include "rows.h"

enum { X, WEIGHTS, GROUPS, SHARED, GATE, OUT };
enum { DIM, EXPERTS, USED, X_STRIDE, SHARED_STRIDE, GATE_STRIDE, OUT_STRIDE };

KERNEL(combine) {
    (void)step;
    int32_t dim = args->scalar[DIM].i, used = args->scalar[USED].i;
    const int32_t *groups = args->buffer[GROUPS];
    const int32_t *slots = groups + GROUP_HEADER + args->scalar[EXPERTS].i * GROUP_INTS + item * used;
    const float *weights = (const float *)args->buffer[WEIGHTS] + (size_t)item * used;
    const float *shared = args->buffer[SHARED], *gate = args->buffer[GATE];
    float *out = (float *)args->buffer[OUT] + (size_t)item * args->scalar[OUT_STRIDE].i;
    if (shared) shared += (size_t)item * args->scalar[SHARED_STRIDE].i;
    f32x16 share = f_set(1.0f);
    if (gate) share = f_div(share, f_add(share, f_exp(f_set(-gate[(size_t)item * args->scalar[GATE_STRIDE].i]))));
    for (int32_t i = 0; i < dim; i += LANES) {
        int32_t n = dim - i;
        f32x16 sum = f_zero();
        for (int32_t j = 0; j < used; j++) {
            const float *x = (const float *)args->buffer[X] + (size_t)slots[j] * args->scalar[X_STRIDE].i + i;
            sum = f_fma(f_set(weights[j]), f_load_first(x, n), sum);
        }
        if (shared) sum = f_fma(share, f_load_first(shared + i, n), sum);
        f_store_first(out + i, sum, n);
    }
}

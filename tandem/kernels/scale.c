// Multiplies one row in place; see scale.py.
#include "rows.h"

enum { X, FACTORS, CHOSEN };
enum { DIM, STRIDE };

KERNEL(scale) {
    (void)step;
    const int32_t dim = args->scalar[DIM].i;
    const size_t row = (size_t)item * args->scalar[STRIDE].i;
    const float *factors = args->buffer[FACTORS];
    const int32_t *chosen = args->buffer[CHOSEN];
    float *x = (float *)args->buffer[X] + row;
    for (int32_t i = 0; i < dim; i++) x[i] *= factors[chosen ? chosen[row + i] : 0];
}

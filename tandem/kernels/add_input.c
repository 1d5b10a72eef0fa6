// Adds a row of the host's to that of an image's token; see add_input.py.
#include "rows.h"

enum { X, INPUTS, TOKENS };
enum { DIM, STRIDE, FIRST, INPUT_STRIDE };

KERNEL(add_input) {
    (void)step;
    const int32_t source = ((const int32_t *)args->buffer[TOKENS])[(size_t)item * TOKEN_INTS + TOKEN_SOURCE];
    if (source >= 0) return;
    float *x = (float *)args->buffer[X] + (size_t)item * args->scalar[STRIDE].i;
    const float *row = (const float *)args->buffer[INPUTS] + (size_t)(-1 - source) * args->scalar[INPUT_STRIDE].i + args->scalar[FIRST].i;
    for (int32_t i = 0; i < args->scalar[DIM].i; i++) x[i] += row[i];
}

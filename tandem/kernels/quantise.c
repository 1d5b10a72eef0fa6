// One row of float32 to int8 blocks; see quantise.py.
#include "q8_tiles.h"

enum { X, OUT };
enum { DIM, X_STRIDE, COUNT_ROWS };

KERNEL(quantise) {
    (void)step;
    const int32_t dim = args->scalar[DIM].i;
    const float *x = (const float *)args->buffer[X] + (size_t)item * args->scalar[X_STRIDE].i;
    for (int32_t i = 0; i < dim; i += Q8_COLUMNS)
        q8_write(args->buffer[OUT], dim, item, i, f_load(x + i), f_load(x + i + LANES));
}

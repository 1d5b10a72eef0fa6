// The gate of a feed-forward layer for one token; see glu.py.
#include "activation_functions.h"
#include "q8_tiles.h"
#include "rows.h"

enum { GATE, UP, OUT };
enum { DIM, GATE_STRIDE, UP_STRIDE, OUT_STRIDE, ACTIVATION, OUT_Q8 };

KERNEL(glu) {
    (void)step;
    const int32_t dim = args->scalar[DIM].i, activation = args->scalar[ACTIVATION].i;
    const float *gate = (const float *)args->buffer[GATE] + (size_t)item * args->scalar[GATE_STRIDE].i;
    const float *up = (const float *)args->buffer[UP] + (size_t)item * args->scalar[UP_STRIDE].i;
    if (args->scalar[OUT_Q8].i) {
        for (int32_t i = 0; i < dim; i += Q8_COLUMNS) {
            f32x16 a = f_mul(f_activate(f_load(gate + i), activation), f_load(up + i));
            f32x16 b = f_mul(f_activate(f_load(gate + i + LANES), activation), f_load(up + i + LANES));
            q8_write(args->buffer[OUT], dim, item, i, a, b);
        }
    } else {
        float *out = (float *)args->buffer[OUT] + (size_t)item * args->scalar[OUT_STRIDE].i;
        for (int32_t i = 0; i < dim; i += LANES) {
            const int32_t n = dim - i;
            f_store_first(out + i, f_mul(f_activate(f_load_first(gate + i, n), activation), f_load_first(up + i, n)), n);
        }
    }
}

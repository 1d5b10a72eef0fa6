// The gate of a feed-forward layer for one token; see glu.py.
#include "activation_functions.h"
#include "q8_tiles.h"
#include "rows.h"

enum { GATE, UP, OUT };
enum { DIM, GATE_STRIDE, UP_STRIDE, OUT_STRIDE, ACTIVATION, OUT_Q8 };

ALWAYS_INLINE f32x16 gated(const float *gate, const float *up, int32_t n, int32_t activation) {
    const f32x16 active = f_activate(f_load_first(gate, n), activation);
    return up ? f_mul(active, f_load_first(up, n)) : active;
}

KERNEL(glu) {
    (void)step;
    const int32_t dim = args->scalar[DIM].i, activation = args->scalar[ACTIVATION].i;
    const float *gate = (const float *)args->buffer[GATE] + (size_t)item * args->scalar[GATE_STRIDE].i;
    const float *up = args->buffer[UP] ? (const float *)args->buffer[UP] + (size_t)item * args->scalar[UP_STRIDE].i : 0;
    if (args->scalar[OUT_Q8].i) {
        for (int32_t i = 0; i < dim; i += Q8_COLUMNS)
            q8_write(args->buffer[OUT], dim, item, i, gated(gate + i, up ? up + i : 0, LANES, activation),
                     gated(gate + i + LANES, up ? up + i + LANES : 0, LANES, activation));
    } else {
        float *out = (float *)args->buffer[OUT] + (size_t)item * args->scalar[OUT_STRIDE].i;
        for (int32_t i = 0; i < dim; i += LANES)
            f_store_first(out + i, gated(gate + i, up ? up + i : 0, dim - i, activation), dim - i);
    }
}

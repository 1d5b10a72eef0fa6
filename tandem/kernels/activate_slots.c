// Applies an activation function to the slots of one token; see activate_slots.py.
#include "activation_functions.h"
#include "q8_tiles.h"
#include "rows.h"

enum { X, GROUPS, OUT };
enum { DIM, EXPERTS, USED, X_STRIDE, OUT_STRIDE, ACTIVATION, OUT_Q8 };

ALWAYS_INLINE f32x16 activated(const float *x, int32_t n, int32_t activation) {
    return f_activate(f_load_first(x, n), activation);
}

KERNEL(activate_slots) {
    (void)step;
    const int32_t dim = args->scalar[DIM].i, used = args->scalar[USED].i, activation = args->scalar[ACTIVATION].i;
    const int32_t *groups = args->buffer[GROUPS];
    const int32_t *slots = groups + GROUP_HEADER + args->scalar[EXPERTS].i * GROUP_INTS + item * used;
    for (int32_t j = 0; j < used; j++) {
        const float *x = (const float *)args->buffer[X] + (size_t)slots[j] * args->scalar[X_STRIDE].i;
        if (args->scalar[OUT_Q8].i) {
            for (int32_t i = 0; i < dim; i += Q8_COLUMNS)
                q8_write(args->buffer[OUT], dim, slots[j], i, activated(x + i, LANES, activation),
                         activated(x + i + LANES, LANES, activation));
        } else {
            float *out = (float *)args->buffer[OUT] + (size_t)slots[j] * args->scalar[OUT_STRIDE].i;
            for (int32_t i = 0; i < dim; i += LANES)
                f_store_first(out + i, activated(x + i, dim - i, activation), dim - i);
        }
    }
}

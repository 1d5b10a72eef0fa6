// Copies one token's activations to its slots; see gather_tokens.py.
#include "q8_tiles.h"

enum { X, GROUPS, OUT };
enum { DIM, EXPERTS, USED, X_STRIDE, OUT_STRIDE, Q8 };

static void copy_q8(const launch_args *args, int32_t token, int32_t slot) {
    int32_t dim = args->scalar[DIM].i, from = token % Q8_TILE, to = slot % Q8_TILE;
    const q8_block *x = q8_at(args->buffer[X], dim, token, 0);
    q8_block *out = q8_at(args->buffer[OUT], dim, slot, 0);
    for (int32_t column = 0; column < dim; column += Q8_COLUMNS, x++, out++) {
        memcpy(out->q[to], x->q[from], Q8_COLUMNS);
        out->scale[to] = x->scale[from];
        out->sum[to] = x->sum[from];
        out->low[to] = x->low[from];
        out->high[to] = x->high[from];
    }
}

KERNEL(gather_tokens) {
    (void)step;
    int32_t used = args->scalar[USED].i;
    const int32_t *groups = args->buffer[GROUPS];
    const int32_t *slots = groups + GROUP_HEADER + args->scalar[EXPERTS].i * GROUP_INTS + item * used;
    for (int32_t j = 0; j < used; j++) {
        if (args->scalar[Q8].i) copy_q8(args, item, slots[j]);
        else
            memcpy((float *)args->buffer[OUT] + (size_t)slots[j] * args->scalar[OUT_STRIDE].i,
                   (const float *)args->buffer[X] + (size_t)item * args->scalar[X_STRIDE].i, sizeof(float) * (size_t)args->scalar[DIM].i);
    }
}

// The gate of a feed-forward layer for one token; see glu.py.
#include "activation_functions.h"
#include "q8_tiles.h"
#include "rows.h"

enum { GATE, UP, LIMITS, OUT };
enum { DIM, GATE_STRIDE, UP_STRIDE, OUT_STRIDE, ACTIVATION, OUT_Q8, COUNT_ROWS, ERF };

// GELU by its definition, x/2 (1 + erf(x / sqrt 2)), with an absolute error of 2e-7 |x|: formula 7.1.26 of Abramowitz and
// Stegun for erfc. Beyond 9 it is 0 in float32.
ALWAYS_INLINE f32x16 f_gelu_erf(f32x16 x) {
    const f32x16 size = f_abs(x), z = f_min(f_mul(size, f_set(0.70710678119f)), f_set(9.0f));
    const f32x16 t = f_div(f_set(1.0f), f_fma(z, f_set(0.3275911f), f_set(1.0f)));
    f32x16 sum = f_fma(t, f_set(1.061405429f), f_set(-1.453152027f));
    sum = f_fma(t, sum, f_set(1.421413741f));
    sum = f_fma(t, sum, f_set(-0.284496736f));
    sum = f_mul(t, f_fma(t, sum, f_set(0.254829592f)));
    const f32x16 erfc = f_mul(sum, f_exp(f_sub(f_zero(), f_mul(z, z))));
    return f_sub(f_max(x, f_zero()), f_mul(f_mul(size, f_set(0.5f)), erfc));
}

enum { GELU_ERF = -1 };  // beside the constants ACTIVATION_*

ALWAYS_INLINE f32x16 gated(const float *gate, const float *up, const float *limits, int32_t n, int32_t activation) {
    const f32x16 x = f_load_first(gate, n), active = activation == GELU_ERF ? f_gelu_erf(x) : f_activate(x, activation);
    const f32x16 y = up ? f_mul(active, f_load_first(up, n)) : active;
    return limits ? f_min(f_max(y, f_set(limits[0])), f_set(limits[1])) : y;
}

KERNEL(glu) {
    (void)step;
    const int32_t dim = args->scalar[DIM].i, activation = args->scalar[ERF].i ? GELU_ERF : args->scalar[ACTIVATION].i;
    const float *gate = (const float *)args->buffer[GATE] + (size_t)item * args->scalar[GATE_STRIDE].i;
    const float *up = args->buffer[UP] ? (const float *)args->buffer[UP] + (size_t)item * args->scalar[UP_STRIDE].i : 0;
    const float *limits = args->buffer[LIMITS];
    if (args->scalar[OUT_Q8].i) {
        for (int32_t i = 0; i < dim; i += Q8_COLUMNS)
            q8_write(args->buffer[OUT], dim, item, i, gated(gate + i, up ? up + i : 0, limits, LANES, activation),
                     gated(gate + i + LANES, up ? up + i + LANES : 0, limits, LANES, activation));
    } else {
        float *out = (float *)args->buffer[OUT] + (size_t)item * args->scalar[OUT_STRIDE].i;
        for (int32_t i = 0; i < dim; i += LANES)
            f_store_first(out + i, gated(gate + i, up ? up + i : 0, limits, dim - i, activation), dim - i);
    }
}

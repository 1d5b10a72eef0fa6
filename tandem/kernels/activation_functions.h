// The activation functions of gated layers, with a relative error of 1e-6; in GELU's left tail (below -3) 1e-8 absolute.
#pragma once
#include "simd.h"

// x * sigmoid(x)
ALWAYS_INLINE f32x16 f_silu(f32x16 x) {
    return f_div(x, f_add(f_set(1.0f), f_exp(f_sub(f_zero(), x))));
}

// GELU in its tanh form: x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3), which is x * sigmoid(2u).
ALWAYS_INLINE f32x16 f_gelu(f32x16 x) {
    f32x16 minus_two_u_over_x = f_fma(f_mul(x, x), f_set(-0.0713548162726f), f_set(-1.59576912161f));
    return f_div(x, f_add(f_set(1.0f), f_exp(f_mul(x, minus_two_u_over_x))));
}

ALWAYS_INLINE f32x16 f_sigmoid(f32x16 x) {
    return f_div(f_set(1.0f), f_add(f_set(1.0f), f_exp(f_sub(f_zero(), x))));
}

ALWAYS_INLINE f32x16 f_activate(f32x16 x, int32_t activation) {
    if (activation == ACTIVATION_IDENTITY) return x;
    if (activation == ACTIVATION_SIGMOID) return f_sigmoid(x);
    if (activation == ACTIVATION_SQUARED_RELU) return f_mul(f_max(x, f_zero()), f_max(x, f_zero()));
    return activation == ACTIVATION_GELU ? f_gelu(x) : f_silu(x);
}

// The gated layer of gpt-oss: gate * sigmoid(1.702 gate) * (up + 1), both clamped to 7.
ALWAYS_INLINE f32x16 f_clamped_glu(f32x16 gate, f32x16 up) {
    gate = f_min(gate, f_set(7.0f));
    up = f_max(f_min(up, f_set(7.0f)), f_set(-7.0f));
    f32x16 sigmoid = f_div(f_set(1.0f), f_add(f_set(1.0f), f_exp(f_mul(gate, f_set(-1.702f)))));
    return f_mul(f_mul(gate, sigmoid), f_add(up, f_set(1.0f)));
}

// tanh with an absolute error of about 1e-7: enough for soft caps, whose results are added to numbers of order 1.
ALWAYS_INLINE f32x16 f_tanh(f32x16 x) {
    f32x16 e = f_exp(f_add(x, x));
    return f_sub(f_set(1.0f), f_div(f_set(2.0f), f_add(e, f_set(1.0f))));
}

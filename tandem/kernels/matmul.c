// out[t, n] = sum over k of weights[n, k] * x[t, k] (+ bias[n]), then an epilogue. One item is `panels_per_item`
// panels of 16 rows, for all tokens of the step: a GEMV for one token, a GEMM for many.
//
// A row is a lane, and each (row, token) adds its columns in order. So the sum does not depend on the number of tokens in
// a register tile, and the engine's output does not depend on batching.
#include "activation_functions.h"
#include "panels.h"

enum { X, WEIGHTS, BIAS, OUT, GROUPS };
// The last two of an expert matmul's scalars are others: EXPERTS in place of COUNT, USED in place of SOFTCAP.
enum { FORMAT, ROWS, COLUMNS, X_STRIDE, OUT_STRIDE, PANELS_PER_ITEM, COUNT, EPILOGUE, OUT_Q8, SOFTCAP, EXPERTS = COUNT };
enum { GLU_PANELS = 2 * GLU_ROWS / PANEL_ROWS };  // GLU_ROWS rows of gate, then as many of up

#if defined(ISA_avx512)
#define MAX_TILE_TOKENS 16  // tokens of a register tile: 16 sums + 8 weights + scales fill the 32 registers
#else
#define MAX_TILE_TOKENS 4
#endif

#define PREFETCH_BYTES 5120  // distance of prefetches: the bytes that a core reads during a memory access

typedef void quants_fn(const uint8_t *, int, i32x16 *);
typedef void scales_fn(const uint8_t *, f32x16 *, f32x16 *);
typedef struct {
    int span, bytes, fine, small;  // columns and bytes of a chunk; 1: a scale per 16 columns; 1: quants fit in 7 bits
    float zero;                    // of a fine format: the quant that stands for 0, or 0 if it has minima
    quants_fn *quants;
    scales_fn *scales;
} format;

ALWAYS_INLINE i32x16 dot16(int small, i32x16 sum, const i32x16 *w, const int8_t *x) {
    for (int s = 0; s < 4; s++) sum = small ? i_dot4_small(sum, w[s], x + 4 * s) : i_dot4(sum, w[s], x + 4 * s);
    return sum;
}

// What zero points add to the dot products of a block's low and high columns, for each token: -zero times the sum of its quants, which
// is found in the float sums. So zero points cost no operation of their own, and columns with a scale of their own no minimum.
ALWAYS_INLINE void zero_sums(float zero, const q8_block *x, int32_t *low, int32_t *high) {
    f32x16 factor = f_div(f_set(-zero), f_max(f_load(x->scale), f_set(1e-37f)));  // a block of zeros has scale 0
    i_store(low, f_round(f_mul(factor, f_load(x->low))));
    i_store(high, f_round(f_mul(factor, f_load(x->high))));
}

// sums[t] += 16 rows x all columns, for `tokens` (a constant) tokens from `first` of the tile at x.
ALWAYS_INLINE void panel_times_tile(format f, int tokens, const uint8_t *panel, const q8_block *x, int first, int columns,
                                    f32x16 *sums) {
    f32x16 acc[MAX_TILE_TOKENS];
#pragma GCC unroll 16
    for (int t = 0; t < tokens; t++) acc[t] = f_zero();
    for (int column = 0; column < columns; column += f.span, panel += f.bytes) {
        f32x16 scale[16], minimum[16];
        f.scales(panel, scale, minimum);
#pragma GCC unroll 1
        for (int block = 0; block < f.span / 32; block++, x++) {
            i32x16 w[8];
            f.quants(panel, block, w);
            int32_t low_zero[LANES], high_zero[LANES];
            if (f.zero) zero_sums(f.zero, x, low_zero, high_zero);
            // Weights are read from memory once: without prefetches, every cache line would stall the core.
            for (int line = 0; line < f.bytes * 32 / f.span; line += 64)
                __builtin_prefetch(panel + block * (f.bytes * 32 / f.span) + PREFETCH_BYTES + line);
#pragma GCC unroll 16
            for (int t = 0; t < tokens; t++) {
                const int8_t *q = x->q[first + t];
                f32x16 x_scale = f_set(x->scale[first + t]);
                if (f.fine) {
                    i32x16 low = f.zero ? i_set(low_zero[first + t]) : i_zero(), high = f.zero ? i_set(high_zero[first + t]) : i_zero();
                    f32x16 both = f_mul(f_from_int(dot16(f.small, high, w + 4, q + 16)), scale[2 * block + 1]);
                    both = f_fma(f_from_int(dot16(f.small, low, w, q)), scale[2 * block], both);
                    acc[t] = f_fma(both, x_scale, acc[t]);
                    if (f.zero) continue;
                    acc[t] = f_fma(minimum[2 * block], f_set(x->low[first + t]), acc[t]);
                    acc[t] = f_fma(minimum[2 * block + 1], f_set(x->high[first + t]), acc[t]);
                } else {
                    // Two sums of four dot products, since each waits for the one before.
                    i32x16 dot = i_add(dot16(f.small, i_zero(), w, q), dot16(f.small, i_zero(), w + 4, q + 16));
                    acc[t] = f_fma(f_mul(f_from_int(dot), x_scale), scale[block], acc[t]);
                    acc[t] = f_fma(minimum[block], f_set(x->sum[first + t]), acc[t]);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < tokens; t++) sums[t] = acc[t];
}

// Calls tile(count) with a constant: each number of tokens is compiled with its sums in registers, and unpacks the
// weights once.
#define CASE_TOKENS(n, max, tile) case n: if (n <= max) tile(n); break;
#define FOR_TOKENS(count, max, tile) \
    switch (count) { \
    CASE_TOKENS(1, max, tile) CASE_TOKENS(2, max, tile) CASE_TOKENS(3, max, tile) CASE_TOKENS(4, max, tile) \
    CASE_TOKENS(5, max, tile) CASE_TOKENS(6, max, tile) CASE_TOKENS(7, max, tile) CASE_TOKENS(8, max, tile) \
    CASE_TOKENS(9, max, tile) CASE_TOKENS(10, max, tile) CASE_TOKENS(11, max, tile) CASE_TOKENS(12, max, tile) \
    CASE_TOKENS(13, max, tile) CASE_TOKENS(14, max, tile) CASE_TOKENS(15, max, tile) CASE_TOKENS(16, max, tile) \
    }

ALWAYS_INLINE void quantised_panel(format f, const uint8_t *panel, const q8_block *x, int tokens, int columns, f32x16 *sums) {
    for (int first = 0, count; first < tokens; first += count) {
        count = tokens - first < MAX_TILE_TOKENS ? tokens - first : MAX_TILE_TOKENS;
#define QUANTISED_TILE(n) panel_times_tile(f, n, panel, x, first, columns, sums + first)
        FOR_TOKENS(count, MAX_TILE_TOKENS, QUANTISED_TILE)
    }
}

typedef f32x16 load_fn(const void *);
ALWAYS_INLINE f32x16 load_f32(const void *p) { return f_load(p); }
ALWAYS_INLINE f32x16 load_f16(const void *p) { return f_from_half(p); }
ALWAYS_INLINE f32x16 load_bf16(const void *p) { return f_from_bf16(p); }

ALWAYS_INLINE void float_tile(load_fn *load, int bytes, int tokens, const uint8_t *panel, const float *x, int x_stride,
                              int columns, f32x16 *sums) {
    f32x16 acc[8];
#pragma GCC unroll 8
    for (int t = 0; t < tokens; t++) acc[t] = f_zero();
    for (int k = 0; k < columns; k++, panel += bytes) {
        f32x16 w = load(panel);
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) acc[t] = f_fma(w, f_set(x[(size_t)t * x_stride + k]), acc[t]);
    }
#pragma GCC unroll 8
    for (int t = 0; t < tokens; t++) sums[t] = acc[t];
}

ALWAYS_INLINE void float_panel(load_fn *load, int bytes, const uint8_t *panel, const float *x, int x_stride, int tokens,
                               int columns, f32x16 *sums) {
    for (int first = 0, count; first < tokens; first += count) {
        count = tokens - first < 8 ? tokens - first : 8;
#define FLOAT_TILE(n) float_tile(load, bytes, n, panel, x + (size_t)first * x_stride, x_stride, columns, sums + first)
        FOR_TOKENS(count, 8, FLOAT_TILE)
    }
}

// The tokens of an item, which multiplies them by one matrix: all tokens of the step, or those of an expert.
typedef struct {
    int token, tokens;              // the first one, whose tile begins with it
    const uint8_t *weights;
    const float *bias, *up_bias;    // NULL: none. With GLU `bias` is the gate's
    float softcap;                  // 0: none
} operands;

static void store(const launch_args *args, const operands *o, int panel, int token, int tokens, const f32x16 *sums) {
    float *out = (float *)args->buffer[OUT] + (size_t)token * args->scalar[OUT_STRIDE].i + panel * LANES;
    const float *bias = o->bias;
    float softcap = o->softcap;
    int rows = args->scalar[ROWS].i - panel * LANES;
    f32x16 b = f_zero();
    if (bias) b = f_load(bias + panel * LANES);  // bias is padded to whole panels
    for (int t = 0; t < tokens; t++, out += args->scalar[OUT_STRIDE].i) {
        f32x16 v = bias ? f_add(sums[t], b) : sums[t];
        if (softcap > 0.0f) v = f_mul(f_tanh(f_div(v, f_set(softcap))), f_set(softcap));
        if (rows >= LANES) f_store(out, v);
        else {
            float last[LANES];
            f_store(last, v);
            memcpy(out, last, sizeof(float) * rows);
        }
    }
}

// sums: [GLU_PANELS][Q8_TILE tokens]: 32 rows of gate, then 32 of up.
static void store_glu(const launch_args *args, const operands *o, int panel, int token, int tokens, const f32x16 *sums) {
    int column = panel / GLU_PANELS * GLU_ROWS, outputs = args->scalar[ROWS].i / 2, epilogue = args->scalar[EPILOGUE].i;
    for (int t = 0; t < tokens; t++) {
        f32x16 v[2];
        for (int i = 0; i < 2; i++) {
            f32x16 gate = sums[i * Q8_TILE + t], up = sums[(2 + i) * Q8_TILE + t];
            if (o->bias) {
                gate = f_add(gate, f_load(o->bias + column + i * LANES));
                up = f_add(up, f_load(o->up_bias + column + i * LANES));
            }
            v[i] = epilogue == EPILOGUE_CLAMPED_GLU ? f_clamped_glu(gate, up)
                                                    : f_mul(epilogue == EPILOGUE_GELU_GLU ? f_gelu(gate) : f_silu(gate), up);
        }
        if (args->scalar[OUT_Q8].i) q8_write(args->buffer[OUT], outputs, token + t, column, v[0], v[1]);
        else {
            float *out = (float *)args->buffer[OUT] + (size_t)(token + t) * args->scalar[OUT_STRIDE].i + column;
            f_store(out, v[0]);
            f_store(out + LANES, v[1]);
        }
    }
}

// Multiplies one panel by `tokens` tokens from `token` on: sums[t] has the panel's 16 rows of token t.
typedef void panel_fn(const launch_args *args, const uint8_t *panel, int token, int tokens, int columns, f32x16 *sums);

static int panel_count(const launch_args *args) { return (args->scalar[ROWS].i + LANES - 1) / LANES; }

// One item: its panels for each tile of tokens. A tile's activations stay in L2 for all panels of the item, and the
// item's weights for all tiles. `multiply` is a constant and gets inlined.
ALWAYS_INLINE void multiply_panels(const launch_args *args, int32_t item, const operands *o, size_t panel_bytes, panel_fn *multiply) {
    int panels = panel_count(args), columns = args->scalar[COLUMNS].i;
    int begin = item * args->scalar[PANELS_PER_ITEM].i, end = begin + args->scalar[PANELS_PER_ITEM].i;
    if (end > panels) end = panels;
    int total = o->token + o->tokens, glu = args->scalar[EPILOGUE].i != EPILOGUE_STORE;
    for (int token = o->token; token < total; token += Q8_TILE) {
        int tokens = total - token < Q8_TILE ? total - token : Q8_TILE;
        f32x16 sums[GLU_PANELS * Q8_TILE];
        for (int p = begin; p < end; p++) {
            const uint8_t *panel = o->weights + (size_t)p * panel_bytes;
            f32x16 *panel_sums = sums + (glu ? p % GLU_PANELS * Q8_TILE : 0);
            multiply(args, panel, token, tokens, columns, panel_sums);
            if (!glu) store(args, o, p, token, tokens, panel_sums);
            else if (p % GLU_PANELS == GLU_PANELS - 1) store_glu(args, o, p - (GLU_PANELS - 1), token, tokens, sums);
        }
    }
}

ALWAYS_INLINE void multiply_all(const launch_args *args, int32_t item, const int32_t *step, size_t panel_bytes, panel_fn *multiply) {
    operands o = {0, step[args->scalar[COUNT].i], args->buffer[WEIGHTS], args->buffer[BIAS], NULL, args->scalar[SOFTCAP].f};
    multiply_panels(args, item, &o, panel_bytes, multiply);
}

// Items are those of the first expert in use, then of the second ... More items than there are experts in use do nothing.
ALWAYS_INLINE void multiply_experts(const launch_args *args, int32_t item, size_t panel_bytes, panel_fn *multiply) {
    int panels = panel_count(args), rows = args->scalar[ROWS].i, per_item = args->scalar[PANELS_PER_ITEM].i;
    int items = (panels + per_item - 1) / per_item, index = item / items;
    const int32_t *groups = args->buffer[GROUPS], *group = groups + GROUP_HEADER + index * GROUP_INTS;
    if (index >= groups[GROUP_EXPERTS]) return;
    size_t expert = (size_t)group[GROUP_EXPERT];
    const float *bias = args->buffer[BIAS], *up_bias = NULL;
    if (bias && args->scalar[EPILOGUE].i != EPILOGUE_STORE) {
        up_bias = bias + (args->scalar[EXPERTS].i + expert) * (rows / 2);
        bias += expert * (rows / 2);
    } else if (bias) bias += expert * rows;
    const uint8_t *weights = (const uint8_t *)args->buffer[WEIGHTS] + expert * panels * panel_bytes;
    operands o = {group[GROUP_SLOT], group[GROUP_TOKENS], weights, bias, up_bias, 0.0f};
    multiply_panels(args, item % items, &o, panel_bytes, multiply);
}

#define QUANTISED(name, small, zero) \
    static __attribute__((noinline)) void name##_panel(const launch_args *args, const uint8_t *panel, int token, int tokens, int columns, f32x16 *sums) { \
        const format f = {name##_SPAN, name##_BYTES, name##_FINE, small, zero, name##_quants, name##_scales}; \
        quantised_panel(f, panel, q8_at(args->buffer[X], columns, token, 0), tokens, columns, sums); \
    } \
    KERNEL(matmul_##name) { \
        multiply_all(args, item, step, (size_t)args->scalar[COLUMNS].i / name##_SPAN * name##_BYTES, name##_panel); \
    } \
    KERNEL(expert_matmul_##name) { \
        (void)step; \
        multiply_experts(args, item, (size_t)args->scalar[COLUMNS].i / name##_SPAN * name##_BYTES, name##_panel); \
    }
QUANTISED(q4_0, 1, 0)
QUANTISED(q4_1, 1, 0)
QUANTISED(q5_0, 1, 0)
QUANTISED(q5_1, 1, 0)
QUANTISED(q8_0, 0, 0)
QUANTISED(q4_k, 1, 0)
QUANTISED(q5_k, 1, 0)
QUANTISED(q6_k, 1, 32)
QUANTISED(q3_k, 1, 4)
QUANTISED(q2_k, 1, 0)
QUANTISED(iq4_nl, 0, 0)
QUANTISED(iq4_xs, 0, 0)
QUANTISED(mxfp4, 1, 0)

#define FLOAT(name) \
    static __attribute__((noinline)) void name##_panel(const launch_args *args, const uint8_t *panel, int token, int tokens, int columns, f32x16 *sums) { \
        int x_stride = args->scalar[X_STRIDE].i; \
        const float *x = (const float *)args->buffer[X] + (size_t)token * x_stride; \
        float_panel(load_##name, name##_BYTES, panel, x, x_stride, tokens, columns, sums); \
    } \
    KERNEL(matmul_##name) { multiply_all(args, item, step, (size_t)args->scalar[COLUMNS].i * name##_BYTES, name##_panel); } \
    KERNEL(expert_matmul_##name) { \
        (void)step; \
        multiply_experts(args, item, (size_t)args->scalar[COLUMNS].i * name##_BYTES, name##_panel); \
    }
FLOAT(f32)
FLOAT(f16)
FLOAT(bf16)

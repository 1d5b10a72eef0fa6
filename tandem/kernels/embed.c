// out[t] = scale * (row tokens[t] of the table). The table is in panels, as it is often the output head too.
#include "panels.h"

enum { TOKENS, TABLE, SAMPLED, OUT, INPUTS };
enum { FORMAT, ROWS, COLUMNS, OUT_STRIDE, SCALE, INPUT_STRIDE };

// A token's row of the table: its id, or the token that the previous step sampled.
ALWAYS_INLINE int row_of(const launch_args *args, int32_t item) {
    const int32_t *token = (const int32_t *)args->buffer[TOKENS] + item * TOKEN_INTS;
    int source = token[TOKEN_SOURCE];
    return source > 0 ? ((const sampling_result *)args->buffer[SAMPLED])[source - 1].token : token[TOKEN_ID];
}

// Copies a token's embedding where the host gives it; returns whether it does.
ALWAYS_INLINE int copy_input(const launch_args *args, int32_t item) {
    const int source = ((const int32_t *)args->buffer[TOKENS])[item * TOKEN_INTS + TOKEN_SOURCE];
    if (source >= 0 || !args->buffer[INPUTS]) return 0;
    memcpy((float *)args->buffer[OUT] + (size_t)item * args->scalar[OUT_STRIDE].i,
           (const float *)args->buffer[INPUTS] + (size_t)(-1 - source) * args->scalar[INPUT_STRIDE].i,
           sizeof(float) * args->scalar[COLUMNS].i);
    return 1;
}

// Unpacks 16 rows to use one of them: a token's row is a millionth of the weights that a step reads.
#define QUANTISED(name) \
    KERNEL(embed_##name) { \
        (void)step; \
        if (copy_input(args, item)) return; \
        int columns = args->scalar[COLUMNS].i, row = row_of(args, item); \
        const uint8_t *chunk = (const uint8_t *)args->buffer[TABLE] + (size_t)(row / LANES) * (columns / name##_SPAN) * name##_BYTES; \
        float *out = (float *)args->buffer[OUT] + (size_t)item * args->scalar[OUT_STRIDE].i, factor = args->scalar[SCALE].f; \
        for (int column = 0; column < columns; column += name##_SPAN, chunk += name##_BYTES) { \
            f32x16 scales[16], minima[16]; \
            float scale[16][LANES], minimum[16][LANES]; \
            name##_scales(chunk, scales, minima); \
            memcpy(scale, scales, sizeof scale); \
            memcpy(minimum, minima, sizeof minimum); \
            for (int block = 0; block < name##_SPAN / 32; block++) { \
                i32x16 w[8]; \
                uint8_t quants[8][64]; \
                name##_quants(chunk, block, w); \
                memcpy(quants, w, sizeof quants); \
                for (int k = 0; k < 32; k++) { \
                    int s = name##_FINE ? 2 * block + k / 16 : block; \
                    float weight = scale[s][row % LANES] * quants[k / 4][row % LANES * 4 + k % 4] + minimum[s][row % LANES]; \
                    out[column + 32 * block + k] = weight * factor; \
                } \
            } \
        } \
    }
EACH_PANEL_FORMAT(QUANTISED)

#define FLOAT(name, type, convert) \
    KERNEL(embed_##name) { \
        (void)step; \
        if (copy_input(args, item)) return; \
        int columns = args->scalar[COLUMNS].i, row = row_of(args, item); \
        const type *panel = (const type *)args->buffer[TABLE] + (size_t)(row / LANES) * LANES * columns + row % LANES; \
        float *out = (float *)args->buffer[OUT] + (size_t)item * args->scalar[OUT_STRIDE].i, factor = args->scalar[SCALE].f; \
        for (int k = 0; k < columns; k++) out[k] = convert(panel[k * LANES]) * factor; \
    }
ALWAYS_INLINE float same(float x) { return x; }
ALWAYS_INLINE float bf16_to_float(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
FLOAT(f32, float, same)
FLOAT(f16, half, half_to_float)
FLOAT(bf16, uint16_t, bf16_to_float)

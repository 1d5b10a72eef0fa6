// A causal convolution over the last tokens for 64 channels of one chunk; see short_conv.py.
#include "activation_functions.h"
#include "rows.h"
#include "states.h"

enum { X, WEIGHT, BIAS, STATE, CHUNKS, OUT };
enum { CHANNELS, TAPS, X_STRIDE, OUT_STRIDE, SILU, SEQUENCES };
enum { ITEM_CHANNELS = 64 };

// 16 channels, or the last n.
static void convolve(const launch_args *args, state_chunk chunk, int32_t channel, int32_t n) {
    const int32_t channels = args->scalar[CHANNELS].i, taps = args->scalar[TAPS].i;
    const size_t slot = (size_t)(taps - 1) * channels;
    const float *weight = (const float *)args->buffer[WEIGHT] + (size_t)channel * taps, *bias = args->buffer[BIAS];
    float *state = (float *)args->buffer[STATE] + channel, taken[MAX_CONVOLUTION][LANES] = {{0}};
    f32x16 weights[MAX_CONVOLUTION], seen[MAX_CONVOLUTION];  // seen: the last inputs, oldest first
    for (int32_t lane = 0; lane < (n < LANES ? n : LANES); lane++)
        for (int32_t j = 0; j < taps; j++) taken[j][lane] = weight[lane * taps + j];
    for (int32_t j = 0; j < taps; j++) weights[j] = f_load(taken[j]);
    for (int32_t j = 0; j < taps - 1; j++)
        seen[j] = chunk.source == NO_STATE ? f_zero()
                                           : f_load_first(state + chunk.source * slot + (size_t)j * channels, n);
    const f32x16 start = bias ? f_load_first(bias + channel, n) : f_zero();
    for (int32_t t = 0; t < chunk.tokens; t++) {
        const size_t token = (size_t)(chunk.first + t);
        seen[taps - 1] = f_load_first((const float *)args->buffer[X] + token * args->scalar[X_STRIDE].i + channel, n);
        f32x16 sum = start;
        for (int32_t j = 0; j < taps; j++) sum = f_fma(weights[j], seen[j], sum);
        if (args->scalar[SILU].i) sum = f_silu(sum);
        f_store_first((float *)args->buffer[OUT] + token * args->scalar[OUT_STRIDE].i + channel, sum, n);
        for (int32_t j = 0; j < taps - 1; j++) seen[j] = seen[j + 1];
        if (chunk.targets[t] != NO_STATE)
            for (int32_t j = 0; j < taps - 1; j++)
                f_store_first(state + chunk.targets[t] * slot + (size_t)j * channels, seen[j], n);
    }
}

KERNEL(short_conv) {
    (void)step;
    const int32_t channels = args->scalar[CHANNELS].i, parts = (channels + ITEM_CHANNELS - 1) / ITEM_CHANNELS;
    const int32_t first = item % parts * ITEM_CHANNELS;
    if (item / parts >= args->scalar[SEQUENCES].i) return;
    const state_chunk chunk = read_chunk(args->buffer[CHUNKS], args->scalar[SEQUENCES].i, item / parts);
    for (int32_t c = first; c < first + ITEM_CHANNELS && c < channels; c += LANES)
        if (chunk.tokens) convolve(args, chunk, c, channels - c);
}

// The row of one token in the cache of latent attention; see store_latent.py.
#include "kv_layout.h"
#include "rows.h"

enum { MAX_ROW = 2 * MAX_HEAD_DIM };  // elements
enum { LATENT, KEY, CACHE, TOKENS };
enum { LATENT_SIZE, ROTATED, LATENT_STRIDE, KEY_STRIDE, SLOT_FIELD, KV };

// As store_q8 of rope.c: a scale is max|x| / 127 as float16, and quants use the inverse of the stored scale.
static void store_q8(int8_t *to, half *scales, const float *x, int32_t n) {
    for (int32_t i = 0; i < n; i += KV_SCALED, scales++) {
        f32x16 v[2] = {f_load_first(x + i, n - i), i + LANES < n ? f_load_first(x + i + LANES, n - i - LANES) : f_zero()};
        *scales = float_to_half(f_reduce_max(f_max(f_abs(v[0]), f_abs(v[1]))) / 127.0f);
        const float scale = half_to_float(*scales), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        for (int32_t part = 0; part < 2; part++) {
            int8_t q[LANES];
            const f32x16 steps = f_max(f_min(f_mul(v[part], f_set(inverse)), f_set(127.0f)), f_set(-127.0f));
            i_to_bytes(q, f_round(steps));
            for (int32_t d = 0, first = i + part * LANES; d < LANES && first + d < n; d++) to[first + d] = q[d];
        }
    }
}

KERNEL(store_latent) {
    (void)step;
    const int32_t latent = args->scalar[LATENT_SIZE].i, rotated = args->scalar[ROTATED].i, n = latent + rotated;
    const int32_t slot = ((const int32_t *)args->buffer[TOKENS])[(size_t)item * TOKEN_INTS + args->scalar[SLOT_FIELD].i];
    const int32_t kv = args->scalar[KV].i, inside = slot % KV_BLOCK;
    if (slot < 0) return;
    float row[MAX_ROW];
    memcpy(row, (const float *)args->buffer[LATENT] + (size_t)item * args->scalar[LATENT_STRIDE].i, sizeof(float) * latent);
    memcpy(row + latent, (const float *)args->buffer[KEY] + (size_t)item * args->scalar[KEY_STRIDE].i, sizeof(float) * rotated);
    char *block = (char *)args->buffer[CACHE] + (size_t)(slot / KV_BLOCK) * latent_block_bytes(n, kv);
    if (kv == KV_F32) memcpy((float *)block + (size_t)inside * n, row, sizeof(float) * n);
    else if (kv == KV_Q8) store_q8((int8_t *)block + (size_t)inside * n, latent_scales(block, n, inside), row, n);
    else for (int32_t i = 0; i < n; i += LANES) {
        half rounded[LANES];
        f_to_half(rounded, f_load_first(row + i, n - i));
        memcpy((half *)block + (size_t)inside * n + i, rounded, sizeof(half) * (n - i < LANES ? n - i : LANES));
    }
}

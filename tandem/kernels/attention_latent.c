// Latent attention of one token and a few of its heads; see attention_latent.py.
//
// The bits of a head's result depend on its query and the rows alone: blocks of the cache are processed in order, with one
// running maximum (online softmax), a score is one sum over the row, and values are added in order.
#include "kv_layout.h"
#include "rows.h"

enum { Q, ROTATED_Q, CACHE, TABLES, TOKENS, OUT };
enum { Q_HEADS, LATENT, ROTATED, Q_STRIDE, ROTATED_STRIDE, OUT_STRIDE, TABLE_STRIDE, SCALE, KV };
enum { HEADS_AT_ONCE = 4, MAX_ROW = 2 * MAX_HEAD_DIM };  // MAX_ROW: elements

_Static_assert(KV_BLOCK % LANES == 0, "the scores of a block are whole vectors");

typedef struct {
    float query[HEADS_AT_ONCE][MAX_ROW], sums[HEADS_AT_ONCE][MAX_ROW];
    float highest[HEADS_AT_ONCE], total[HEADS_AT_ONCE], weights[HEADS_AT_ONCE][KV_BLOCK];
    float rows[KV_BLOCK][MAX_ROW];  // of a block, as float32, padded with zeros to whole vectors
} state;

static void load_rows(state *s, const char *block, int32_t elements, int32_t kv, int32_t count) {
    for (int32_t t = 0; t < count; t++) {
        const half *scales = latent_scales(block, elements, t);
        for (int32_t d = 0; d < elements; d += LANES) {
            const size_t at = (size_t)t * elements + d;
            const int32_t n = elements - d < LANES ? elements - d : LANES;
            f32x16 v;
            if (kv == KV_F32) v = f_load_first((const float *)block + at, n);
            else if (kv == KV_F16) {
                half part[LANES] = {0};
                memcpy(part, (const half *)block + at, sizeof(half) * n);
                v = f_from_half(part);
            } else {
                int8_t part[LANES] = {0};
                memcpy(part, block + at, n);
                v = f_mul(f_from_int(i_from_bytes(part)), f_set(half_to_float(scales[d / KV_SCALED])));
            }
            f_store(s->rows[t] + d, v);
        }
    }
}

// The weights of `count` rows, and how much earlier sums shrink.
static float weigh(state *s, int32_t head, int32_t count) {
    float highest = s->highest[head], *weights = s->weights[head];
    for (int32_t t = 0; t < count; t++) highest = weights[t] > highest ? weights[t] : highest;
    for (int32_t t = count; t < KV_BLOCK; t++) weights[t] = highest;
    float shrink[LANES];
    f_store(shrink, f_exp(f_set(s->highest[head] - highest)));
    for (int32_t t = 0; t < KV_BLOCK; t += LANES) f_store(weights + t, f_exp(f_sub(f_load(weights + t), f_set(highest))));
    float total = s->total[head] * shrink[0];
    for (int32_t t = 0; t < count; t++) total += weights[t];
    s->highest[head] = highest;
    s->total[head] = total;
    return shrink[0];
}

static void attend_block(state *s, int32_t heads, int32_t elements, int32_t latent, int32_t count, float scale) {
    for (int32_t t = 0; t < count; t++) {
        f32x16 sums[HEADS_AT_ONCE] = {f_zero(), f_zero(), f_zero(), f_zero()};
        for (int32_t d = 0; d < elements; d += LANES) {
            const f32x16 row = f_load(s->rows[t] + d);
            for (int32_t h = 0; h < HEADS_AT_ONCE; h++) sums[h] = f_fma(f_load(s->query[h] + d), row, sums[h]);
        }
        for (int32_t h = 0; h < HEADS_AT_ONCE; h++) s->weights[h][t] = f_reduce_add(sums[h]) * scale;
    }
    for (int32_t h = 0; h < heads; h++) {
        const f32x16 shrink = f_set(weigh(s, h, count));
        for (int32_t d = 0; d < latent; d += LANES) {
            f32x16 sum = f_mul(f_load(s->sums[h] + d), shrink);
            for (int32_t t = 0; t < count; t++) sum = f_fma(f_set(s->weights[h][t]), f_load(s->rows[t] + d), sum);
            f_store(s->sums[h] + d, sum);
        }
    }
}

KERNEL(attention_latent) {
    (void)step;
    const int32_t q_heads = args->scalar[Q_HEADS].i, latent = args->scalar[LATENT].i, rotated = args->scalar[ROTATED].i;
    const int32_t elements = latent + rotated, kv = args->scalar[KV].i;
    const int32_t groups = (q_heads + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE, row = item / groups;
    const int32_t first = item % groups * HEADS_AT_ONCE, left = q_heads - first, heads = left < HEADS_AT_ONCE ? left : HEADS_AT_ONCE;
    const int32_t *token = (const int32_t *)args->buffer[TOKENS] + (size_t)row * TOKEN_INTS;
    const int32_t *table = (const int32_t *)args->buffer[TABLES] + (size_t)token[TOKEN_SEQUENCE] * args->scalar[TABLE_STRIDE].i;
    const float *q = (const float *)args->buffer[Q] + (size_t)row * args->scalar[Q_STRIDE].i;
    const float *rotated_q = (const float *)args->buffer[ROTATED_Q] + (size_t)row * args->scalar[ROTATED_STRIDE].i;
    state s;  // 100 KB: only what is used is cleared
    for (int32_t h = 0; h < HEADS_AT_ONCE; h++) {
        memset(s.query[h], 0, sizeof(float) * ((elements + LANES - 1) / LANES * LANES));
        memset(s.sums[h], 0, sizeof(float) * ((latent + LANES - 1) / LANES * LANES));
        s.highest[h] = -1e30f;
        s.total[h] = 0.0f;
        if (h >= heads) continue;
        memcpy(s.query[h], q + (size_t)(first + h) * latent, sizeof(float) * latent);
        memcpy(s.query[h] + latent, rotated_q + (size_t)(first + h) * rotated, sizeof(float) * rotated);
    }
    const int32_t seen = token[TOKEN_POSITION] + 1;
    for (int32_t position = 0; position < seen; position += KV_BLOCK) {
        const char *block = (const char *)args->buffer[CACHE] + (size_t)table[position / KV_BLOCK] * latent_block_bytes(elements, kv);
        const int32_t count = seen - position < KV_BLOCK ? seen - position : KV_BLOCK;
        load_rows(&s, block, elements, kv, count);
        attend_block(&s, heads, elements, latent, count, args->scalar[SCALE].f);
    }
    for (int32_t h = 0; h < heads; h++) {
        float *out = (float *)args->buffer[OUT] + (size_t)row * args->scalar[OUT_STRIDE].i + (size_t)(first + h) * latent;
        const f32x16 inverse = f_set(1.0f / s.total[h]);
        for (int32_t d = 0; d < latent; d += LANES) f_store_first(out + d, f_mul(f_load(s.sums[h] + d), inverse), latent - d);
    }
}

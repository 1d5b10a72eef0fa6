// Attention over the paged KV cache. One item: one KV head, a few consecutive tokens of one sequence, and all query heads
// that share the KV head. A query is one token's head.
//
// The bits of a query's result do not depend on the other queries of its item. Keys are processed in chunks that begin at
// fixed positions. In a chunk, every (query, 16 keys) sums over the head in order, every (query, 16 columns) sums over
// keys in order, and a masked key adds exactly 0. The chunks of a split (512 positions) share one running maximum. Splits
// are independent and are combined in order by one formula, so they could also run in parallel.
#include "kv_layout.h"
#include "q8_tiles.h"
#include "rows.h"

enum {
    CHUNK = 64, SPLIT = 512,           // positions
    CHUNK_BLOCKS = CHUNK / KV_BLOCK, CHUNK_VECTORS = CHUNK / LANES,
    MAX_QUERIES = 64,                  // processed together; an item with more takes several passes over its keys
    MAX_STATE = 64 * (256 + LANES),    // floats of queries processed together; LANES more keep rows a cache line apart
    // Queries of a tile have their sums in registers: 8 are enough to hide an FMA's latency. Up to FEW_QUERIES convert
    // float16 and int8 at every use; with more, keys and values are converted ("staged") once for all queries.
#if defined(ISA_avx512)
    TILE_QUERIES = 8, FEW_QUERIES = MAX_QUERIES,
#elif defined(ISA_avx2)
    TILE_QUERIES = 4, FEW_QUERIES = 12,
#else
    TILE_QUERIES = 1, FEW_QUERIES = 8,
#endif
};

_Static_assert(KV_BLOCK % LANES == 0, "keys of a block are loaded as whole vectors");
_Static_assert(CHUNK % KV_BLOCK == 0 && SPLIT % CHUNK == 0, "chunks have whole blocks, splits whole chunks");
_Static_assert(CHUNK_VECTORS == 4, "weigh() adds the vectors of a chunk as two pairs");

static const float NO_MAXIMUM = -1e30f;  // the maximum before any key: finite, so that differences are not NaN

typedef struct {
    const char *cache;  // this KV head in block 0
    size_t block_bytes;
    const int32_t *table;
    const float *q;  // first token, first query head of the group
    int32_t kv, head_dim, group, q_stride, position, last, window;
    float scale, softcap, base;  // a weight is 2^(score * base)
} item_view;

// The queries that are processed together, and their running sums (online softmax).
typedef struct {
    int32_t count, stride;  // queries; floats from row to row of queries and sums
    int32_t position[MAX_QUERIES], last[MAX_QUERIES];  // its own position, and the last that it sees
    float highest[MAX_QUERIES], total[MAX_QUERIES], rescale[MAX_QUERIES];  // for the current split
    float all_highest[MAX_QUERIES], all_total[MAX_QUERIES];                // for the splits before it
    float scores[MAX_QUERIES][CHUNK];                                      // then weights
    float queries[MAX_STATE], sums[MAX_STATE], all_sums[MAX_STATE];
    float stage[MAX_HEAD_DIM * LANES];  // 16 keys of a block, or 16 columns of a chunk's values, as float32
    float scaled[MAX_QUERIES][CHUNK];   // weights times the scales of int8 values in 32 columns
} state;

// The keys of a chunk that some query sees, numbered from the chunk's first position, and their blocks.
typedef struct {
    int first_block, end_block, first_key, end_key;
    const char *blocks[CHUNK_BLOCKS], *next[CHUNK_BLOCKS];  // blocks of this chunk, and of the next one to prefetch
} chunk_view;

// 2^x for x <= 0, to 1e-7; exactly 0 below -126.5: the bits of 2^-127 are those of 0.
ALWAYS_INLINE f32x16 exp2_negative(f32x16 x) {
    x = f_max(x, f_set(-127.0f));
    i32x16 n = f_round(x);
    f32x16 r = f_sub(x, f_from_int(n)), p = f_set(0.000153533619f);
    p = f_fma(p, r, f_set(0.00133988745f));
    p = f_fma(p, r, f_set(0.00961843736f));
    p = f_fma(p, r, f_set(0.0555033247f));
    p = f_fma(p, r, f_set(0.240226479f));
    p = f_fma(p, r, f_set(0.693147203f));
    p = f_fma(p, r, f_set(1.0f));
    return f_mul(p, f_exp2_int(n));
}

ALWAYS_INLINE float exp2_scalar(float x) {
    float lanes[LANES];
    f_store(lanes, exp2_negative(f_set(x)));
    return lanes[0];
}

ALWAYS_INLINE const void *element(const void *base, size_t index, int kv) {
    return (const char *)base + index * (kv == KV_F32 ? sizeof(float) : kv == KV_F16 ? sizeof(half) : 1);
}

// Sixteen elements; int8 before it is scaled.
ALWAYS_INLINE f32x16 load(const void *base, size_t index, int kv) {
    const void *p = element(base, index, kv);
    return kv == KV_F32 ? f_load(p) : kv == KV_F16 ? f_from_half(p) : f_from_int(i_from_bytes(p));
}

// The int8 scales of the 16 keys or values from `token` of a block on, for the 32 elements of the head that contain `d`.
ALWAYS_INLINE f32x16 scales_at(const char *block, int head_dim, int values, int d, int token) {
    const half *scales = (const half *)(block + (size_t)2 * KV_BLOCK * head_dim);
    return f_from_half(scales + (values * kv_scales(head_dim) + d / KV_SCALED) * KV_BLOCK + token);
}

// Prefetches row `row` of KV_BLOCK elements if it begins a cache line. float32 streams fast enough without.
ALWAYS_INLINE void prefetch_row(const char *block, int row, int kv) {
    const int row_bytes = KV_BLOCK * (kv == KV_F16 ? 2 : 1), rows_per_line = row_bytes < 64 ? 64 / row_bytes : 1;
    if (kv != KV_F32 && row % rows_per_line == 0)
        __builtin_prefetch(element(block, (size_t)row * KV_BLOCK, kv), 0, 2);
}

// Copies rows of 16 elements as float32 to s->stage, from its row `to` on. Only the first `n` elements of a row exist; the
// others become 0, except that int8 reads the scales that follow: nothing uses those columns. Also prefetches as many
// rows of the block `next`, from its row `wanted` on.
static void stage(state *s, int to, const void *from, int stride, int rows, int n, int kv, const char *next, int wanted) {
    float *out = s->stage + (size_t)to * LANES;
    if (kv == KV_Q8) {
        for (int i = 0; i < rows; i++) {
            f_store(out + i * LANES, load(from, (size_t)i * stride, KV_Q8));
            prefetch_row(next, wanted + i, KV_Q8);
        }
    } else if (n >= LANES && kv == KV_F32) {
        for (int i = 0; i < rows; i++) f_store(out + i * LANES, load(from, (size_t)i * stride, KV_F32));
    } else if (n >= LANES) {
        for (int i = 0; i < rows; i++) {
            f_store(out + i * LANES, load(from, (size_t)i * stride, KV_F16));
            prefetch_row(next, wanted + i, KV_F16);
        }
    } else {
        for (int i = 0; i < rows * LANES; i++) {
            const void *x = element(from, (size_t)(i / LANES) * stride + i % LANES, kv);
            out[i] = i % LANES >= n ? 0.0f : kv == KV_F32 ? *(const float *)x : half_to_float(*(const half *)x);
        }
    }
}

// The number of queries in the next tile when `left` remain. The last two tiles get about the same size: a tile of few
// queries would wait for its own sums.
ALWAYS_INLINE int tile_size(int left) {
    return left <= TILE_QUERIES ? left : left < 2 * TILE_QUERIES ? (left + 1) / 2 : TILE_QUERIES;
}

// Calls tile(constant size, ...): each size is compiled with its sums in registers.
#define CASE_SIZE(n, tile, ...) case n: if (TILE_QUERIES >= n) tile(n, __VA_ARGS__); break;
#define FOR_SIZE(size, tile, ...) \
    switch (size) { \
    CASE_SIZE(1, tile, __VA_ARGS__) CASE_SIZE(2, tile, __VA_ARGS__) CASE_SIZE(3, tile, __VA_ARGS__) \
    CASE_SIZE(4, tile, __VA_ARGS__) CASE_SIZE(5, tile, __VA_ARGS__) CASE_SIZE(6, tile, __VA_ARGS__) \
    CASE_SIZE(7, tile, __VA_ARGS__) CASE_SIZE(8, tile, __VA_ARGS__) \
    }
#if defined(ISA_plain)
#define FOR_TILE(q, n) for (int q = 0; q < n; q++)
#else
#define FOR_TILE(q, n) _Pragma("GCC unroll 8") for (int q = 0; q < n; q++)
#endif

// scores[q][lane] = sum over d of queries[q][d] * keys[d][lane], for the 16 keys from `token` of the block on. In int8 the
// sums of 32 d each are scaled and added. `keys` are staged if `kv` is KV_F32, else those of the block. Also prefetches
// the block's values, which follow its keys in memory.
ALWAYS_INLINE void score_tile(int n, int kv, int q8, const float *queries, int stride, const void *keys, const char *block,
                              int token, int head_dim, float (*scores)[CHUNK]) {
    const int key_stride = kv == KV_F32 ? LANES : KV_BLOCK;
    for (int begin = 0, end; begin < head_dim; begin = end) {
        f32x16 sum[8];
        FOR_TILE(q, n) sum[q] = f_zero();
        end = q8 && begin + KV_SCALED < head_dim ? begin + KV_SCALED : head_dim;
        for (int d = begin; d < end; d++) {
            f32x16 k = load(keys, (size_t)d * key_stride, kv);
            prefetch_row(block, head_dim + d, kv);
            FOR_TILE(q, n) sum[q] = f_fma(f_set(queries[q * stride + d]), k, sum[q]);
        }
        if (q8) {
            const f32x16 scale = scales_at(block, head_dim, 0, begin, token);
            FOR_TILE(q, n) sum[q] = begin ? f_fma(sum[q], scale, f_load(scores[q])) : f_mul(sum[q], scale);
        }
        FOR_TILE(q, n) f_store(scores[q], sum[q]);
    }
}

// sums[q][lane] = sums[q][lane] * rescale[q] + sum over keys of weights[q][key] * value(key)[lane]
ALWAYS_INLINE void value_tile(int n, int kv, const float (*weights)[CHUNK], const state *s, const chunk_view *c, int q0,
                              int column, int head_dim, float *sums) {
    f32x16 sum[8];
    FOR_TILE(q, n) sum[q] = f_mul(f_load(sums + q * s->stride), f_set(s->rescale[q0 + q]));
    for (int key = c->first_key; key < c->end_key; key++) {
        const int b = key / KV_BLOCK, i = key % KV_BLOCK;
        f32x16 x = kv == KV_F32 ? f_load(s->stage + key * LANES)
                                : load(c->blocks[b], (size_t)(KV_BLOCK + i) * head_dim + column, kv);
        prefetch_row(c->next[b], column + i, kv);
        FOR_TILE(q, n) sum[q] = f_fma(f_set(weights[q][key]), x, sum[q]);
    }
    FOR_TILE(q, n) f_store(sums + q * s->stride, sum[q]);
}

// Turns scores into weights: applies the mask and updates the running maximum, the total and the factor of older sums.
ALWAYS_INLINE void weigh(state *s, const item_view *item, int q, int chunk, int masked, int capped) {
    static const float lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 x[CHUNK_VECTORS], highest = f_set(NO_MAXIMUM), none = f_set(-__builtin_inff());
    f32x16 first = f_set((float)(item->window ? s->position[q] - item->window + 1 - chunk : 0));
    f32x16 last = f_set((float)(s->last[q] - chunk));
    FOR_TILE(v, CHUNK_VECTORS) {
        x[v] = f_load(s->scores[q] + v * LANES);
        if (capped) {  // cap * tanh(x / cap)
            f32x16 e = f_exp(f_mul(x[v], f_set(2.0f * item->scale / item->softcap)));
            f32x16 tanh = f_sub(f_set(1.0f), f_div(f_set(2.0f), f_add(e, f_set(1.0f))));
            x[v] = f_mul(tanh, f_set(item->softcap));
        }
        if (masked) {
            f32x16 key = f_add(f_load(lane), f_set((float)(v * LANES)));
            x[v] = f_select_less(last, key, none, f_select_less(key, first, none, x[v]));
        }
        highest = f_max(highest, x[v]);
    }
    float before = s->highest[q], now = f_reduce_max(highest);
    now = now > before ? now : before;
    FOR_TILE(v, CHUNK_VECTORS) x[v] = exp2_negative(f_fma(x[v], f_set(item->base), f_set(-now * item->base)));
    FOR_TILE(v, CHUNK_VECTORS) f_store(s->scores[q] + v * LANES, x[v]);
    s->rescale[q] = before == now ? 1.0f : exp2_scalar((before - now) * item->base);
    s->highest[q] = now;
    s->total[q] = s->total[q] * s->rescale[q] + f_reduce_add(f_add(f_add(x[0], x[1]), f_add(x[2], x[3])));
}

static void weigh_all(state *s, const item_view *item, int chunk) {
    const int masked = chunk + CHUNK - 1 > s->last[0] ||
                       (item->window && chunk <= s->position[s->count - 1] - item->window);
    if (masked || item->softcap > 0.0f)
        for (int q = 0; q < s->count; q++) weigh(s, item, q, chunk, 1, item->softcap > 0.0f);
    else
        for (int q = 0; q < s->count; q++) weigh(s, item, q, chunk, 0, 0);
}

// s->scaled = the weights of a chunk times the scales of its int8 values in the 32 columns from `column` on.
static void scale_weights(state *s, const chunk_view *c, int column, int head_dim) {
    for (int b = c->first_block; b < c->end_block; b++)
        for (int token = 0; token < KV_BLOCK; token += LANES) {
            const f32x16 scale = scales_at(c->blocks[b], head_dim, 1, column, token);
            const int key = b * KV_BLOCK + token;
            for (int q = 0; q < s->count; q++) f_store(s->scaled[q] + key, f_mul(f_load(s->scores[q] + key), scale));
        }
}

ALWAYS_INLINE void attend_chunk(state *s, const item_view *item, int chunk, int first_key, int end_key, int staged, int q8) {
    chunk_view c;
    const int head_dim = item->head_dim, last_block = (end_key - 1) / KV_BLOCK;
    const int kv = staged ? KV_F32 : q8 ? KV_Q8 : KV_F16;
    c.first_block = first_key > chunk ? (first_key - chunk) / KV_BLOCK : 0;
    c.first_key = c.first_block * KV_BLOCK;
    c.end_key = end_key - chunk < CHUNK ? end_key - chunk : CHUNK;
    c.end_block = (c.end_key + KV_BLOCK - 1) / KV_BLOCK;
    for (int b = c.first_block; b < c.end_block; b++) {
        int block = chunk / KV_BLOCK + b, next = block + CHUNK_BLOCKS < last_block ? block + CHUNK_BLOCKS : last_block;
        c.blocks[b] = item->cache + (size_t)item->table[block] * item->block_bytes;
        c.next[b] = item->cache + (size_t)item->table[next] * item->block_bytes;
        for (int i = 0; q8 && !staged && i < kv_scales(head_dim); i++)
            __builtin_prefetch(c.next[b] + (size_t)(head_dim + i * 2) * 2 * KV_BLOCK, 0, 2);  // scales: a line each
        for (int token = 0; token < KV_BLOCK; token += LANES) {
            const void *keys = element(c.blocks[b], token, item->kv);
            if (staged) stage(s, 0, keys, KV_BLOCK, head_dim, LANES, item->kv, c.blocks[b], head_dim);
            if (staged) keys = s->stage;
            for (int q = 0, size; q < s->count; q += size) {
                size = tile_size(s->count - q);
                const float *queries = s->queries + q * s->stride;
                float (*scores)[CHUNK] = (float (*)[CHUNK])(s->scores[q] + b * KV_BLOCK + token);
                FOR_SIZE(size, score_tile, kv, q8, queries, s->stride, keys, c.blocks[b], token, head_dim, scores)
            }
        }
    }
    weigh_all(s, item, chunk);
    for (int column = 0; column < head_dim; column += LANES) {
        if (q8 && column % KV_SCALED == 0) scale_weights(s, &c, column, head_dim);
        for (int b = c.first_block; staged && b < c.end_block; b++)
            stage(s, b * KV_BLOCK, element(c.blocks[b], (size_t)KV_BLOCK * head_dim + column, item->kv), head_dim,
                  KV_BLOCK, head_dim - column, item->kv, c.next[b], column);
        for (int q = 0, size; q < s->count; q += size) {
            size = tile_size(s->count - q);
            const float (*weights)[CHUNK] = (const float (*)[CHUNK])(q8 ? s->scaled : s->scores) + q;
            FOR_SIZE(size, value_tile, kv, weights, s, &c, q, column, head_dim, s->sums + q * s->stride + column)
        }
    }
}

// Combines the finished split with the splits before it. A split without visible keys changes no bit.
static void combine_split(state *s, const item_view *item) {
    for (int q = 0; q < s->count; q++) {
        float before = s->all_highest[q], split = s->highest[q], now = split > before ? split : before;
        float old = exp2_scalar((before - now) * item->base), new = exp2_scalar((split - now) * item->base);
        s->all_highest[q] = now;
        s->all_total[q] = s->all_total[q] * old + s->total[q] * new;
        float *sums = s->sums + q * s->stride, *all = s->all_sums + q * s->stride;
        for (int i = 0; i < item->head_dim; i += LANES)
            f_store(all + i, f_fma(f_load(all + i), f_set(old), f_mul(f_load(sums + i), f_set(new))));
    }
}

ALWAYS_INLINE void attend(state *s, const item_view *item, int staged, int q8) {
    int first_key = item->window && s->position[0] >= item->window ? s->position[0] - item->window + 1 : 0;
    int end_key = s->last[s->count - 1] + 1;
    for (int split = first_key / SPLIT * SPLIT; split < end_key; split += SPLIT) {
        int chunk = split > first_key ? split : first_key / CHUNK * CHUNK;
        int end = split + SPLIT < end_key ? split + SPLIT : end_key;
        memset(s->sums, 0, sizeof(float) * s->count * s->stride);
        for (int q = 0; q < s->count; q++) s->highest[q] = NO_MAXIMUM, s->total[q] = 0.0f;
        for (; chunk < end; chunk += CHUNK) attend_chunk(s, item, chunk, first_key, end_key, staged, q8);
        combine_split(s, item);
    }
}

static void attend_staged(state *s, const item_view *item) { attend(s, item, 1, 0); }
static void attend_directly(state *s, const item_view *item) { attend(s, item, 0, 0); }
static void attend_staged_q8(state *s, const item_view *item) { attend(s, item, 1, 1); }
static void attend_directly_q8(state *s, const item_view *item) { attend(s, item, 0, 1); }

// Loads queries `first` to first + count - 1 of the item; query i is head i % group of token i / group.
static void load_queries(state *s, const item_view *item, int first, int count) {
    s->count = count;
    for (int i = 0; i < count; i++) {
        int query = first + i, token = query / item->group, head = query % item->group;
        memcpy(s->queries + i * s->stride, item->q + (size_t)token * item->q_stride + (size_t)head * item->head_dim,
               sizeof(float) * item->head_dim);
        s->position[i] = item->position + token;
        s->last[i] = s->position[i] > item->last ? s->position[i] : item->last;
        s->rescale[i] = 1.0f;
        s->all_highest[i] = NO_MAXIMUM;
        s->all_total[i] = 0.0f;
    }
    memset(s->all_sums, 0, sizeof(float) * count * s->stride);
}

KERNEL(attention) {
    (void)step;
    const int32_t q_heads = args->scalar[0].i, kv_heads = args->scalar[1].i, head_dim = args->scalar[2].i;
    const int32_t q_stride = args->scalar[3].i, out_stride = args->scalar[4].i, table_stride = args->scalar[5].i;
    const int32_t kv = args->scalar[9].i, out_q8 = args->scalar[10].i, group = q_heads / kv_heads;
    const int32_t *work = (const int32_t *)args->buffer[3] + (size_t)(item / kv_heads) * WORK_INTS;
    const int32_t kv_head = item % kv_heads, first_column = kv_head * group * head_dim;
    const size_t head_bytes = kv_head_bytes(head_dim, kv);
    const float scale = args->scalar[7].f, softcap = args->scalar[8].f, *sinks = args->buffer[5];
    const item_view view = {
        .cache = (const char *)args->buffer[1] + kv_head * head_bytes, .block_bytes = kv_heads * head_bytes,
        .table = (const int32_t *)args->buffer[2] + (size_t)work[WORK_SEQUENCE] * table_stride,
        .q = (const float *)args->buffer[0] + (size_t)work[WORK_ROW] * q_stride + first_column,
        .kv = kv, .head_dim = head_dim, .group = group, .q_stride = q_stride,
        .position = work[WORK_POSITION], .last = work[WORK_LAST], .window = args->scalar[6].i,
        .scale = scale, .softcap = softcap, .base = 1.44269504f * (softcap > 0.0f ? 1.0f : scale),
    };
    state s;  // 250 KB: cleared in parts, where they are used
    s.stride = (head_dim + LANES - 1) / LANES * LANES + LANES;  // not a power of two: rows fall in different cache sets
    const int32_t room = MAX_STATE / s.stride / 8 * 8, together = room < MAX_QUERIES ? room : MAX_QUERIES;
    const int32_t queries = work[WORK_ROWS] * group;
    for (int first = 0; first < queries; first += together) {
        load_queries(&s, &view, first, queries - first < together ? queries - first : together);
        const int staged = kv == KV_F32 || s.count > FEW_QUERIES || head_dim % LANES;
        if (kv == KV_Q8) (staged ? attend_staged_q8 : attend_directly_q8)(&s, &view);
        else (staged ? attend_staged : attend_directly)(&s, &view);
        for (int q = 0; q < s.count; q++) {
            const int32_t token = work[WORK_ROW] + (first + q) / group;
            const int32_t column = first_column + (first + q) % group * head_dim;
            const float *sums = s.all_sums + q * s.stride;
            float total = s.all_total[q], shrink = 1.0f;
            if (sinks) {
                const float sink = sinks[kv_head * group + (first + q) % group];
                const float above = sink * 1.44269504f - s.all_highest[q] * view.base;  // the highest score
                shrink = exp2_scalar(above > 0.0f ? -above : 0.0f);
                total = total * shrink + exp2_scalar(above > 0.0f ? 0.0f : above);
            }
            const f32x16 inverse = f_set(shrink / total);
            for (int i = 0; out_q8 && i < head_dim; i += Q8_COLUMNS)
                q8_write(args->buffer[4], out_stride, token, column + i, f_mul(f_load(sums + i), inverse),
                         f_mul(f_load(sums + i + LANES), inverse));
            for (int i = 0; !out_q8 && i < head_dim; i += LANES)
                f_store_first((float *)args->buffer[4] + (size_t)token * out_stride + column + i,
                              f_mul(f_load(sums + i), inverse), head_dim - i);
        }
    }
}

// Samples a token from a row of logits. One item: one row.
//
// The filters keep the first tokens of one order (logit descending, then id ascending), so the last kept token describes
// the result. It is found without sorting: logits are counted or weighed in bins of their leading bits, then those of the
// last bin in bins of the next bits. The highest logit of every group of blocks is stored, so that passes after the
// first read few blocks. Sampling goes through the kept tokens in order of id.
#include <math.h>

#include "simd.h"

enum { BLOCK = 64, MAX_GROUPS = 4096, BINS = 2048, WAYS = 4, LEVELS = 3 };

typedef struct {
    const float *logits;
    const logit_adjustment *adjustments;  // in ascending order of tokens
    const uint32_t *mask;  // one bit per token, or NULL
    const sampling_parameters *p;
    int32_t vocab, adjustment_count, blocks, shift;  // a group is 2^shift blocks
    float highest, group_highest[MAX_GROUPS];
} row_view;

// Logits above `edge`, and those equal to it up to the id `last`.
typedef struct { float edge; int32_t last; } kept_set;
static const kept_set EVERYTHING = {-INFINITY, INT32_MAX};

// 0 <= u < 1 from 53 bits that depend only on the request's seed and counter (the mixer of splitmix64).
static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
static double uniform(const sampling_parameters *p) {
    uint64_t seed = (uint64_t)p->seed_high << 32 | p->seed_low;
    return (double)(mix(mix(seed) + ((uint64_t)p->counter + 1) * 0x9e3779b97f4a7c15u) >> 11) * 0x1p-53;
}

// NaN counts as -inf, +inf as the largest number, -0 as 0: then numbers order as their bits do.
ALWAYS_INLINE f32x16 clean(f32x16 x) {
    return f_add(f_min(f_max(x, f_set(-INFINITY)), f_set(3.40282347e38f)), f_zero());
}

// As in llama.cpp: the bias, then the repeat penalty, then frequency and presence penalties.
static float adjusted(const sampling_parameters *p, float x, const logit_adjustment *e) {
    x += e->bias;
    if (e->count > 0) {
        x = x > 0.0f ? x / p->repeat_penalty : x * p->repeat_penalty;
        x -= (float)e->count * p->frequency_penalty + p->presence_penalty;
    }
    return x;
}

// The logits of a block with their adjustments, -inf past the vocabulary and where the mask is not set. `cursor` begins at 0 and blocks come in order.
ALWAYS_INLINE void read_block(const row_view *r, int block, int *cursor, float x[BLOCK]) {
    int start = block * BLOCK, n = r->vocab - start < BLOCK ? r->vocab - start : BLOCK;
    const float *from = r->logits + start;
    if (n < BLOCK) {
        for (int i = 0; i < BLOCK; i++) x[i] = i < n ? from[i] : -INFINITY;
        from = x;
    }
    for (int i = 0; i < BLOCK; i += LANES) f_store(x + i, clean(f_load(from + i)));
    while (*cursor < r->adjustment_count && r->adjustments[*cursor].token < start) ++*cursor;
    int begin = *cursor;
    for (; *cursor < r->adjustment_count && r->adjustments[*cursor].token < start + n; ++*cursor) {
        int i = r->adjustments[*cursor].token - start;
        if (i >= 0) x[i] = adjusted(r->p, x[i], &r->adjustments[*cursor]);
    }
    for (int i = 0; *cursor > begin && i < BLOCK; i += LANES) f_store(x + i, clean(f_load(x + i)));
    for (int i = 0; r->mask && i < n; i++)
        if (!(r->mask[(start + i) / 32] >> (start + i) % 32 & 1)) x[i] = -INFINITY;
}

static void open_row(row_view *r) {
    r->blocks = (r->vocab + BLOCK - 1) / BLOCK;
    for (r->shift = 0; r->blocks > MAX_GROUPS << r->shift;) r->shift++;
    r->highest = -INFINITY;
    for (int b = 0, cursor = 0; b < r->blocks; b++) {
        float x[BLOCK];
        read_block(r, b, &cursor, x);
        f32x16 most = f_max(f_max(f_load(x), f_load(x + 16)), f_max(f_load(x + 32), f_load(x + 48)));
        float highest = f_reduce_max(most), *group = &r->group_highest[b >> r->shift];
        if (b >> r->shift << r->shift == b || highest > *group) *group = highest;
        if (highest > r->highest) r->highest = highest;
    }
}

// The first block from `block` on that may have a logit of at least `least`.
ALWAYS_INLINE int next_block(const row_view *r, int block, float least) {
    while (block < r->blocks && r->group_highest[block >> r->shift] < least)
        block = ((block >> r->shift) + 1) << r->shift;
    return block;
}
#define FOR_BLOCKS(r, b, least) for (int b = next_block(r, 0, least); b < (r)->blocks; b = next_block(r, b + 1, least))

// The id of the n-th logit that equals `value`.
static int32_t nth_equal(const row_view *r, float value, int32_t n) {
    int cursor = 0;
    FOR_BLOCKS(r, b, value) {
        float x[BLOCK];
        read_block(r, b, &cursor, x);
        for (int i = 0; i < BLOCK; i++) if (x[i] == value && --n == 0) return b * BLOCK + i;
    }
    return INT32_MAX;
}

// e^((x - highest) / temperature) for the kept logits of a block, 0 for the others.
ALWAYS_INLINE void weigh(const row_view *r, kept_set kept, float inverse, int block, const float x[BLOCK],
                         float w[BLOCK]) {
    for (int i = 0; i < BLOCK; i += LANES)
        f_store(w + i, f_exp(f_mul(f_sub(f_load(x + i), f_set(r->highest)), f_set(inverse))));
    if (kept.edge == -INFINITY) return;  // excluded tokens have weight 0 already
    for (int i = 0; i < BLOCK; i++)
        if (x[i] < kept.edge || (x[i] == kept.edge && block * BLOCK + i > kept.last)) w[i] = 0.0f;
}

// The total weight of the kept logits, and the weight of each group.
static double weigh_all(const row_view *r, kept_set kept, float inverse, double groups[MAX_GROUPS]) {
    double total = 0.0;
    int cursor = 0;
    memset(groups, 0, sizeof(double) * MAX_GROUPS);
    FOR_BLOCKS(r, b, kept.edge) {
        float x[BLOCK], w[BLOCK];
        read_block(r, b, &cursor, x);
        weigh(r, kept, inverse, b, x, w);
        double sum = f_reduce_add(f_add(f_add(f_load(w), f_load(w + 16)), f_add(f_load(w + 32), f_load(w + 48))));
        groups[b >> r->shift] += sum;
        total += sum;
    }
    return total;
}

// Keys order as the numbers they are made of.
ALWAYS_INLINE uint32_t key_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
static float number_of(uint32_t key) {
    float x;
    uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
    memcpy(&x, &bits, 4);
    return key < key_of(-INFINITY) ? -INFINITY : x;
}

ALWAYS_INLINE double bin_sum(const double bin[WAYS]) { return (bin[0] + bin[1]) + (bin[2] + bin[3]); }

// Finds, from the highest bin down, the bin in which the running sum reaches `target`, or else the last that is not
// empty. The sum begins at `above`, which becomes the sum of all bins above the one found.
static uint32_t edge_bin(double bins[BINS][WAYS], double target, double *above) {
    uint32_t found = 0;
    double before = *above, sum = *above;
    for (int b = BINS - 1; b >= 0; b--) {
        double bin = bin_sum(bins[b]);
        if (bin == 0.0) continue;
        found = (uint32_t)b;
        before = sum;
        sum += bin;
        if (sum >= target) break;
    }
    *above = before;
    return found;
}

// Top-k (`count` > 0) or top-p (`count` = 0, `share` = p) of the kept tokens: the smallest set of highest logits.
static kept_set cut(const row_view *r, kept_set kept, int32_t count, double share) {
    static const int shifts[LEVELS] = {21, 10, 0};
    double bins[BINS][WAYS], above = 0.0, target = count;  // a bin has several sums, so that neighbours need not wait
    float least = kept.edge;
    uint32_t prefix = 0;
    if (count) {  // at least `count` groups, so at least `count` logits, reach this
        int groups = ((r->blocks - 1) >> r->shift) + 1;
        memset(bins, 0, sizeof bins);
        for (int g = 0; g < groups; g++) bins[key_of(r->group_highest[g]) >> shifts[0]][0] += 1.0;
        if (groups >= count) least = number_of(edge_bin(bins, target, &above) << shifts[0]);
        above = 0.0;
    }
    for (int level = 0; level < LEVELS; level++) {
        int shift = shifts[level], known = level ? shifts[level - 1] : 32, cursor = 0;
        uint32_t mask = (uint32_t)(((uint64_t)1 << (known - shift)) - 1);
        memset(bins, 0, sizeof bins);
        FOR_BLOCKS(r, b, least) {
            float x[BLOCK], w[BLOCK];
            read_block(r, b, &cursor, x);
            if (!count) weigh(r, kept, 1.0f, b, x, w);
            uint32_t keys[BLOCK];
            for (int i = 0; i < BLOCK; i++) keys[i] = key_of(x[i]);
            for (int i = 0; i < BLOCK; i++)
                if ((uint64_t)keys[i] >> known == prefix)
                    bins[keys[i] >> shift & mask][i % WAYS] += count ? 1.0 : (double)w[i];
        }
        if (level == 0 && !count) {
            for (int b = 0; b < BINS; b++) target += bin_sum(bins[b]);
            target *= share;
        }
        prefix = prefix << (known - shift) | edge_bin(bins, target, &above);
        least = number_of(prefix << shift);
    }
    float w[LANES];
    f_store(w, f_exp(f_set(least - r->highest)));
    double ties = ceil((target - above) / (count ? 1.0 : w[0]));
    int32_t last = nth_equal(r, least, ties < 1.0 ? 1 : ties < r->vocab ? (int32_t)ties : r->vocab);
    return (kept_set){least, least == kept.edge && last > kept.last ? kept.last : last};
}

// The first token, in order of id, up to which the weights of kept tokens exceed a random fraction of their total.
static int32_t sample_token(const row_view *r, kept_set kept, float inverse) {
    double groups[MAX_GROUPS], left = weigh_all(r, kept, inverse, groups) * uniform(r->p);
    int32_t token = 0;
    int last = ((r->blocks - 1) >> r->shift), group = 0;
    while (last > 0 && groups[last] == 0.0) last--;
    for (; group < last && left >= groups[group]; group++) left -= groups[group];
    for (int b = group << r->shift, cursor = 0; b < r->blocks && b < (group + 1) << r->shift; b++) {
        float x[BLOCK], w[BLOCK];
        read_block(r, b, &cursor, x);
        weigh(r, kept, inverse, b, x, w);
        for (int i = 0; i < BLOCK; i++) {
            if (w[i] == 0.0f) continue;
            token = b * BLOCK + i;
            if (left < w[i]) return token;
            left -= w[i];
        }
    }
    return token;
}

static int32_t pick(const row_view *r) {
    const sampling_parameters *p = r->p;
    if (r->highest == -INFINITY) return 0;  // all tokens are banned
    if (!(p->temperature > 0.0f)) return nth_equal(r, r->highest, 1);
    kept_set kept = EVERYTHING;
    if (p->top_k > 0 && p->top_k < r->vocab) kept = cut(r, kept, p->top_k, 0.0);
    if (p->top_p < 1.0f) kept = cut(r, kept, 0, p->top_p > 0.0f ? p->top_p : 0.0);
    if (p->min_p > 0.0f) {
        float least = r->highest + logf(p->min_p < 1.0f ? p->min_p : 1.0f);
        if (least > kept.edge) kept = (kept_set){least, INT32_MAX};
    }
    return sample_token(r, kept, 1.0f / fminf(fmaxf(p->temperature, 1e-30f), 1e30f));
}

// From the unadjusted logits: the log-probability of `token`, and the most likely tokens with theirs.
static void write_logprobs(const row_view *row, int32_t token, sampling_result *out) {
    double groups[MAX_GROUPS];
    row_view r = *row;
    r.adjustment_count = 0;
    r.mask = NULL;
    if (row->adjustment_count || row->mask) open_row(&r);
    int32_t n = r.p->top_logprobs < MAX_TOP_LOGPROBS ? r.p->top_logprobs : MAX_TOP_LOGPROBS, found = 0, cursor = 0;
    n = n < r.vocab ? n : r.vocab;
    int dead = r.highest == -INFINITY;
    float total = dead ? 0.0f : (float)log(weigh_all(&r, EVERYTHING, 1.0f, groups));
    int32_t *ids = out->top_ids;
    float *logprobs = out->top_logprobs;
    kept_set kept = n ? cut(&r, EVERYTHING, n, 0.0) : EVERYTHING;
    float x[BLOCK];
    read_block(&r, token / BLOCK, &cursor, x);
    out->logprob = dead ? -INFINITY : x[token % BLOCK] - r.highest - total;
    out->top_count = n;
    for (int b = next_block(&r, 0, kept.edge); found < n && b < r.blocks; b = next_block(&r, b + 1, kept.edge)) {
        read_block(&r, b, &cursor, x);
        for (int i = 0; i < BLOCK; i++) {
            if (x[i] < kept.edge || (x[i] == kept.edge && b * BLOCK + i > kept.last)) continue;
            int place = found++;
            for (; place > 0 && logprobs[place - 1] < x[i]; place--) {
                logprobs[place] = logprobs[place - 1];
                ids[place] = ids[place - 1];
            }
            logprobs[place] = x[i];
            ids[place] = b * BLOCK + i;
        }
    }
    for (int i = 0; i < n; i++) logprobs[i] = dead ? -INFINITY : logprobs[i] - r.highest - total;
}

KERNEL(sample) {
    (void)step;
    const int32_t vocab = args->scalar[0].i, stride = args->scalar[1].i, mask_words = args->scalar[3].i;
    row_view r;
    r.logits = (const float *)args->buffer[0] + (size_t)item * stride;
    r.p = (const sampling_parameters *)args->buffer[1] + item;
    r.adjustments = (const logit_adjustment *)args->buffer[2] + r.p->first_adjustment;
    r.adjustment_count = r.p->adjustments;
    r.mask = r.p->masked ? (const uint32_t *)args->buffer[3] + (size_t)item * mask_words : NULL;
    r.vocab = vocab;
    sampling_result *out = (sampling_result *)args->buffer[4] + item;
    memset(out, 0, sizeof *out);
    open_row(&r);
    out->token = pick(&r);
    if (r.p->top_logprobs >= 0) write_logprobs(&r, out->token, out);
}

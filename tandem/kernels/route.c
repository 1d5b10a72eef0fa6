// The experts of one token, and their weights; see route.py.
#include "rows.h"

enum { LOGITS, BIAS, CHOSEN, WEIGHTS };
enum { EXPERTS, USED, STRIDE, SCORE, NORMALISE, SCALE, SETS, SETS_USED, SET_TOP };

static void softmax(const float *logits, float *p, int32_t n) {
    float largest = logits[0], sum = 0.0f;
    for (int32_t i = 1; i < n; i++) if (logits[i] > largest) largest = logits[i];
    for (int32_t i = 0; i < n; i += LANES) f_store_first(p + i, f_exp(f_sub(f_load_first(logits + i, n - i), f_set(largest))), n - i);
    for (int32_t i = 0; i < n; i++) sum += p[i];
    for (int32_t i = 0; i < n; i++) p[i] /= sum;
}

static void sigmoid(const float *logits, float *p, int32_t n) {
    for (int32_t i = 0; i < n; i += LANES) {
        f32x16 e = f_exp(f_sub(f_zero(), f_load_first(logits + i, n - i)));
        f_store_first(p + i, f_div(f_set(1.0f), f_add(f_set(1.0f), e)), n - i);
    }
}

// The index of the highest of n values that are not taken yet; of equal ones the first. Also if values are not numbers.
static int32_t take_highest(const float *values, uint8_t *taken, int32_t n) {
    int32_t best = -1;
    for (int32_t i = 0; i < n; i++) if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    taken[best] = 1;
    return best;
}

// Takes the experts of all groups (n_group) but the best: a group's score is the sum of its SET_TOP highest.
static void take_other_sets(const launch_args *args, const float *choice, uint8_t *taken) {
    int32_t sets = args->scalar[SETS].i, size = args->scalar[EXPERTS].i / sets;
    float score[MAX_EXPERTS];
    uint8_t chosen[MAX_EXPERTS] = {0};
    for (int32_t s = 0; s < sets; s++) {
        uint8_t seen[MAX_EXPERTS] = {0};
        score[s] = 0.0f;
        for (int32_t i = 0; i < args->scalar[SET_TOP].i; i++) score[s] += choice[s * size + take_highest(choice + s * size, seen, size)];
    }
    for (int32_t i = 0; i < args->scalar[SETS_USED].i; i++) take_highest(score, chosen, sets);
    for (int32_t s = 0; s < sets; s++) memset(taken + s * size, !chosen[s], (size_t)size);
}

KERNEL(route) {
    (void)step;
    int32_t experts = args->scalar[EXPERTS].i, used = args->scalar[USED].i;
    const float *logits = (const float *)args->buffer[LOGITS] + (size_t)item * args->scalar[STRIDE].i;
    const float *bias = args->buffer[BIAS];
    int32_t *chosen = (int32_t *)args->buffer[CHOSEN] + (size_t)item * used;
    float *weights = (float *)args->buffer[WEIGHTS] + (size_t)item * used;
    float p[MAX_EXPERTS], choice[MAX_EXPERTS], sum = 0.0f;
    uint8_t taken[MAX_EXPERTS] = {0};
    if (args->scalar[SCORE].i == SCORE_SIGMOID) sigmoid(logits, p, experts);
    else softmax(logits, p, experts);
    for (int32_t i = 0; i < experts; i++) choice[i] = bias ? p[i] + bias[i] : p[i];
    if (args->scalar[SETS].i > 1) take_other_sets(args, choice, taken);
    for (int32_t j = 0; j < used; j++) {
        int32_t expert = take_highest(choice, taken, experts);
        chosen[j] = expert;
        weights[j] = p[expert];
        sum += p[expert];
    }
    for (int32_t j = 0; j < used; j++) {
        if (args->scalar[NORMALISE].i) weights[j] /= sum;
        weights[j] *= args->scalar[SCALE].f;
    }
}

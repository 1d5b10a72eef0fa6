// The tokens of each expert; see group_tokens.py.
#include "core.h"

enum { CHOSEN, GROUPS };
enum { EXPERTS, USED };

KERNEL(group_tokens) {
    (void)item;
    int32_t experts = args->scalar[EXPERTS].i, used = args->scalar[USED].i, total = step[HEADER_TOKENS] * used;
    const int32_t *chosen = args->buffer[CHOSEN];
    int32_t *groups = args->buffer[GROUPS], *group = groups + GROUP_HEADER, *slots = group + experts * GROUP_INTS, *tokens_of = slots + total;
    int32_t tokens[MAX_EXPERTS] = {0}, next[MAX_EXPERTS], slot = 0, in_use = 0;
    for (int32_t i = 0; i < total; i++) tokens[chosen[i]]++;
    for (int32_t e = 0; e < experts; e++) {
        if (!tokens[e]) continue;
        group[GROUP_EXPERT] = e;
        group[GROUP_SLOT] = next[e] = slot;
        group[GROUP_TOKENS] = tokens[e];
        group += GROUP_INTS, in_use++;
        slot += (tokens[e] + Q8_TILE - 1) / Q8_TILE * Q8_TILE;
    }
    groups[GROUP_EXPERTS] = in_use;
    for (int32_t i = 0; i < total; i++) {
        slots[i] = next[chosen[i]]++;
        tokens_of[slots[i]] = i / used;
    }
}

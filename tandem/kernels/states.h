// The chunks of a step for layers with a recurrent state; see states.py.
#pragma once
#include "launch.h"

enum { NO_STATE = -1 };  // in place of a state slot: the zero state, or no target

typedef struct {
    int32_t first, tokens;
    int32_t source;          // state slot, or NO_STATE
    const int32_t *targets;  // the slot that gets the state after each token, or NO_STATE
} state_chunk;

static inline state_chunk read_chunk(const int32_t *chunks, int32_t sequences, int32_t index) {
    const int32_t *row = chunks + (size_t)index * CHUNK_INTS;
    const int32_t first = row[CHUNK_TOKEN];
    return (state_chunk){first, row[CHUNK_TOKENS], row[CHUNK_SOURCE],
                         chunks + (size_t)sequences * CHUNK_INTS + first};
}

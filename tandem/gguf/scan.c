// Finds the strings of a GGUF string array (u64 length, bytes, u64 length, bytes ...) without copying them.
#include "core.h"

// Fills `start` and `length` for `count` strings at `data`, which has `size` bytes; returns the bytes they take.
// If string i runs past the end, returns -1 - i with start[i] the place of its length.
EXPORT int64_t tandem_scan_strings(const uint8_t *data, int64_t size, int64_t count, int64_t *start, int64_t *length) {
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t n;
        start[i] = at;
        if (size - at < (int64_t)sizeof n) return -1 - i;
        memcpy(&n, data + at, sizeof n);
        at += sizeof n;
        if (n > (uint64_t)(size - at)) return -1 - i;
        start[i] = at;
        length[i] = (int64_t)n;
        at += (int64_t)n;
    }
    return at;
}

// The tokenizer's core. One merging loop serves both kinds of vocabulary:
//   byte-level BPE:  symbols are bytes, two neighbours join if the file lists the pair; the lowest rank goes first
//   SentencePiece:   symbols are characters, two neighbours join if together they are a token; the best score first
// All memory of a `tokenizer` belongs to the caller (tandem/model/tokenizer.py), which fills it once; encoding only
// reads it, so any number of threads may encode at the same time.
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>

#include "core.h"

enum { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5, BYTE = 6 };  // as in GGUF

typedef struct { uint32_t hash; int32_t id; } token_slot;
typedef struct { uint64_t pair; int32_t rank, id; } merge_slot;
typedef struct { int32_t child, sibling, id, byte; } trie_node;

typedef struct {
    int32_t byte_level;        // 1: byte-level BPE, 0: SentencePiece
    int32_t whole_words;       // 1: a word that is a token needs no merges (Llama 3 lists tokens no merges reach)
    int32_t unknown;           // stands for what the vocabulary cannot spell; -1: such bytes are dropped
    int32_t longest;           // bytes of the longest token
    uint8_t *bytes;            // what the tokens stand for, one after the other
    int64_t *starts;           // [tokens + 1] into bytes
    uint8_t *types;            // [tokens]
    float *scores;       // [tokens], SentencePiece only
    token_slot *slots;         // [slot_mask + 1] hash table of all tokens; id -1: empty
    merge_slot *merges;        // [merge_mask + 1] hash table of pairs; id -1: empty
    trie_node *trie;           // the special tokens; node b is the root of those that begin with byte b
    int64_t slot_mask, merge_mask;
    int32_t byte_ids[256];     // the token of each byte, or -1
    uint8_t adjacent[65536];   // [before * 256 + after] 1: these bytes are neighbours in some token
} tokenizer;

typedef struct { int32_t start, length, previous, next, id; } symbol;
typedef struct { uint64_t order; int32_t length, id; } candidate;  // order: priority, then position of the left symbol

static uint32_t hash_bytes(const uint8_t *text, int64_t n) {
    uint64_t hash = (uint64_t)n;
    while (n > 0) {
        uint64_t word = 0;
        int64_t take = n < 8 ? n : 8;
        for (int64_t i = 0; i < take; i++) word |= (uint64_t)text[i] << (8 * i);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
        text += take, n -= take;
    }
    return (uint32_t)((hash * 0xBF58476D1CE4E5B9u) >> 32);
}

// The slot of `text`, or the empty one where it would go.
static token_slot *find_slot(const tokenizer *t, const uint8_t *text, int64_t n, uint32_t hash) {
    for (int64_t at = hash & t->slot_mask;; at = (at + 1) & t->slot_mask) {
        token_slot *slot = &t->slots[at];
        if (slot->id < 0) return slot;
        if (slot->hash != hash) continue;
        int64_t start = t->starts[slot->id];
        if (t->starts[slot->id + 1] - start == n && !memcmp(t->bytes + start, text, n)) return slot;
    }
}

EXPORT int32_t tandem_tokenizer_find(const tokenizer *t, const uint8_t *text, int64_t n) {
    return n > t->longest ? -1 : find_slot(t, text, n, hash_bytes(text, n))->id;
}

// Only these may come out of plain text: a control token there would let a user's words speak for the system.
static int is_plain(const tokenizer *t, int32_t id) {
    return t->types[id] != CONTROL && t->types[id] != UNKNOWN && t->types[id] != BYTE;
}

static int32_t find_plain(const tokenizer *t, const uint8_t *text, int64_t n) {
    int32_t id = tandem_tokenizer_find(t, text, n);
    return id >= 0 && is_plain(t, id) ? id : -1;
}

static merge_slot *find_merge(const tokenizer *t, int32_t left, int32_t right) {
    uint64_t pair = (uint64_t)left << 32 | (uint32_t)right;
    uint64_t hash = pair * 0x9E3779B97F4A7C15u;
    for (int64_t at = (hash >> 24) & t->merge_mask;; at = (at + 1) & t->merge_mask)
        if (t->merges[at].id < 0 || t->merges[at].pair == pair) return &t->merges[at];
}

static int64_t character_length(const uint8_t *text, int64_t n) {
    int64_t length = *text < 0xC0 ? 1 : *text < 0xE0 ? 2 : *text < 0xF0 ? 3 : 4;
    return length < n ? length : n;
}

// Byte-level files write each byte as a printable character: those that are printable stand for themselves, the
// others follow from U+0100 in order. Returns how many bytes were written; other characters stay as they are.
static int64_t spell_bytes(const uint8_t *text, int64_t n, uint8_t *out) {
    uint8_t *begin = out;
    for (int64_t length; n > 0; text += length, n -= length) {
        length = character_length(text, n);
        int32_t code = length == 2 ? (text[0] & 31) << 6 | (text[1] & 63) : 0, shifted = code - 256;
        if (code > 0xA0 && code < 256 && code != 0xAD) *out++ = (uint8_t)code;
        else if (shifted >= 0 && shifted < 33) *out++ = (uint8_t)shifted;        // 0 to 32
        else if (shifted >= 33 && shifted < 67) *out++ = (uint8_t)(shifted + 94);  // 127 to 160
        else if (shifted == 67) *out++ = 0xAD;
        else for (int64_t i = 0; i < length; i++) *out++ = text[i];
    }
    return out - begin;
}

// SentencePiece files write a space as U+2581.
static int64_t spell_spaces(const uint8_t *text, int64_t n, uint8_t *out) {
    uint8_t *begin = out;
    for (int64_t i = 0; i < n;) {
        if (n - i >= 3 && !memcmp(text + i, "\xE2\x96\x81", 3)) *out++ = ' ', i += 3;
        else *out++ = text[i++];
    }
    return out - begin;
}

// Fills bytes, starts, slots, adjacent, longest and byte_ids from the file's strings.
EXPORT void tandem_tokenizer_add_tokens(tokenizer *t, const uint8_t *blob, const int64_t *offsets,
                                        const int64_t *lengths, int64_t count) {
    int64_t end = 0;
    for (int64_t id = 0; id < count; id++) {
        const uint8_t *text = blob + offsets[id];
        uint8_t *out = t->bytes + end;
        int64_t n = lengths[id];
        int raw = t->types[id] == CONTROL || t->types[id] == UNKNOWN || t->types[id] == USER_DEFINED;
        if (!t->byte_level) n = spell_spaces(text, n, out);
        else if (!raw) n = spell_bytes(text, n, out);
        else memcpy(out, text, n);
        t->starts[id] = end;
        t->starts[id + 1] = end += n;
        if (n == 0) continue;
        if (n > t->longest) t->longest = (int32_t)n;
        uint32_t hash = hash_bytes(out, n);
        token_slot *slot = find_slot(t, out, n, hash);
        // Of two that stand for the same, prefer the plain one, and the one spelled in bytes: it takes more characters.
        if (slot->id < 0 || !is_plain(t, slot->id) || lengths[id] > lengths[slot->id])
            *slot = (token_slot){hash, (int32_t)id};
        if (is_plain(t, id))
            for (int64_t i = 1; i < n; i++) t->adjacent[out[i - 1] * 256 + out[i]] = 1;
    }
    for (int byte = 0; byte < 256; byte++) {
        const char *digits = "0123456789ABCDEF";
        uint8_t name[6] = {'<', '0', 'x', digits[byte >> 4], digits[byte & 15], '>'}, one = (uint8_t)byte;
        t->byte_ids[byte] = t->byte_level ? find_plain(t, &one, 1) : tandem_tokenizer_find(t, name, 6);
    }
}

// `scratch` holds the longest line. Lines whose parts or result are no tokens cannot apply and are left out. In a
// vocabulary that is not byte-level, the first line that makes a token is its score.
EXPORT void tandem_tokenizer_add_merges(tokenizer *t, const uint8_t *blob, const int64_t *offsets,
                                        const int64_t *lengths, int64_t count, uint8_t *scratch) {
    for (int64_t rank = 0; rank < count; rank++) {
        const uint8_t *line = blob + offsets[rank];
        const uint8_t *space = lengths[rank] > 2 ? memchr(line + 1, ' ', lengths[rank] - 1) : NULL;
        if (!space) continue;
        int64_t (*spell)(const uint8_t *, int64_t, uint8_t *) = t->byte_level ? spell_bytes : spell_spaces;
        int64_t left = spell(line, space - line, scratch);
        int64_t both = left + spell(space + 1, line + lengths[rank] - space - 1, scratch + left);
        int32_t left_id = find_plain(t, scratch, left), right_id = find_plain(t, scratch + left, both - left);
        int32_t id = find_plain(t, scratch, both);
        if (left_id < 0 || right_id < 0 || id < 0) continue;
        if (!t->byte_level) {
            if (t->scores[id] < -(float)rank) t->scores[id] = -(float)rank;
            continue;
        }
        merge_slot *slot = find_merge(t, left_id, right_id);
        if (slot->id < 0) *slot = (merge_slot){(uint64_t)left_id << 32 | (uint32_t)right_id, (int32_t)rank, id};
    }
}

// Adds the token to the trie, whose first free node is `room`; returns the new first free node.
EXPORT int32_t tandem_tokenizer_add_special(tokenizer *t, int32_t id, int32_t room) {
    const uint8_t *text = t->bytes + t->starts[id];
    int64_t n = t->starts[id + 1] - t->starts[id];
    if (n == 0) return room;
    int32_t node = text[0];
    for (int64_t i = 1; i < n; i++) {
        int32_t child = t->trie[node].child;
        while (child > 0 && t->trie[child].byte != text[i]) child = t->trie[child].sibling;
        if (child == 0) {
            t->trie[room] = (trie_node){0, t->trie[node].child, -1, text[i]};
            t->trie[node].child = child = room++;
        }
        node = child;
    }
    t->trie[node].id = id;
    return room;
}

// Finds the first, and there the longest, special token at or after `from`: its start and end in `span`, its id
// returned. Control tokens count only if `controls`. None: -1, and the span is the end of the text.
EXPORT int32_t tandem_tokenizer_next_special(const tokenizer *t, const uint8_t *text, int64_t n, int64_t from,
                                             int32_t controls, int64_t *span) {
    for (int64_t start = from; start < n; start++) {
        int32_t node = text[start], found = -1;
        for (int64_t end = start + 1;; end++) {
            int32_t id = t->trie[node].id;
            if (id >= 0 && (controls || t->types[id] == USER_DEFINED)) found = id, span[1] = end;
            if (end == n) break;
            for (node = t->trie[node].child; node > 0 && t->trie[node].byte != text[end];) node = t->trie[node].sibling;
            if (node == 0) break;
        }
        if (found >= 0) return span[0] = start, found;
    }
    span[0] = span[1] = n;
    return -1;
}

// The token two neighbours make, or -1; a lower `priority` goes first.
static int32_t join(const tokenizer *t, const uint8_t *text, const symbol *left, const symbol *right,
                    uint32_t *priority) {
    if (t->byte_level) {
        if (left->id < 0 || right->id < 0) return -1;
        const merge_slot *slot = find_merge(t, left->id, right->id);
        *priority = (uint32_t)slot->rank;
        return slot->id;
    }
    int32_t id = find_plain(t, text + left->start, (int64_t)left->length + right->length);
    if (id >= 0) {
        float score = t->scores[id] + 0.0f;  // no negative zero
        uint32_t bits;
        memcpy(&bits, &score, 4);
        *priority = bits >> 31 ? bits : bits ^ 0x7FFFFFFFu;  // descending scores as ascending integers
    }
    return id;
}

static void push(candidate *heap, int64_t *size, candidate item) {
    int64_t at = (*size)++;
    for (; at > 0 && item.order < heap[(at - 1) / 2].order; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = item;
}

static candidate pop(candidate *heap, int64_t *size) {
    candidate top = heap[0], last = heap[--*size];
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < *size; at = child) {
        if (child + 1 < *size && heap[child + 1].order < heap[child].order) child++;
        if (last.order <= heap[child].order) break;
        heap[at] = heap[child];
    }
    heap[at] = last;
    return top;
}

typedef struct { double share, slept; int64_t merges; } budget;  // slept: this thread's CPU time at its last sleep

static double processor_time(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Sleeps when the thread has used more than its share of CPU time, every few ms (as throttle of tandem/threads.py).
static void throttle(budget *b) {
    if (b->share >= 1.0 || ++b->merges % 4096) return;
    double seconds = (processor_time() - b->slept) * (1.0 / b->share - 1.0);
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
    b->slept = processor_time();
}

// Merges the symbols until no pair joins. `heap` holds 2 * count candidates: a merge takes one and adds at most two.
static void merge(const tokenizer *t, const uint8_t *text, symbol *symbols, int32_t count, candidate *heap, budget *b) {
    int64_t size = 0;
    uint32_t priority;
    for (int32_t left = 0; left + 1 < count; left++) {
        int32_t id = join(t, text, &symbols[left], &symbols[left + 1], &priority);
        int32_t length = symbols[left].length + symbols[left + 1].length;
        if (id >= 0) push(heap, &size, (candidate){(uint64_t)priority << 32 | (uint32_t)left, length, id});
        throttle(b);
    }
    while (size > 0) {
        throttle(b);
        candidate best = pop(heap, &size);
        symbol *left = &symbols[(uint32_t)best.order];
        if (left->length == 0 || left->next < 0) continue;
        symbol *right = &symbols[left->next];
        if (left->length + right->length != best.length) continue;  // one of the two has grown since
        left->length = best.length;
        left->id = best.id;
        left->next = right->next;
        right->length = 0;
        int32_t here = (int32_t)(left - symbols);
        if (left->next >= 0) symbols[left->next].previous = here;
        int32_t pairs[2][2] = {{left->previous, here}, {here, left->next}};
        for (int i = 0; i < 2; i++) {
            int32_t a = pairs[i][0], b = pairs[i][1];
            int32_t id = a < 0 || b < 0 ? -1 : join(t, text, &symbols[a], &symbols[b], &priority);
            if (id < 0) continue;
            int32_t length = symbols[a].length + symbols[b].length;
            push(heap, &size, (candidate){(uint64_t)priority << 32 | (uint32_t)a, length, id});
        }
    }
}

// Writes the tokens of one stretch of text that nothing outside can merge with; returns how many.
static int64_t encode_stretch(const tokenizer *t, const uint8_t *text, int64_t n, int32_t *ids, symbol *symbols,
                              candidate *heap, budget *b) {
    if (t->whole_words) {
        int32_t id = find_plain(t, text, n);
        if (id >= 0) return ids[0] = id, 1;
    }
    int32_t count = 0;
    for (int64_t at = 0, length; at < n; at += length, count++) {
        length = t->byte_level ? 1 : character_length(text + at, n - at);
        int32_t id = t->byte_level ? t->byte_ids[text[at]] : -1;
        symbols[count] = (symbol){(int32_t)at, (int32_t)length, count - 1, at + length < n ? count + 1 : -1, id};
    }
    if (count > 1) merge(t, text, symbols, count, heap, b);
    int64_t written = 0;
    for (int32_t at = 0; at >= 0; at = symbols[at].next) {
        const symbol *s = &symbols[at];
        int32_t id = s->id >= 0 || t->byte_level ? s->id : find_plain(t, text + s->start, s->length);
        int64_t before = written;
        if (id >= 0) ids[written++] = id;
        for (int32_t i = 0; id < 0 && i < s->length; i++) {  // no token: spell its bytes
            int32_t byte_id = t->byte_ids[text[s->start + i]];
            if (byte_id >= 0) ids[written++] = byte_id;
        }
        if (written == before && t->unknown >= 0) ids[written++] = t->unknown;
    }
    return written;
}

// Where the stretch that begins `text` ends: no token has the bytes on both sides of the cut as neighbours.
static int64_t stretch_length(const tokenizer *t, const uint8_t *text, int64_t n) {
    int64_t end = character_length(text, n);
    while (end < n && t->adjacent[text[end - 1] * 256 + text[end]]) end += character_length(text + end, n - end);
    return end;
}

// Encodes plain UTF-8 text, until there are more than `limit` ids. Byte-level: it consists of `words`, given by their
// lengths in characters. `ids` has room for n. `share`: of the time that this thread may work.
// Returns the number of ids, or -1 if there is no memory.
EXPORT int64_t tandem_tokenizer_encode(const tokenizer *t, const uint8_t *text, int64_t n, const int32_t *words,
                                       int64_t word_count, int32_t *ids, int64_t limit, double share) {
    budget b = {share, processor_time(), 0};
    const int32_t *words_end = words + word_count;
    symbol *symbols = NULL;
    candidate *heap = NULL;
    int64_t written = 0, room = 0;
    for (int64_t at = 0, length = 0; at < n && written <= limit; at += length) {
        if (!t->byte_level) {
            length = stretch_length(t, text + at, n - at);
        } else {
            if (words == words_end) break;
            length = 0;
            for (int32_t left = *words++; left > 0 && at + length < n; left--)
                length += character_length(text + at + length, n - at - length);
        }
        if (length > room) {
            room = length < 256 ? 256 : length;
            free(symbols), free(heap);
            symbols = malloc(room * sizeof *symbols);
            heap = malloc(2 * room * sizeof *heap);
            if (!symbols || !heap) { written = -1; break; }
        }
        if (length > 0) written += encode_stretch(t, text + at, length, ids + written, symbols, heap, &b);
    }
    free(symbols), free(heap);
    return written;
}

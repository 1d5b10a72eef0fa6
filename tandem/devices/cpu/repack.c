// Turns rows of GGUF blocks into the panels of panels.h, as the file is read. Same bytes, other order.
#include "layouts.h"
#include "panels.h"

enum { ROWS = LANES };

// quants: [16 rows][32 columns], below 16 -> 256 bytes
static void pack_nibbles(uint8_t *panel, uint8_t quants[ROWS][32]) {
    uint32_t *out = (uint32_t *)panel;
    for (int r = 0; r < ROWS; r++) {
        uint32_t words[8];
        memcpy(words, quants[r], 32);
        for (int i = 0; i < 4; i++) out[i * ROWS + r] = (words[i] & 0x0f0f0f0f) | (words[4 + i] & 0x0f0f0f0f) << 4;
    }
}

// Bit 4 of each quant -> 64 bytes, bit s of byte 4*row + j is column 4*s + j.
static void pack_fifth_bits(uint8_t *panel, uint8_t quants[ROWS][32]) {
    uint32_t *out = (uint32_t *)panel;
    for (int r = 0; r < ROWS; r++) {
        uint32_t words[8], bits = 0;
        memcpy(words, quants[r], 32);
        for (int s = 0; s < 8; s++) bits |= (words[s] >> 4 & 0x01010101) << s;
        out[r] = bits;
    }
}

// Bits 4 and 5 of each quant -> 128 bytes, see q6_k_quants.
static void pack_upper_bits(uint8_t *panel, uint8_t quants[ROWS][32]) {
    uint32_t *out = (uint32_t *)panel;
    for (int r = 0; r < ROWS; r++) {
        uint32_t words[8];
        memcpy(words, quants[r], 32);
        for (int h = 0; h < 2; h++) {
            uint32_t bits = 0;
            for (int f = 0; f < 4; f++) bits |= (words[4 * h + f] >> 4 & 0x03030303) << 2 * f;
            out[h * ROWS + r] = bits;
        }
    }
}

static void spread_nibbles(const uint8_t *packed, uint8_t *quants) {  // 16 bytes -> 32 quants, halves apart
    for (int i = 0; i < 16; i++) quants[i] = packed[i] & 15, quants[16 + i] = packed[i] >> 4;
}

static void add_fifth_bits(uint32_t bits, uint8_t *quants) {
    for (int i = 0; i < 32; i++) quants[i] |= (bits >> i & 1) << 4;
}

// A row's blocks at the same columns lie `stride` bytes apart; rows past `rows` read as zero blocks.
typedef struct { const uint8_t *at; size_t stride; int rows; } blocks;
static const uint8_t zeros[256];
static const uint8_t *row_block(blocks b, int r) { return r < b.rows ? b.at + r * b.stride : zeros; }
static void copy_halves(uint8_t *panel, blocks b, int offset) {
    for (int r = 0; r < ROWS; r++) memcpy(panel + 2 * r, row_block(b, r) + offset, 2);
}

static void repack_q4_0(blocks b, uint8_t *panel) {  // half d, 16 bytes
    uint8_t quants[ROWS][32];
    for (int r = 0; r < ROWS; r++) spread_nibbles(row_block(b, r) + 2, quants[r]);
    pack_nibbles(panel, quants);
    copy_halves(panel + NIBBLES, b, 0);
}

static void repack_q4_1(blocks b, uint8_t *panel) {  // half d, half m, 16 bytes
    uint8_t quants[ROWS][32];
    for (int r = 0; r < ROWS; r++) spread_nibbles(row_block(b, r) + 4, quants[r]);
    pack_nibbles(panel, quants);
    copy_halves(panel + NIBBLES, b, 0);
    copy_halves(panel + NIBBLES + 32, b, 2);
}

static void repack_five(blocks b, uint8_t *panel, int header) {  // header, 4 bytes of fifth bits, 16 bytes
    uint8_t quants[ROWS][32];
    for (int r = 0; r < ROWS; r++) {
        uint32_t bits;
        memcpy(&bits, row_block(b, r) + header, 4);
        spread_nibbles(row_block(b, r) + header + 4, quants[r]);
        add_fifth_bits(bits, quants[r]);
    }
    pack_nibbles(panel, quants);
    pack_fifth_bits(panel + NIBBLES, quants);
    copy_halves(panel + NIBBLES + 64, b, 0);
    if (header == 4) copy_halves(panel + NIBBLES + 96, b, 2);
}
static void repack_q5_0(blocks b, uint8_t *panel) { repack_five(b, panel, 2); }
static void repack_q5_1(blocks b, uint8_t *panel) { repack_five(b, panel, 4); }

static void repack_q8_0(blocks b, uint8_t *panel) {  // half d, 32 int8
    uint32_t *out = (uint32_t *)panel;
    for (int r = 0; r < ROWS; r++) {
        uint32_t words[8];
        memcpy(words, row_block(b, r) + 2, 32);
        for (int s = 0; s < 8; s++) out[s * ROWS + r] = words[s] ^ 0x80808080;  // int8 + 128
    }
    copy_halves(panel + 512, b, 0);
}

static void copy_k_scales(uint8_t *panel, blocks b) {  // half d, half dmin, 12 bytes of scales
    for (int r = 0; r < ROWS; r++)
        for (int word = 0; word < 3; word++) memcpy(panel + 64 * word + 4 * r, row_block(b, r) + 4 + 4 * word, 4);
    copy_halves(panel + 192, b, 0);
    copy_halves(panel + 224, b, 2);
}

// q4_k: 128 bytes of nibbles at 16; q5_k: 32 bytes of fifth bits at 16, nibbles at 48. Bytes 32c to 32c+31 hold
// columns 64c to 64c+31 in their low nibbles and the next 32 in their high ones.
static void repack_k(blocks b, uint8_t *panel, int five) {
    for (int block = 0; block < 8; block++) {
        uint8_t quants[ROWS][32];
        for (int r = 0; r < ROWS; r++) {
            const uint8_t *nibbles = row_block(b, r) + (five ? 48 : 16) + 32 * (block / 2), *fifth = row_block(b, r) + 16;
            if (block % 2 == 0) for (int i = 0; i < 32; i++) quants[r][i] = nibbles[i] & 15;
            else for (int i = 0; i < 32; i++) quants[r][i] = nibbles[i] >> 4;
            if (five) for (int i = 0; i < 32; i++) quants[r][i] |= (fifth[i] >> block & 1) << 4;
        }
        pack_nibbles(panel + NIBBLES * block, quants);
        if (five) pack_fifth_bits(panel + 8 * NIBBLES + 64 * block, quants);
    }
    copy_k_scales(panel + 8 * NIBBLES + (five ? 512 : 0), b);
}
static void repack_q4_k(blocks b, uint8_t *panel) { repack_k(b, panel, 0); }
static void repack_q5_k(blocks b, uint8_t *panel) { repack_k(b, panel, 1); }

// 128 bytes of low nibbles, 64 of upper bits, 16 int8 scales, half d. In each half of 128 columns, byte i of the
// nibbles holds columns i (low) and i + 64 (high), and byte i of the upper bits columns i, i+32, i+64, i+96.
static void repack_q6_k(blocks b, uint8_t *panel) {
    for (int block = 0; block < 8; block++) {
        uint8_t quants[ROWS][32];
        int quarter = block % 4, half_block = block / 4;
        for (int r = 0; r < ROWS; r++) {
            const uint8_t *low = row_block(b, r) + 64 * half_block + 32 * (quarter % 2);
            const uint8_t *upper = row_block(b, r) + 128 + 32 * half_block;
            for (int i = 0; i < 32; i++)
                quants[r][i] = (uint8_t)((low[i] >> (quarter / 2 * 4) & 15) | (upper[i] >> 2 * quarter & 3) << 4);
        }
        pack_nibbles(panel + NIBBLES * block, quants);
        pack_upper_bits(panel + 8 * NIBBLES + 128 * block, quants);
    }
    uint8_t *scales = panel + 8 * NIBBLES + 1024;
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < 16; j++) scales[16 * j + r] = row_block(b, r)[192 + j];
    copy_halves(scales + 256, b, 208);
}

static void transpose_floats(blocks b, uint8_t *panel, int columns, int size) {
    for (int r = 0; r < ROWS; r++) {
        if (size == 4)
            for (int k = 0; k < columns; k++) ((uint32_t *)panel)[k * ROWS + r] = r < b.rows ? ((const uint32_t *)row_block(b, r))[k] : 0;
        else
            for (int k = 0; k < columns; k++) ((uint16_t *)panel)[k * ROWS + r] = r < b.rows ? ((const uint16_t *)row_block(b, r))[k] : 0;
    }
}

typedef void repack_fn(blocks, uint8_t *);
static const struct { const char *name; repack_fn *repack; int span, file_bytes, bytes; } formats[] = {
#define ENTRY(name) {#name, repack_##name, name##_SPAN, name##_BYTES / ROWS, name##_BYTES},
    EACH_PANEL_FORMAT(ENTRY)
};

// Repacks `rows` rows of `columns` columns at `file` into ceil(rows / 16) panels. Panel p of them goes to place
// p / run * period + p % run at `out`, so that gate and up can alternate; run = period for a plain matrix.
// Returns 0, or -1 for a format without panels. Panels are independent: callers may cut rows by 16s.
EXPORT int tandem_repack(const char *name, const uint8_t *file, int64_t rows, int64_t columns, uint8_t *out,
                         int64_t first_panel, int64_t run, int64_t period) {
    int float_size = !strcmp(name, "f32") ? 4 : !strcmp(name, "f16") || !strcmp(name, "bf16") ? 2 : 0;
    size_t f = 0, known = sizeof formats / sizeof *formats;
    while (!float_size && f < known && strcmp(name, formats[f].name)) f++;
    if (!float_size && f == known) return -1;
    int64_t chunks = float_size ? 1 : columns / formats[f].span;
    int64_t chunk_bytes = float_size ? columns * float_size * ROWS : formats[f].bytes;
    for (int64_t row = 0, p = first_panel; row < rows; row += ROWS, p++) {
        uint8_t *panel = out + (p / run * period + p % run) * chunks * chunk_bytes;
        blocks b = {file + row * chunks * chunk_bytes / ROWS, (size_t)(chunks * chunk_bytes / ROWS),
                    rows - row < ROWS ? (int)(rows - row) : ROWS};
        for (int64_t chunk = 0; chunk < chunks; chunk++, panel += chunk_bytes, b.at += chunk_bytes / ROWS) {
            if (float_size) transpose_floats(b, panel, (int)columns, float_size);
            else formats[f].repack(b, panel);
        }
    }
    return 0;
}

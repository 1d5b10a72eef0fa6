// Repacks rows of GGUF blocks into the panels of panels.h while the file is read: the same bytes in another order.
//
// The time of loading depends on it, so it works on 16 bytes at a time (SSE2, which every x86-64 CPU has): a row's 32 quants
// are two vectors q[0], q[1]; vectors of 4 words of four rows are transposed into the panel, where a row is a lane.
#include <emmintrin.h>

#include "panels.h"

enum { ROWS = PANEL_ROWS };
typedef __m128i bytes16;

static bytes16 load16(const void *p) { return _mm_loadu_si128((const bytes16 *)p); }
static bytes16 mask(bytes16 v, int m) { return _mm_and_si128(v, _mm_set1_epi8((char)m)); }
static bytes16 shifted_right(bytes16 v, int n, int m) { return mask(_mm_srli_epi16(v, n), m); }  // of each byte

// Word i of each of 4 rows -> out[i * ROWS .. + 3].
static void store_transposed(uint32_t *out, const bytes16 *rows) {
    bytes16 a = _mm_unpacklo_epi32(rows[0], rows[1]), b = _mm_unpackhi_epi32(rows[0], rows[1]);
    bytes16 c = _mm_unpacklo_epi32(rows[2], rows[3]), d = _mm_unpackhi_epi32(rows[2], rows[3]);
    _mm_storeu_si128((bytes16 *)(out + 0 * ROWS), _mm_unpacklo_epi64(a, c));
    _mm_storeu_si128((bytes16 *)(out + 1 * ROWS), _mm_unpackhi_epi64(a, c));
    _mm_storeu_si128((bytes16 *)(out + 2 * ROWS), _mm_unpacklo_epi64(b, d));
    _mm_storeu_si128((bytes16 *)(out + 3 * ROWS), _mm_unpackhi_epi64(b, d));
}

// quants: [16 rows][2], the low 4 bits of each byte -> 256 bytes
static void pack_nibbles(uint8_t *panel, bytes16 quants[ROWS][2]) {
    for (int r = 0; r < ROWS; r += 4) {
        bytes16 packed[4];
        for (int i = 0; i < 4; i++)
            packed[i] = _mm_or_si128(mask(quants[r + i][0], 15), _mm_slli_epi16(mask(quants[r + i][1], 15), 4));
        store_transposed((uint32_t *)panel + r, packed);
    }
}

// Bit `bit` of each quant -> 64 bytes: bit s of byte 4*row + j is column 4*s + j.
static void pack_bits(uint8_t *panel, bytes16 quants[ROWS][2], int bit) {
    for (int r = 0; r < ROWS; r++) {
        uint32_t w[4], bits;
        bytes16 low = shifted_right(quants[r][0], bit, 1), high = shifted_right(quants[r][1], bit, 1);
        _mm_storeu_si128((bytes16 *)w, _mm_or_si128(low, _mm_slli_epi16(high, 4)));
        bits = w[0] | w[1] << 1 | w[2] << 2 | w[3] << 3;
        memcpy(panel + 4 * r, &bits, 4);
    }
}

// Bits `bit` and `bit` + 1 of each quant -> 128 bytes, see q6_k_quants.
static void pack_bit_pairs(uint8_t *panel, bytes16 quants[ROWS][2], int bit) {
    for (int r = 0; r < ROWS; r++)
        for (int h = 0; h < 2; h++) {
            uint32_t w[4], bits;
            _mm_storeu_si128((bytes16 *)w, shifted_right(quants[r][h], bit, 3));
            bits = w[0] | w[1] << 2 | w[2] << 4 | w[3] << 6;
            memcpy(panel + 64 * h + 4 * r, &bits, 4);
        }
}

// A row's blocks at the same columns lie `stride` bytes apart; rows past `rows` read as zero blocks.
typedef struct { const uint8_t *at; size_t stride; int rows; } blocks;
static const uint8_t zeros[256];
static const uint8_t *row_block(blocks b, int r) { return r < b.rows ? b.at + r * b.stride : zeros; }
static void copy_halves(uint8_t *panel, blocks b, int offset) {
    for (int r = 0; r < ROWS; r++) memcpy(panel + 2 * r, row_block(b, r) + offset, 2);
}

static void split_nibbles(const uint8_t *packed, bytes16 q[2]) {  // low nibbles are the first 16 columns
    q[0] = mask(load16(packed), 15);
    q[1] = shifted_right(load16(packed), 4, 15);
}

static void repack_nibbles(blocks b, uint8_t *panel, int offset) {  // 16 bytes from `offset` of a block
    bytes16 quants[ROWS][2];
    for (int r = 0; r < ROWS; r++) split_nibbles(row_block(b, r) + offset, quants[r]);
    pack_nibbles(panel, quants);
}

static void repack_four(blocks b, uint8_t *panel, int header) {  // half d (half m), 16 bytes
    repack_nibbles(b, panel, header);
    copy_halves(panel + NIBBLES, b, 0);
    if (header == 4) copy_halves(panel + NIBBLES + 32, b, 2);
}
static void repack_q4_0(blocks b, uint8_t *panel) { repack_four(b, panel, 2); }
static void repack_q4_1(blocks b, uint8_t *panel) { repack_four(b, panel, 4); }
static void repack_iq4_nl(blocks b, uint8_t *panel) { repack_four(b, panel, 2); }

// A byte e, the scale 2^(e - 127), and 16 bytes. Values are doubled, so the scale is halved: e - 1 is its exponent field as
// float32. Scales below 2^-125 become 0.
static void repack_mxfp4(blocks b, uint8_t *panel) {
    repack_nibbles(b, panel, 1);
    for (int r = 0; r < ROWS; r++) {
        uint8_t e = row_block(b, r)[0];
        panel[NIBBLES + r] = e ? e - 1 : 0;
    }
}

// half d, 2 bytes with the upper 2 bits of 8 scales, 4 bytes with their low 4 bits, 128 bytes of nibbles.
static void repack_iq4_xs(blocks b, uint8_t *panel) {
    for (int block = 0; block < 8; block++) repack_nibbles(b, panel + NIBBLES * block, 8 + 16 * block);
    uint8_t *scales = panel + 8 * NIBBLES;
    for (int r = 0; r < ROWS; r++) {
        for (int i = 0; i < 4; i++) scales[16 * i + r] = row_block(b, r)[4 + i];
        for (int i = 0; i < 2; i++) scales[64 + 16 * i + r] = row_block(b, r)[2 + i];
    }
    copy_halves(scales + 96, b, 0);
}

// 16 bits to 16 bytes, each 16 where its bit is set.
static bytes16 spread_bits(const uint8_t *bits) {
    bytes16 select = _mm_set1_epi64x((long long)0x8040201008040201ull);
    uint64_t low = bits[0] * 0x0101010101010101ull, high = bits[1] * 0x0101010101010101ull;
    bytes16 v = _mm_and_si128(_mm_set_epi64x((long long)high, (long long)low), select);
    return mask(_mm_cmpeq_epi8(v, select), 16);
}

static void repack_five(blocks b, uint8_t *panel, int header) {  // half d (half m), 4 bytes of fifth bits, 16 bytes
    bytes16 quants[ROWS][2];
    for (int r = 0; r < ROWS; r++) {
        const uint8_t *bits = row_block(b, r) + header;
        split_nibbles(bits + 4, quants[r]);
        for (int i = 0; i < 2; i++) quants[r][i] = _mm_or_si128(quants[r][i], spread_bits(bits + 2 * i));
    }
    pack_nibbles(panel, quants);
    pack_bits(panel + NIBBLES, quants, 4);
    copy_halves(panel + NIBBLES + 64, b, 0);
    if (header == 4) copy_halves(panel + NIBBLES + 96, b, 2);
}
static void repack_q5_0(blocks b, uint8_t *panel) { repack_five(b, panel, 2); }
static void repack_q5_1(blocks b, uint8_t *panel) { repack_five(b, panel, 4); }

static void repack_q8_0(blocks b, uint8_t *panel) {  // half d, 32 int8, kept as int8 + 128
    for (int r = 0; r < ROWS; r += 4)
        for (int h = 0; h < 2; h++) {
            bytes16 rows[4];
            for (int i = 0; i < 4; i++)
                rows[i] = _mm_xor_si128(load16(row_block(b, r + i) + 2 + 16 * h), _mm_set1_epi8((char)0x80));
            store_transposed((uint32_t *)panel + 4 * h * ROWS + r, rows);
        }
    copy_halves(panel + 512, b, 0);
}

// half d, half dmin, and 12 bytes of scales: word 0 = scales 0-3 in its bytes' low 6 bits, word 1 = minima 0-3, word 2 =
// low 4 bits of scales 4-7 (low nibbles) and minima 4-7 (high nibbles), whose upper 2 bits are the top bits of words 0 and 1.
static void pack_k_scales(uint8_t *panel, blocks b) {
    for (int r = 0; r < ROWS; r++) {
        uint32_t word[3], low[2], upper[2];  // low, upper: of blocks 0-3 and 4-7, a byte per block
        memcpy(word, row_block(b, r) + 4, 12);
        low[0] = (word[0] & 0x0f0f0f0f) | (word[1] & 0x0f0f0f0f) << 4;
        low[1] = word[2];
        upper[0] = (word[0] >> 4 & 0x03030303) | (word[1] >> 2 & 0x0c0c0c0c);
        upper[1] = (word[0] >> 6 & 0x03030303) | (word[1] >> 4 & 0x0c0c0c0c);
        for (int h = 0; h < 2; h++) {
            for (int i = 0; i < 4; i++) panel[16 * (4 * h + i) + r] = (uint8_t)(low[h] >> 8 * i);
            uint32_t pairs = upper[h] | upper[h] >> 4;  // bytes 0 and 2: two blocks each
            panel[128 + 16 * (2 * h) + r] = (uint8_t)pairs;
            panel[128 + 16 * (2 * h + 1) + r] = (uint8_t)(pairs >> 16);
        }
    }
    copy_halves(panel + 192, b, 0);
    copy_halves(panel + 224, b, 2);
}

// q4_k: 128 bytes of nibbles at 16; q5_k: 32 bytes of fifth bits at 16, nibbles at 48. Bytes 32c to 32c+31 hold
// columns 64c to 64c+31 in their low nibbles and the next 32 in their high ones.
static void repack_k(blocks b, uint8_t *panel, int five) {
    for (int block = 0; block < 8; block++) {
        bytes16 quants[ROWS][2];
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < 2; i++) {
                const uint8_t *nibbles = row_block(b, r) + (five ? 48 : 16) + 32 * (block / 2) + 16 * i;
                bytes16 q = shifted_right(load16(nibbles), block % 2 * 4, 15);
                if (five) {
                    bytes16 fifth = shifted_right(load16(row_block(b, r) + 16 + 16 * i), block, 1);
                    q = _mm_or_si128(q, _mm_slli_epi16(fifth, 4));
                }
                quants[r][i] = q;
            }
        pack_nibbles(panel + NIBBLES * block, quants);
        if (five) pack_bits(panel + 8 * NIBBLES + 64 * block, quants, 4);
    }
    pack_k_scales(panel + 8 * NIBBLES + (five ? 512 : 0), b);
}
static void repack_q4_k(blocks b, uint8_t *panel) { repack_k(b, panel, 0); }
static void repack_q5_k(blocks b, uint8_t *panel) { repack_k(b, panel, 1); }

// 128 bytes of low nibbles, 64 of upper bits, 16 int8 scales, half d. In each half of 128 columns, byte i of the
// nibbles holds columns i (low) and i + 64 (high), and byte i of the upper bits columns i, i+32, i+64, i+96.
static void repack_q6_k(blocks b, uint8_t *panel) {
    for (int block = 0; block < 8; block++) {
        bytes16 quants[ROWS][2];
        int quarter = block % 4, half_block = block / 4;
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < 2; i++) {
                const uint8_t *low = row_block(b, r) + 64 * half_block + 32 * (quarter % 2) + 16 * i;
                const uint8_t *upper = row_block(b, r) + 128 + 32 * half_block + 16 * i;
                bytes16 q = shifted_right(load16(low), quarter / 2 * 4, 15);
                quants[r][i] = _mm_or_si128(q, _mm_slli_epi16(shifted_right(load16(upper), 2 * quarter, 3), 4));
            }
        pack_nibbles(panel + NIBBLES * block, quants);
        pack_bit_pairs(panel + 8 * NIBBLES + 128 * block, quants, 4);
    }
    uint8_t *scales = panel + 8 * NIBBLES + 1024;
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < 16; j++) scales[16 * j + r] = row_block(b, r)[192 + j];
    copy_halves(scales + 256, b, 208);
}

// Quants of 2 bits at `offset`: in each half of 128 columns, byte i holds columns i, i+32, i+64 and i+96. Third bits, if any,
// are at `third`: bit b of byte i is column 32 b + i.
static void repack_two_bits(blocks b, uint8_t *panel, int offset, int third) {
    for (int block = 0; block < 8; block++) {
        bytes16 quants[ROWS][2];
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < 2; i++) {
                const uint8_t *row = row_block(b, r);
                bytes16 q = shifted_right(load16(row + offset + 32 * (block / 4) + 16 * i), 2 * (block % 4), 3);
                if (third >= 0) q = _mm_or_si128(q, _mm_slli_epi16(shifted_right(load16(row + third + 16 * i), block, 1), 2));
                quants[r][i] = q;
            }
        pack_bit_pairs(panel + 128 * block, quants, 0);
        if (third >= 0) pack_bits(panel + 1024 + 64 * block, quants, 2);
    }
}

// 32 bytes of third bits, 64 of low bits, 12 of 6-bit scales (16 low nibbles, then 16 pairs of upper bits), half d.
static void repack_q3_k(blocks b, uint8_t *panel) {
    repack_two_bits(b, panel, 32, 0);
    uint8_t *out = panel + 1536;  // see six_bits: the two scales of each block
    for (int r = 0; r < ROWS; r++) {
        const uint8_t *packed = row_block(b, r) + 96;
        for (int block = 0; block < 8; block++) {
            int low = 0, upper = 0;
            for (int i = 0; i < 2; i++) {
                int s = 2 * block + i;
                low |= (packed[s % 8] >> 4 * (s / 8) & 15) << 4 * i;
                upper |= (packed[8 + s % 4] >> 2 * (s / 4) & 3) << 2 * i;
            }
            uint8_t *pair = out + 128 + 16 * (block / 2) + r;
            out[16 * block + r] = (uint8_t)low;
            *pair = (uint8_t)(block % 2 ? *pair | upper << 4 : upper);
        }
    }
    copy_halves(out + 192, b, 108);
}

// 16 bytes of scale (low nibble) and minimum, 64 of quants, half d, half dmin.
static void repack_q2_k(blocks b, uint8_t *panel) {
    repack_two_bits(b, panel, 16, -1);
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < 16; j++) panel[1024 + 16 * j + r] = row_block(b, r)[j];
    copy_halves(panel + 1280, b, 80);
    copy_halves(panel + 1312, b, 82);
}

static void transpose_floats(blocks b, uint8_t *panel, int columns, int size) {
    for (int r = 0; r < ROWS; r++)
        for (int k = 0; k < columns; k++) {
            uint8_t *to = panel + (size_t)(k * ROWS + r) * size;
            if (r < b.rows) memcpy(to, row_block(b, r) + (size_t)k * size, size);
            else memset(to, 0, size);
        }
}

typedef struct {  // the arguments of tandem_repack
    const char *layout; const uint8_t *file; int64_t rows, columns; uint8_t *out; int64_t first_panel, run, period;
} repack_job;

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

// Several jobs in one call: Python's lock is released for longer.
EXPORT int tandem_repack_all(const repack_job *jobs, int64_t count) {
    for (const repack_job *j = jobs; j < jobs + count; j++)
        if (tandem_repack(j->layout, j->file, j->rows, j->columns, j->out, j->first_panel, j->run, j->period)) return -1;
    return 0;
}

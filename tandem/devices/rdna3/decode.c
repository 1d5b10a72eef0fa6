// Machine code to instructions: the encodings of chapter 15 of AMD's RDNA3 ISA guide.
#include <string.h>

#include "wave.h"

static const Operation *by_code[ENCODINGS][1024];

static void index_operations(void) {
    if (by_code[SOP1][0]) return;
    for (u32 i = OPERATION_COUNT; i--;) by_code[OPERATIONS[i].encoding][OPERATIONS[i].opcode] = OPERATIONS + i;
}

static inline u32 field(u64 word, int low, int width) { return (u32)(word >> low & ((1ull << width) - 1)); }

static bool is_half(Type t) { return t == U16 || t == I16 || t == F16; }

// The value of an inline constant or of the literal, as an operand of a type.
static u64 constant_value(u32 n, u32 literal, Type type) {
    static const u32 FLOATS[] = {0x3f000000, 0xbf000000, 0x3f800000, 0xbf800000, 0x40000000,
                                 0xc0000000, 0x40800000, 0xc0800000, 0x3e22f983};  // +-0.5, 1, 2, 4, 1 / 2 pi
    static const u32 HALVES[] = {0x3800, 0xb800, 0x3c00, 0xbc00, 0x4000, 0xc000, 0x4400, 0xc400, 0x3118};
    if (n == LITERAL) return type == I64 ? (u64)(i64)(i32)literal : literal;
    if (n >= 240 && n <= 248) return is_half(type) ? HALVES[n - 240] : FLOATS[n - 240];
    i64 integer = n <= 192 ? (i64)n - 128 : 192 - (i64)n;
    return (u64)integer;
}

static bool known_operand(u32 n) {
    return n <= VCC + 1 || (n >= NULL_SGPR && n <= 208) || (n >= 240 && n <= 248) || (n >= 251 && n <= 253) || n >= LITERAL;
}

// VOP1, VOP2 and VOPC address the low 128 registers where an operand is a half: bit 7 says which half.
static void split_halves(Instruction *in) {
    for (int i = 0; i < 3; i++)
        if (is_half(in->op->source[i]) && in->source[i] >= FIRST_VGPR + 128) in->source[i] -= 128, in->high |= (u8)(1 << i);
    if (is_half(in->op->result) && in->result >= 128) in->result -= 128, in->high |= 8;
}

// The word after an instruction that says from which lanes source 0 comes.
static void decode_dpp(Instruction *in, u32 kind, u32 word) {
    in->source[0] = (u16)(FIRST_VGPR + field(word, 0, 8));
    in->dpp = kind == 250 ? 16 : 8;
    in->row_mask = in->bank_mask = 15;
    if (in->dpp == 8) {
        in->dpp_control = word >> 8;
        in->fetch_inactive = kind == 234;
        return;
    }
    in->dpp_control = field(word, 8, 9);
    in->fetch_inactive = field(word, 18, 1);
    in->bound_control = field(word, 19, 1);
    in->negate |= (u8)(field(word, 20, 1) | field(word, 22, 1) << 1);
    in->absolute |= (u8)(field(word, 21, 1) | field(word, 23, 1) << 1);
    in->bank_mask = (u8)field(word, 24, 4);
    in->row_mask = (u8)field(word, 28, 4);
}

static void vector_sources(Instruction *in, u64 word, bool third) {
    in->source[0] = (u16)field(word, 32, 9);
    in->source[1] = (u16)field(word, 41, 9);
    if (third) in->source[2] = (u16)field(word, 50, 9);
    in->negate = (u8)field(word, 61, 3);
}

static u32 decode_vop3(Instruction *in, u64 word) {
    u32 code = field(word, 16, 10);
    in->op = code < 256 ? by_code[VOPC][code] : code < 320 ? by_code[VOP2][code - 256]
             : code >= 384 && code < 512 ? by_code[VOP1][code - 384] : by_code[VOP3][code];
    bool scalar_result = by_code[VOP3SD][code] || (code >= 288 && code <= 290);
    if (by_code[VOP3SD][code]) in->op = by_code[VOP3SD][code];
    in->encoding_is_vop3 = true;
    if (!in->op) return 0;
    vector_sources(in, word, in->op->source[2] != NONE);
    in->result = (u16)field(word, 0, 8);
    in->clamp = (u8)field(word, 15, 1);
    in->multiply = (u8)field(word, 59, 2);
    if (scalar_result) in->scalar_result = (u16)field(word, 8, 7);
    else in->absolute = (u8)field(word, 8, 3), in->high = (u8)field(word, 11, 4);
    return 8;
}

// Two operations at once, of those that VOPD has: each is decoded as its VOP2 or VOP1 form.
static bool decode_dual(Instruction *in, u32 code, u32 source0, u32 source1, u32 result) {
    static const struct { u8 encoding, code; } DUAL[] = {
        {VOP2, 43}, {VOP2, 45}, {VOP2, 44}, {VOP2, 8}, {VOP2, 3}, {VOP2, 4}, {VOP2, 5}, {0, 255}, {VOP1, 1}, {VOP2, 1},
        {VOP2, 16}, {VOP2, 15}, {0, 255}, {0, 255}, {0, 255}, {0, 255}, {VOP2, 37}, {VOP2, 24}, {VOP2, 27},
    };
    if (code >= sizeof DUAL / sizeof *DUAL || DUAL[code].code == 255) return false;
    in->op = by_code[DUAL[code].encoding][DUAL[code].code];
    in->source[0] = (u16)source0;
    in->source[1] = (u16)(FIRST_VGPR + source1);
    in->result = (u16)result;
    return true;
}

static void memory_fields(Instruction *in, u64 word) {
    in->address = (u16)field(word, 32, 8);
    in->data = (u16)field(word, 40, 8);
    in->base = (u16)field(word, 48, 7);
    in->result = (u16)field(word, 56, 8);
    in->offset = (i32)(field(word, 0, 13) << 19) >> 19;
    in->glc = field(word, 14, 1);
    in->sve = field(word, 55, 1);
}

// Of a buffer access. False: an index, a texture's status or a scalar offset that is no register or 0, which are not known here.
static bool buffer_fields(Instruction *in, u64 word) {
    in->address = (u16)field(word, 32, 8);
    in->data = in->result = (u16)field(word, 40, 8);
    in->base = (u16)(4 * field(word, 48, 5));
    in->offset = (i32)field(word, 0, 12);
    in->glc = field(word, 14, 1);
    in->sve = field(word, 54, 1);
    in->scalar_offset = (u16)field(word, 56, 8);
    return !field(word, 53, 1) && !field(word, 55, 1) && in->scalar_offset <= 128;
}

// The bytes of the instruction at `word` before a literal or DPP; 0: not known.
static u32 decode_one(Instruction *in, u64 word) {
    u32 w = (u32)word;
    if (w >> 31 == 0) {
        if (w >> 25 == 0x3f || w >> 25 == 0x3e) {
            bool compare = w >> 25 == 0x3e;
            in->op = compare ? by_code[VOPC][field(w, 17, 8)] : by_code[VOP1][field(w, 9, 8)];
            in->result = compare ? VCC : (u16)field(w, 17, 8);
            if (compare) in->source[1] = (u16)(FIRST_VGPR + field(w, 9, 8));
        } else {
            in->op = by_code[VOP2][field(w, 25, 6)];
            in->source[1] = (u16)(FIRST_VGPR + field(w, 9, 8));
            in->result = (u16)field(w, 17, 8);
        }
        in->source[0] = (u16)field(w, 0, 9);
        return in->op ? 4 : 0;
    }
    if (w >> 30 == 2) {
        in->immediate = w & 0xffff;
        in->result = (u16)field(w, 16, 7);
        in->source[0] = (u16)field(w, 0, 8);
        in->source[1] = (u16)field(w, 8, 8);
        if (w >> 23 == 0x17d) in->op = by_code[SOP1][field(w, 8, 8)];
        else if (w >> 23 == 0x17e) in->op = by_code[SOPC][field(w, 16, 7)];
        else if (w >> 23 == 0x17f) in->op = by_code[SOPP][field(w, 16, 7)];
        else if (w >> 28 == 0xb) in->op = by_code[SOPK][field(w, 23, 5)];
        else in->op = by_code[SOP2][field(w, 23, 7)];
        return in->op ? 4 : 0;
    }
    switch (w >> 26) {
    case 0x33:  // 110011
        in->op = by_code[VOP3P][field(w, 16, 7)];
        if (!in->op || w >> 24 != 0xcc) return 0;
        vector_sources(in, word, in->op->source[2] != NONE);
        in->result = (u16)field(w, 0, 8);
        in->negate_high = (u8)field(w, 8, 3);
        in->high = (u8)field(w, 11, 3);
        in->select_high = (u8)(field(word, 59, 2) | field(w, 14, 1) << 2);
        in->clamp = (u8)field(w, 15, 1);
        return 8;
    case 0x35: return decode_vop3(in, word);
    case 0x36:
        in->op = by_code[DS][field(w, 18, 8)];
        in->offset = (i32)field(w, 0, 16);
        in->offset1 = field(w, 8, 8);
        in->address = (u16)field(word, 32, 8);
        in->data = (u16)field(word, 40, 8);
        in->data1 = (u16)field(word, 48, 8);
        in->result = (u16)field(word, 56, 8);
        return in->op ? 8 : 0;
    case 0x37:
        in->op = by_code[field(w, 16, 2) == 2 ? GLOBAL : SCRATCH][field(w, 18, 7)];
        memory_fields(in, word);
        return in->op && field(w, 16, 2) ? 8 : 0;
    case 0x38:
        in->op = by_code[MUBUF][field(w, 18, 8)];
        return in->op && buffer_fields(in, word) ? 8 : 0;
    case 0x3d:
        in->op = by_code[SMEM][field(w, 18, 8)];
        in->base = (u16)(2 * field(w, 0, 6));
        in->result = (u16)field(w, 6, 7);
        in->offset = (i32)(field(word, 32, 21) << 11) >> 11;
        in->address = (u16)field(word, 57, 7);
        return in->op ? 8 : 0;
    default: return 0;
    }
}

// Whether operands are of the kind that the operation takes: lanes are read from vector registers only, masks and single
// lanes go to scalar ones.
static bool operands_fit(const Instruction *in) {
    const Operation *op = in->op;
    bool to_scalar = op->result == MASK || !strncmp(op->name, "v_read", 6);
    if (to_scalar && in->result >= SGPRS) return false;
    if (op->source[2] == MASK && in->encoding_is_vop3 && in->source[2] >= FIRST_VGPR) return false;
    bool lanes = !strncmp(op->name, "v_read", 6) || !strncmp(op->name, "v_perml", 7) || !strncmp(op->name, "v_swap", 6);
    if ((lanes || op->result == B256) && in->source[0] < FIRST_VGPR) return false;
    return op->result != B256 || in->source[1] >= FIRST_VGPR;
}

// Operands that need more words, and constants. Returns the bytes of those words; -1: an operand is not known.
static i32 finish(Instruction *in, const u32 *next, bool dpp) {
    u32 more = 0, literal = 0;
    Encoding e = in->op->encoding;
    bool has_sources = e <= SOPC || (e >= VOP1 && e <= VOP3P);
    u32 first = in->source[0];
    if (dpp && e >= VOP1 && e <= VOPC && (first == 250 || first == 233 || first == 234)) decode_dpp(in, first, *next), more = 4;
    if (!in->encoding_is_vop3 && e >= VOP1 && e <= VOPC) split_halves(in);
    bool literal_operand = false;
    for (int i = 0; i < 3 && has_sources; i++) literal_operand |= in->op->source[i] && in->source[i] == LITERAL;
    if (literal_operand || in->op->literal) literal = next[more / 4], more += 4;
    if (in->op->literal) in->target = literal;
    for (int i = 0; i < 3 && has_sources; i++) {
        if (!in->op->source[i]) continue;
        if (!known_operand(in->source[i])) return -1;
        if (in->source[i] < FIRST_VGPR) in->constant[i] = constant_value(in->source[i], literal, in->op->source[i]);
    }
    return has_sources && !operands_fit(in) ? -1 : (i32)more;
}

static void run_past_the_end(Wave *w, Instruction *in) {
    w->current = in - 1;
    fault(w, BAD_INSTRUCTION);
}
static const Operation END_OF_CODE = {"the end of the code", SOPP, 0, run_past_the_end, NONE, {NONE, NONE, NONE}, 0, 0, false};

// Fills `out` with the instructions of a shader; returns how many. -1: `*bad_word` is not known. Two words after the last may
// be read, and room for two instructions after the last is needed.
i32 decode(const u32 *words, u32 count, Instruction *out, u32 room, u32 *bad_word) {
    index_operations();
    u32 n = 0, at = 0;
    while (at < count && n + 3 <= room) {
        u64 word = words[at] | (at + 1 < count ? (u64)words[at + 1] << 32 : 0);
        Instruction *in = out + n;
        memset(in, 0, sizeof *in);
        in->at = 4 * at;
        *bad_word = at;
        i32 size, more;
        if ((u32)word >> 26 == 0x32) {  // VOPD
            Instruction *y = in + 1;
            *y = *in;
            u32 result_x = field(word, 56, 8), result_y = field(word, 49, 7) << 1 | !(result_x & 1);
            if (!decode_dual(in, field(word, 22, 4), field(word, 0, 9), field(word, 9, 8), result_x)) return -1;
            if (!decode_dual(y, field(word, 17, 5), field(word, 32, 9), field(word, 41, 8), result_y)) return -1;
            in->dual = true;
            i32 more_y = finish(y, words + at + 2, false);
            more = finish(in, words + at + 2, false);  // both share one literal
            if (more < 0 || more_y < 0) return -1;
            if (more_y > more) more = more_y;
            size = 8;
            n++;
        } else {
            size = (i32)decode_one(in, word);
            if (!size || (more = finish(in, words + at + size / 4, true)) < 0) return -1;
        }
        at += (u32)(size + more) / 4;
        n++;
    }
    memset(out + n, 0, sizeof *out);
    out[n].op = &END_OF_CODE;
    for (u32 i = 0; i < n; i++) {
        Instruction *in = out + i;
        if (in->op->encoding != SOPP || in->op->opcode < 32 || in->op->opcode > 38) continue;
        i64 to = (i64)in->at + 4 + 4 * (i64)(i16)in->immediate;
        u32 j = 0;
        while (j < n && out[j].at != to) j++;
        *bad_word = in->at / 4;
        if (j == n) return -1;
        in->target = j;
    }
    return (i32)n;
}

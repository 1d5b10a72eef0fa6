// Branches, and operations that are more than an expression. Part of operations.c.

static void branch(Wave *w, const Instruction *in, bool undefined, bool taken) {
    if (undefined) fault(w, UNDEFINED_BRANCH);
    if (taken) w->pc = in->target;
}
static void branch_vcc(Wave *w, const Instruction *in, bool if_zero) {
    u64 vcc = lane_mask(w, VCC);
    branch(w, in, w->taint != 0, !vcc == if_zero);
}

// The mask or carry that VOP3 names; VCC in shorter encodings.
static u64 mask_operand(Wave *w, const Instruction *in) {
    if (!in->encoding_is_vop3) return lane_mask(w, VCC);
    return in->source[2] < SGPRS ? lane_mask(w, in->source[2]) : scalar_value(w, in, 2, true);
}

static void choose(Wave *w, Instruction *in) {
    Lanes ra, rb, d;
    u64 picked = mask_operand(w, in), undefined = w->taint;
    w->taint = 0;
    const u32 *a = read_U32(w, in, 0, &ra);
    u64 undefined_a = w->taint;
    w->taint = 0;
    const u32 *b = read_U32(w, in, 1, &rb);
    w->taint = undefined | (undefined_a & ~picked) | (w->taint & picked);
    for (int l = 0; l < w->lanes; l++) d.u[l] = picked >> l & 1 ? b[l] : a[l];
    write_bits(w, in->result, d.u);
}

// Compilers give any register for a source of which no byte is selected, so what is undefined of it does not count; nor does
// a byte that stays where it is: that is how they write a part of a register.
static void permute(Wave *w, Instruction *in) {
    Lanes ra, rb, rc, d;
    u64 undefined[3];
    const u32 *source[3];
    for (int i = 0; i < 3; i++) {
        w->taint = 0;
        source[i] = read_bits(w, in, i, 0, i == 0 ? &ra : i == 1 ? &rb : &rc);
        undefined[i] = w->taint;
    }
    w->taint = undefined[2];
    EACH_LANE {
        u32 selectors = source[2][lane];
        d.u[lane] = permute_bytes(source[0][lane], source[1][lane], selectors);
        for (u32 i = 0; i < 4 && (undefined[0] | undefined[1]) >> lane & 1; i++) {
            u32 s = selectors >> 8 * i & 255;
            int from = s < 8 ? s < 4 : s < 10;
            bool stays = s < 8 && s % 4 == i && in->source[from] == FIRST_VGPR + in->result;
            if (s < 12 && !stays && undefined[from] >> lane & 1) w->taint |= 1ull << lane;
        }
    }
    write_bits(w, in->result, d.u);
}

static void carry(Wave *w, Instruction *in, bool subtract, bool with_carry) {
    Lanes ra, rb, d, out;
    const u32 *a = read_U32(w, in, 0, &ra), *b = read_U32(w, in, 1, &rb);
    u64 given = with_carry ? mask_operand(w, in) : 0;
    for (int l = 0; l < w->lanes; l++) {
        u64 c = given >> l & 1, x = subtract ? (u64)a[l] - b[l] - c : (u64)a[l] + b[l] + c;
        d.u[l] = (u32)x;
        out.u[l] = x >> 32 ? ~0u : 0;
    }
    u64 taint = w->taint;
    write_bits(w, in->result, d.u);
    w->taint = taint;
    write_lane_mask(w, in->encoding_is_vop3 ? in->scalar_result : VCC, pack_mask(out.u, w->lanes) & w->active);
}
static void add_with_carry(Wave *w, Instruction *in) { carry(w, in, false, true); }
static void subtract_with_borrow(Wave *w, Instruction *in) { carry(w, in, true, true); }
static void add_carry_out(Wave *w, Instruction *in) { carry(w, in, false, false); }
static void subtract_borrow_out(Wave *w, Instruction *in) { carry(w, in, true, false); }

static void multiply_add_64(Wave *w, Instruction *in) {
    Lanes ra, rb, rc, d, out;
    const u32 *a = read_U32(w, in, 0, &ra), *b = read_U32(w, in, 1, &rb);
    const u64 *c = read_U64(w, in, 2, &rc);
    for (int l = 0; l < w->lanes; l++) {
        d.q[l] = (u64)a[l] * b[l] + c[l];
        out.u[l] = d.q[l] < c[l] ? ~0u : 0;
    }
    u64 taint = w->taint;
    write_U64(w, in, &d);
    w->taint = taint;
    write_lane_mask(w, in->scalar_result, pack_mask(out.u, w->lanes) & w->active);
}

static void read_one_lane(Wave *w, Instruction *in, u32 lane) {
    u32 x = vgpr(w, in->source[0] - FIRST_VGPR)[lane];
    w->taint &= 1ull << lane;
    write_sgpr(w, in->result, x);
}
static void read_first_lane(Wave *w, Instruction *in) {
    u64 exec = exec_of(w);
    read_one_lane(w, in, exec ? (u32)__builtin_ctzll(exec) : 0);
}
static void read_lane(Wave *w, Instruction *in) {
    u32 lane = (u32)scalar_value(w, in, 1, false) & (u32)(w->lanes - 1);
    if (w->taint) fault(w, UNDEFINED_ADDRESS);
    read_one_lane(w, in, lane);
}
static void write_lane(Wave *w, Instruction *in) {
    Lanes d;
    u32 x = (u32)scalar_value(w, in, 0, false), lane = (u32)scalar_value(w, in, 1, false) & (u32)(w->lanes - 1);
    w->active = 1ull << lane;
    d.u[lane] = x;
    write_bits(w, in->result, d.u);
}

static void swap_registers(Wave *w, Instruction *in) {
    u32 r = in->source[0] - FIRST_VGPR;
    u32 a[MAX_LANES], b[MAX_LANES];
    u64 undefined[2] = {w->undefined[in->result], w->undefined[r]};
    memcpy(a, vgpr(w, in->result), sizeof a);
    memcpy(b, vgpr(w, r), sizeof b);
    w->taint = undefined[1];
    write_bits(w, in->result, b);
    w->taint = undefined[0];
    write_bits(w, r, a);
}
static void swap_halves(Wave *w, Instruction *in) {
    Lanes room, d;
    u32 old[MAX_LANES];
    int shift = in->high >> 3 & 1 ? 16 : 0;
    memcpy(old, vgpr(w, in->result), sizeof old);
    memcpy(d.u, read_U16(w, in, 0, &room), sizeof d.u);
    write_half(w, in, d.u);
    Instruction back = *in;
    back.result = in->source[0] - FIRST_VGPR;
    back.high = in->high & 1 ? 8 : 0;
    for (int l = 0; l < w->lanes; l++) d.u[l] = old[l] >> shift;
    write_half(w, &back, d.u);
}

// Each active lane takes the value of another: `from` gives its number. Without FI an inactive lane gives nothing.
static void take_lanes(Wave *w, Instruction *in, const u32 *values, const u8 *from, bool inactive, bool bound) {
    u32 d[MAX_LANES];
    u64 exec = exec_of(w), undefined = w->taint, tainted = 0;
    for (int l = 0; l < w->lanes; l++) {
        bool there = inactive || exec >> from[l] & 1;
        d[l] = there ? values[from[l]] : 0;
        if (there && undefined >> from[l] & 1) tainted |= 1ull << l;
        if (!there && !bound) w->active &= ~(1ull << l);
    }
    w->taint = tainted;
    write_bits(w, in->result, d);
}
static void permlane64(Wave *w, Instruction *in) {
    u8 from[MAX_LANES];
    for (int l = 0; l < w->lanes; l++) from[l] = (u8)(w->lanes == 64 ? l ^ 32 : l);
    take_lanes(w, in, vgpr(w, in->source[0] - FIRST_VGPR), from, true, true);
}
static void permlane_row(Wave *w, Instruction *in, int other) {
    u64 select = scalar_value(w, in, 1, false) | scalar_value(w, in, 2, false) << 32;
    u8 from[MAX_LANES];
    for (int l = 0; l < w->lanes; l++) from[l] = (u8)(((l & ~15) ^ other) | (select >> 4 * (l & 15) & 15));
    take_lanes(w, in, vgpr(w, in->source[0] - FIRST_VGPR), from, in->high & 1, in->high & 2);
}
static void permlane16(Wave *w, Instruction *in) { permlane_row(w, in, 0); }
static void permlanex16(Wave *w, Instruction *in) { permlane_row(w, in, 16); }

static void bpermute(Wave *w, Instruction *in) {
    const u32 *at = vgpr(w, in->address);
    if (w->taint & w->active) fault(w, UNDEFINED_ADDRESS);
    u8 from[MAX_LANES];
    w->taint = 0;
    for (int l = 0; l < w->lanes; l++) from[l] = (u8)((at[l] + (u32)in->offset) / 4 % (u32)w->lanes);
    take_lanes(w, in, vgpr(w, in->data), from, false, true);
    w->issued[LDS]++;
    w->pending[in->result] = w->issued[LDS] << 2 | LDS;
    w->loader[in->result] = index_of(w);
    in->lanes += (u64)__builtin_popcountll(w->active);
    in->cycles += 2;
}

// A source of a mixed FMA: a float, or either half of a register.
static const float *read_mixed(Wave *w, const Instruction *in, int i, Lanes *room) {
    Instruction one = *in;
    if (in->select_high >> i & 1) {
        u32 n = in->source[i];
        if (n >= 240 && n <= 248) one.constant[i] = to_half(as_float((u32)in->constant[i]));
        return read_F16(w, &one, i, room);
    }
    one.high = 0;
    return read_F32(w, &one, i, room);
}
static void mixed_fma(Wave *w, const Instruction *in, Lanes *d) {
    Lanes ra, rb, rc;
    Instruction source = *in;
    source.absolute = in->negate_high;  // these operations have |x| where packed ones negate the high half
    const float *a = read_mixed(w, &source, 0, &ra), *b = read_mixed(w, &source, 1, &rb), *c = read_mixed(w, &source, 2, &rc);
    for (int l = 0; l < w->lanes; l++) d->f[l] = fmaf(a[l], b[l], c[l]);
}
static void fma_mix(Wave *w, Instruction *in) {
    Lanes d;
    mixed_fma(w, in, &d);
    write_F32(w, in, &d);
}
static void fma_mix_half(Wave *w, Instruction *in, u8 high) {
    Lanes d;
    mixed_fma(w, in, &d);
    Instruction to = *in;
    to.high = high;
    write_F16(w, &to, &d);
}
static void fma_mixlo(Wave *w, Instruction *in) { fma_mix_half(w, in, 0); }
static void fma_mixhi(Wave *w, Instruction *in) { fma_mix_half(w, in, 8); }

// Matmuls of 16 x 16 x 16. A lane holds a row of A and a column of B; each 16 lanes hold the same again. Element
// (m, n) of C and D is in lane n of a group of 16: row m is spread over the groups first, then over registers.
static u32 undefined_rows(Wave *w, u32 r, u32 count) {  // and that each 16 lanes hold the same
    u64 undefined = 0;
    for (u32 i = 0; i < count; i++) {
        const u32 *v = vgpr(w, r + i);
        u64 unwritten = w->undefined[(r + i) % VGPRS];
        undefined |= unwritten;
        for (int l = 16; l < w->lanes; l += 16)
            if (memcmp(v, v + l, 64) && !unwritten) fault(w, NOT_REPLICATED);
    }
    return (u32)(undefined | undefined >> 16 | undefined >> 32 | undefined >> 48) & 0xffff;
}
static void matrix_rows(Wave *w, const Instruction *in, u32 c[16][16]) {
    int groups = w->lanes / 16;
    for (int m = 0; m < 16; m++) {
        u32 n = in->source[2];
        if (n < FIRST_VGPR) {
            u32 x = (u32)scalar_value(w, in, 2, false);
            for (int i = 0; i < 16; i++) c[m][i] = x;
        } else {
            memcpy(c[m], vgpr(w, n - FIRST_VGPR + (u32)(m / groups)) + 16 * (m % groups), 64);
        }
    }
}
static void write_matrix(Wave *w, const Instruction *in, u32 d[16][16], u32 undefined_m, u32 undefined_n) {
    int groups = w->lanes / 16;
    u32 lanes[MAX_LANES];
    for (int r = 0; r < 16 / groups; r++) {
        u64 undefined = in->source[2] >= FIRST_VGPR ? w->undefined[(in->source[2] - FIRST_VGPR + (u32)r) % VGPRS] : 0;
        for (int g = 0; g < groups; g++) {
            int m = r * groups + g;
            memcpy(lanes + 16 * g, d[m], 64);
            undefined |= (u64)(undefined_m >> m & 1 ? 0xffff : undefined_n) << 16 * g;
        }
        w->taint = undefined;
        write_bits(w, in->result + (u32)r, lanes);
    }
}
// c += A B of halves, summed as float. Returns the undefined rows and columns.
static void multiply_add(Wave *w, const Instruction *in, float c[16][16], u32 *undefined_m, u32 *undefined_n) {
    float a[16][16], b[16][16];  // a[k][m], b[k][n]
    u32 ra = in->source[0] - FIRST_VGPR, rb = in->source[1] - FIRST_VGPR;
    *undefined_m = undefined_rows(w, ra, 8), *undefined_n = undefined_rows(w, rb, 8);
    for (u32 k = 0; k < 16; k++) {
        u32 halves[2][16];
        for (int l = 0; l < 16; l++) {
            halves[0][l] = w->v[(ra + k / 2) % VGPRS][l] >> 16 * (k & 1) & 0xffff;
            halves[1][l] = w->v[(rb + k / 2) % VGPRS][l] >> 16 * (k & 1) & 0xffff;
        }
        halves_to_floats(halves[0], a[k], 16);
        halves_to_floats(halves[1], b[k], 16);
    }
    for (int m = 0; m < 16; m++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++) c[m][n] = fmaf(a[k][m], b[k][n], c[m][n]);
}
static void wmma_f32_f16(Wave *w, Instruction *in) {
    u32 c[16][16], undefined_m, undefined_n;
    float sum[16][16];
    matrix_rows(w, in, c);
    memcpy(sum, c, sizeof sum);
    multiply_add(w, in, sum, &undefined_m, &undefined_n);
    memcpy(c, sum, sizeof sum);
    write_matrix(w, in, c, undefined_m, undefined_n);
}
// C and D have an element in the low or high half of each dword; the other half of D stays.
static void wmma_f16_f16(Wave *w, Instruction *in) {
    u32 c[16][16], d[16][16], undefined_m, undefined_n, shift = in->high & 4 ? 16 : 0;
    float sum[16][16];
    Instruction old = *in;
    old.source[2] = (u16)(FIRST_VGPR + in->result);
    matrix_rows(w, &old, d);
    w->taint = 0;
    matrix_rows(w, in, c);
    for (int m = 0; m < 16; m++) {
        for (int n = 0; n < 16; n++) c[m][n] = c[m][n] >> (in->source[2] < FIRST_VGPR ? 0 : shift) & 0xffff;
        halves_to_floats(c[m], sum[m], 16);
    }
    multiply_add(w, in, sum, &undefined_m, &undefined_n);
    for (int m = 0; m < 16; m++) {
        floats_to_halves(sum[m], c[m], 16);
        for (int n = 0; n < 16; n++) c[m][n] = (d[m][n] & 0xffff0000u >> shift) | c[m][n] << shift;
    }
    write_matrix(w, in, c, undefined_m, undefined_n);
}
static void wmma_i32_iu8(Wave *w, Instruction *in) {
    u32 c[16][16];
    u32 ra = in->source[0] - FIRST_VGPR, rb = in->source[1] - FIRST_VGPR;
    u32 undefined_m = undefined_rows(w, ra, 4), undefined_n = undefined_rows(w, rb, 4);
    matrix_rows(w, in, c);
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++)
            for (u32 k = 0; k < 4; k++) {
                u32 a = w->v[(ra + k) % VGPRS][m], b = w->v[(rb + k) % VGPRS][n];
                c[m][n] = dot4(a, b, c[m][n], in->negate);
            }
    write_matrix(w, in, c, undefined_m, undefined_n);
}

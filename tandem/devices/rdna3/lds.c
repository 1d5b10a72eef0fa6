// LDS: memory of a workgroup.
#include <string.h>

#include "access.h"

// LDS has 32 banks of a dword. It serves as many lanes at once as make 128 bytes, and more slowly by as many different
// dwords as they want of one bank.
static void count_bank_cycles(Instruction *in, const u32 *addresses, u64 active, int lanes, u32 bytes) {
    int together = bytes <= 4 ? 32 : bytes <= 8 ? 16 : 8;
    for (int first = 0; first < lanes; first += together) {
        u32 wanted[32][32], count[32] = {0}, most = 0;
        for (int l = first; l < first + together; l++)
            for (u32 d = 0; active >> l & 1 && d < (bytes + 3) / 4; d++) {
                u32 dword = addresses[l] / 4 + d, bank = dword % 32, i = 0;
                while (i < count[bank] && wanted[bank][i] != dword) i++;
                if (i == count[bank]) wanted[bank][count[bank]++] = dword;
                if (count[bank] > most) most = count[bank];
            }
        in->cycles += most;
    }
}

// LDS remembers who reads. A buffer does not: that a workgroup reads what another writes later is seen when a seed has them
// the other way round, and it may read what it does not use.
static void note_lds_read(Wave *w, Shadow *cells, u32 at, u32 bytes, Access mine, u32 lane) {
    for (u32 dword = at / 4; dword <= (at + bytes - 1) / 4; dword++) {
        Access *write = &cells[dword].write, *last = &cells[dword].read;
        mine.bytes = bytes_in(at, bytes, dword);
        if (clashes(w, write, &mine)) conflict(w, write, lane, at);
        if (last->bytes && last->wave != mine.wave && !ordered(w, last))
            mine.wave = SEVERAL, mine.sequence = w->group->barriers, mine.bytes |= last->bytes;
        *last = mine;
    }
}

static void lds_addresses(Wave *w, const Instruction *in, u32 *to) {
    w->taint = 0;
    memcpy(to, vgpr(w, in->address), MAX_LANES * sizeof *to);
    if (w->taint & w->active) fault(w, UNDEFINED_ADDRESS);
    w->taint = 0;
}
static bool lds_inside(Wave *w, u32 at, u32 bytes, u32 lane) {
    if ((u64)at + bytes <= w->group->launch->lds_bytes) return true;
    Fault *f = fault(w, LDS_OUTSIDE);
    f->address = at;
    f->bytes = bytes;
    f->lane = lane;
    return false;
}
static void load_from_lds(Wave *w, Instruction *in, const u32 *base, u32 offset, u32 result, u32 sequence) {
    u32 at[MAX_LANES], bytes = in->op->bytes, count = registers_of(bytes);
    Group *g = w->group;
    for (int l = 0; l < w->lanes; l++) at[l] = base[l] + offset;
    u64 undefined[4] = {0};
    i32 origin = -1;
    Access mine = access_by(w, LDS, sequence, false);
    for (u64 left = w->active; left; left &= left - 1) {
        u32 l = (u32)__builtin_ctzll(left), x[4] = {0};
        if (!lds_inside(w, at[l], bytes, l)) return;
        note_lds_read(w, g->lds_shadow, at[l], bytes, mine, l);
        for (u32 d = at[l] / 4; d <= (at[l] + bytes - 1) / 4; d++)
            if (bytes_in(at[l], bytes, d) & ~g->lds_defined[d]) {
                undefined[LEAST(d - at[l] / 4, count - 1)] |= 1ull << l;
                origin = g->lds_origin[d] >= 0 ? g->lds_origin[d] : index_of(w);
            }
        memcpy(x, g->lds + at[l], bytes);
        fill(w, in->op, result, l, x);
    }
    for (u32 i = 0; i < count; i++) {
        u32 to = (result + i) % VGPRS;
        w->undefined[to] = (w->undefined[to] & ~w->active) | undefined[i];
        if (undefined[i]) w->origin[to] = origin;
    }
    if (g->launch->counting) count_bank_cycles(in, at, w->active, w->lanes, bytes);
}
void lds_load(Wave *w, Instruction *in) {
    u32 base[MAX_LANES], sequence = issue(w, LDS);
    lds_addresses(w, in, base);
    if (w->fault.kind) return;
    expect(w, in->result, registers_of(in->op->bytes), LDS, sequence);
    load_from_lds(w, in, base, (u32)in->offset, in->result, sequence);
    in->lanes += (u64)__builtin_popcountll(w->active);
}
void lds_load_pair(Wave *w, Instruction *in) {
    u32 base[MAX_LANES], sequence = issue(w, LDS), count = registers_of(in->op->bytes), unit = in->op->bytes * in->op->part;
    lds_addresses(w, in, base);
    if (w->fault.kind) return;
    expect(w, in->result, 2 * count, LDS, sequence);
    load_from_lds(w, in, base, (in->offset & 255) * unit, in->result, sequence);
    load_from_lds(w, in, base, in->offset1 * unit, in->result + count, sequence);
    in->lanes += (u64)__builtin_popcountll(w->active);
}

static void store_to_lds(Wave *w, Instruction *in, u32 offset, u32 data, u32 sequence) {
    u32 at[MAX_LANES], bytes = in->op->bytes, count = registers_of(bytes);
    const u32 *from[4];
    u64 undefined[4];
    Group *g = w->group;
    lds_addresses(w, in, at);
    take(w, data, count, from);
    if (w->fault.kind) return;
    for (int l = 0; l < w->lanes; l++) at[l] += offset;
    for (u32 i = 0; i < count; i++) undefined[i] = w->undefined[(data + i) % VGPRS];
    Access mine = access_by(w, LDS, sequence, false);
    for (u64 left = w->active; left; left &= left - 1) {
        u32 l = (u32)__builtin_ctzll(left), x[4];
        if (!lds_inside(w, at[l], bytes, l)) return;
        note_write(w, g->lds_shadow, at[l], bytes, mine, l, at[l]);
        for (u32 d = at[l] / 4; d <= (at[l] + bytes - 1) / 4; d++) {
            u8 part = bytes_in(at[l], bytes, d);
            u32 i = LEAST(d - at[l] / 4, count - 1);
            g->lds_origin[d] = undefined[i] >> l & 1 ? w->origin[(data + i) % VGPRS] : -1;
            g->lds_defined[d] = undefined[i] >> l & 1 ? g->lds_defined[d] & ~part : g->lds_defined[d] | part;
        }
        for (u32 i = 0; i < count; i++) x[i] = in->op->part == 1 && bytes < 4 ? from[i][l] >> 16 : from[i][l];
        memcpy(g->lds + at[l], x, bytes);
    }
    if (g->launch->counting) count_bank_cycles(in, at, w->active, w->lanes, bytes);
}
void lds_store(Wave *w, Instruction *in) {
    store_to_lds(w, in, (u32)in->offset, in->data, issue(w, LDS));
    in->lanes += (u64)__builtin_popcountll(w->active);
}
void lds_store_pair(Wave *w, Instruction *in) {
    u32 sequence = issue(w, LDS), unit = in->op->bytes * in->op->part;
    store_to_lds(w, in, (in->offset & 255) * unit, in->data, sequence);
    store_to_lds(w, in, in->offset1 * unit, in->data1, sequence);
    in->lanes += (u64)__builtin_popcountll(w->active);
}

static u32 update_lds(Wave *w, u32 at, u32 given, Update *update, u32 sequence, u32 lane) {
    Group *g = w->group;
    u32 old, new;
    note_write(w, g->lds_shadow, at, 4, access_by(w, LDS, sequence, true), lane, at);
    if (g->lds_defined[at / 4] != 15) fault(w, UNDEFINED_STORE)->lane = lane;
    memcpy(&old, g->lds + at, 4);
    new = (u32)update(old, given);
    memcpy(g->lds + at, &new, 4);
    return old;
}
void lds_atomic(Wave *w, Instruction *in, Update *update, bool returns) {
    u32 at[MAX_LANES], given[MAX_LANES], sequence = issue(w, LDS);
    const u32 *from[4];
    lds_addresses(w, in, at);
    take(w, in->data, 1, from);
    if (w->taint & w->active) fault(w, UNDEFINED_STORE);
    if (w->fault.kind) return;
    for (int l = 0; l < w->lanes; l++) at[l] += (u32)in->offset;
    memcpy(given, from[0], sizeof given);
    if (returns) expect(w, in->result, 1, LDS, sequence), define(w, in->result, 1, w->active, 0);
    for (u64 left = w->active; left; left &= left - 1) {
        u32 l = (u32)__builtin_ctzll(left);
        if (!lds_inside(w, at[l], 4, l)) return;
        u32 old = update_lds(w, at[l], given[l], update, sequence, l);
        if (returns) w->v[in->result][l] = old;
    }
    if (w->group->launch->counting) count_bank_cycles(in, at, w->active, w->lanes, 4);
    in->lanes += (u64)__builtin_popcountll(w->active);
}
static u64 add(u64 old, u64 given) { return old + given; }
void lds_append(Wave *w, Instruction *in) {
    u32 sequence = issue(w, LDS), at = (u32)in->offset;  // M0's base is 0: gfx11 has no other use of it here
    if (!lds_inside(w, at, 4, 0)) return;
    u32 old = update_lds(w, at, (u32)__builtin_popcountll(w->active), add, sequence, 0);
    expect(w, in->result, 1, LDS, sequence);
    for (int l = 0; l < w->lanes; l++)
        if (w->active >> l & 1) w->v[in->result][l] = old;
    define(w, in->result, 1, w->active, 0);
    in->lanes += (u64)__builtin_popcountll(w->active);
    in->cycles++;
}

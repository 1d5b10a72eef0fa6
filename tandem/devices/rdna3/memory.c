// Memory as a wave sees it: bounds, waits, and who may see whose writes.
#include <stdlib.h>
#include <string.h>

#include "wave.h"

#define LEAST(a, b) ((a) < (b) ? (a) : (b))

Fault *fault(Wave *w, FaultKind kind) {
    static Fault ignored;  // only the first is reported
    if (w->fault.kind) return &ignored;
    w->fault = (Fault){.kind = kind, .instruction = index_of(w), .other = w->taint_origin, .group = w->group->index,
                       .wave = w->index};
    bool undefined = kind >= UNDEFINED_ADDRESS && kind <= UNDEFINED_EXEC;
    if (undefined && w->raced.kind && w->raced.instruction == w->taint_origin) w->fault = w->raced;
    if (undefined && w->taint_origin >= 0) w->fault.address = w->group->launch->code[w->taint_origin].outside;
    if (kind == READ_OUTSIDE || kind == WRITE_OUTSIDE || kind == LDS_OUTSIDE || kind == NOT_REPLICATED) w->fault.other = -1;
    return &w->fault;
}

void fault_pending(Wave *w, u32 pending, i32 loader) {
    Fault *f = fault(w, NOT_WAITED);
    f->other = loader;
    f->bytes = pending & 3;
}

// ---- waits

void wait_for(Wave *w, Counter counter, u32 left) {
    u32 done = w->issued[counter] > left ? w->issued[counter] - left : 0;
    if (done > w->done[counter]) w->done[counter] = done;
    if (counter == LDS && !left) w->done[SCALAR] = w->issued[SCALAR];  // out of order: only all of them are known
}

static u32 issue(Wave *w, Counter counter) { return ++w->issued[counter]; }

// A load will fill registers; loads of one kind answer in order, so one may follow another into the same register.
static void expect(Wave *w, u32 r, u32 count, Counter counter, u32 sequence) {
    for (u32 i = 0; i < count; i++) {
        u32 to = (r + i) % VGPRS;
        if (w->pending[to] && (w->pending[to] & 3) != counter) settle(w, to);
        w->pending[to] = sequence << 2 | counter;
        w->loader[to] = index_of(w);
    }
}

// ---- order: who may see whose access

// Whether an atomic of a's group after `a` is followed by one of this group on the same address: then `a` is ordered before
// what follows. Returns the number of atomics up to that one; 0: no.
static u32 acquired(const Launch *launch, const Access *a, u32 group) {
    for (u32 i = 0; i < launch->release_count; i++) {
        const Release *r = launch->releases + i;
        if (r->group != a->group || a->sequence > r->released[a->wave][a->counter]) continue;
        for (u32 j = i + 1; j < launch->release_count; j++)
            if (launch->releases[j].group == group && launch->releases[j].address == r->address) return j + 1;
    }
    return 0;
}

enum { SEVERAL = 255 };  // waves of a group, or groups, have read a dword: `sequence` is then the group's barriers

static bool ordered(const Wave *w, const Access *a) {
    const Group *g = w->group;
    if (a->group != g->index) return a->wave != SEVERAL && acquired(g->launch, a, g->index);
    if (a->wave == SEVERAL) return g->barriers > a->sequence;
    return a->wave == w->index || a->sequence <= g->released[a->wave][a->counter];
}

static Fault race(const Wave *w, const Access *a, u32 lane, u64 address) {
    return (Fault){.kind = RACE, .instruction = index_of(w), .other = a->instruction, .group = w->group->index,
                   .wave = w->index, .lane = lane, .other_group = a->group, .other_wave = a->wave, .address = address,
                   .bytes = 4};
}
static void conflict(Wave *w, const Access *a, u32 lane, u64 address) {
    if (!w->fault.kind) w->fault = race(w, a, lane, address);
}

static u8 bytes_in(u64 at, u32 bytes, u64 dword) {  // of a dword, as bits
    u64 from = at > 4 * dword ? at : 4 * dword, to = LEAST(at + bytes, 4 * dword + 4);
    return (u8)(((1u << (to - from)) - 1) << (from & 3));
}

static bool clashes(const Wave *w, const Access *a, const Access *mine) {
    return a->bytes & mine->bytes && !(a->atomic && mine->atomic) && !ordered(w, a);
}

static void note_write(Wave *w, Shadow *cells, u64 at, u32 bytes, Access mine, u32 lane, u64 address) {
    for (u64 dword = at / 4; dword <= (at + bytes - 1) / 4; dword++) {
        Access *write = &cells[dword].write, *read = &cells[dword].read;
        mine.bytes = bytes_in(at, bytes, dword);
        if (clashes(w, write, &mine)) conflict(w, write, lane, address);
        if (clashes(w, read, &mine)) conflict(w, read, lane, address);
        if (write->group == mine.group && write->wave == mine.wave) mine.bytes |= write->bytes;
        *write = mine;
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

// What another workgroup wrote is in L2. A cache line that was loaded before hides it, unless the load passes the cache by
// (GLC) or the wave has emptied it since.
static bool may_be_stale(const Wave *w, const Access *a) {
    return a->group != w->group->index && !w->current->glc && acquired(w->group->launch, a, w->group->index) > w->invalidated;
}

// Whether a lane reads what another wave is writing: it gets the one or the other.
static bool reads_in_flight(Wave *w, const Shadow *cells, u64 at, u32 bytes, Access mine, u32 lane, u64 address) {
    for (u64 dword = at / 4; dword <= (at + bytes - 1) / 4; dword++) {
        mine.bytes = bytes_in(at, bytes, dword);
        const Access *write = &cells[dword].write;
        if (!(write->bytes & mine.bytes)) continue;
        if (clashes(w, write, &mine)) {
            w->raced = race(w, write, lane, address);
            return true;
        }
        if (may_be_stale(w, write) && !w->fault.kind) {
            w->fault = race(w, write, lane, address);
            w->fault.kind = STALE;
        }
    }
    return false;
}

static Access access_by(const Wave *w, Counter counter, u32 sequence, bool atomic) {
    return (Access){.group = w->group->index, .sequence = sequence, .instruction = (u16)index_of(w), .wave = (u8)w->index,
                    .counter = (u8)counter, .atomic = atomic};
}

// ---- counting

static void count_segments(Instruction *in, const u64 *addresses, u64 active, u32 bytes) {
    u64 seen[256];
    u32 used = 0;
    for (u64 left = active; left; left &= left - 1) {
        u64 a = addresses[__builtin_ctzll(left)];
        for (u64 s = a >> 6; s <= (a + bytes - 1) >> 6; s++) {
            u32 i = used;
            while (i && seen[i - 1] != s) i--;
            if (!i) seen[used++] = s;
        }
    }
    in->segments += used;
}

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

// ---- buffers

static Region *find(Launch *launch, u64 address, u32 bytes, bool write) {
    for (i32 access = WRITABLE; access >= (write ? WRITABLE : OUTSIDE); access--)
        for (u32 i = 0; i < launch->region_count; i++) {
            Region *r = launch->regions + i;
            if (r->access == access && address - r->address < r->bytes && address - r->address + bytes <= r->bytes) return r;
        }
    return NULL;
}

static u8 *locate(Wave *w, Region **last, u64 address, u32 bytes, bool write, u32 lane) {
    Region *r = *last;
    if (!r || r->access == OUTSIDE || address - r->address >= r->bytes || address - r->address + bytes > r->bytes) {
        r = *last = find(w->group->launch, address, bytes, write);
        if (!r) {
            Fault *f = fault(w, write ? WRITE_OUTSIDE : READ_OUTSIDE);
            f->address = address;
            f->bytes = bytes;
            f->lane = lane;
            return NULL;
        }
    }
    return r->host + (address - r->address);
}

// The address of each lane: a scalar base and 32 bits a lane, or 64 bits a lane.
static void addresses_of(Wave *w, const Instruction *in, u64 *to) {
    w->taint = 0;
    const u32 *low = vgpr(w, in->address);
    if (in->base == NULL_SGPR) {
        const u32 *high = vgpr(w, in->address + 1u);
        for (int l = 0; l < w->lanes; l++) to[l] = (low[l] | (u64)high[l] << 32) + (u64)(i64)in->offset;
    } else {
        u64 base = sgpr_pair(w, in->base) + (u64)(i64)in->offset;
        for (int l = 0; l < w->lanes; l++) to[l] = base + low[l];
    }
    if (w->taint & w->active) fault(w, UNDEFINED_ADDRESS);
    w->taint = 0;
}

static u32 registers_of(u32 bytes) { return (bytes + 3) / 4; }

// What was loaded, extended or put into a half of the register.
static u32 loaded(const Operation *op, u32 old, u32 x) {
    if (op->bytes == 1 && (op->result == I32 || op->result == I16)) x = (u32)(i32)(i8)x;
    if (op->bytes == 2 && op->result == I32) x = (u32)(i32)(i16)x;
    if (op->result == U16 || op->result == I16) x = op->part ? (old & 0xffff) | x << 16 : (old & 0xffff0000) | (x & 0xffff);
    return x;
}

static void fill(Wave *w, const Operation *op, u32 r, u32 lane, const u32 *x) {
    for (u32 i = 0; i < registers_of(op->bytes); i++) {
        u32 *to = &w->v[(r + i) % VGPRS][lane];
        *to = op->bytes < 4 ? loaded(op, *to, x[i]) : x[i];
    }
}

// Whether what is read at an address is not the launch's, or another wave is writing it.
static bool unreliable(Wave *w, Instruction *in, const Region *r, u64 address, Access mine, u32 lane) {
    if (r->access == OUTSIDE) in->outside = address;
    if (r->access == OUTSIDE || !r->shadow) return r->access == OUTSIDE;
    return reads_in_flight(w, r->shadow, address - r->address, in->op->bytes, mine, lane, address);
}

static void define(Wave *w, u32 r, u32 count, u64 lanes, u64 undefined) {
    for (u32 i = r; i < r + count; i++) {
        w->undefined[i % VGPRS] = (w->undefined[i % VGPRS] & ~lanes) | undefined;
        if (undefined) w->origin[i % VGPRS] = index_of(w);
    }
}

void global_load(Wave *w, Instruction *in) {
    u64 at[MAX_LANES];
    u32 bytes = in->op->bytes, count = registers_of(bytes), sequence = issue(w, VM);
    addresses_of(w, in, at);
    if (w->fault.kind) return;
    expect(w, in->result, count, VM, sequence);
    Access mine = access_by(w, VM, sequence, false);
    Region *last = NULL;
    u64 undefined = 0;
    for (u64 left = w->active; left; left &= left - 1) {
        u32 l = (u32)__builtin_ctzll(left), x[4] = {0};
        u8 *from = locate(w, &last, at[l], bytes, false, l);
        if (!from) return;
        undefined |= (u64)unreliable(w, in, last, at[l], mine, l) << l;
        memcpy(x, from, bytes);
        fill(w, in->op, in->result, l, x);
    }
    define(w, in->result, count, w->active, undefined);
    if (w->group->launch->counting) count_segments(in, at, w->active, bytes);
    in->lanes += (u64)__builtin_popcountll(w->active);
}

static void take(Wave *w, u32 data, u32 count, const u32 *from[4]) {
    w->taint = 0;
    for (u32 i = 0; i < count; i++) from[i] = vgpr(w, data + i);
}

void global_store(Wave *w, Instruction *in) {
    u64 at[MAX_LANES];
    const u32 *from[4];
    u32 bytes = in->op->bytes, count = registers_of(bytes), sequence = issue(w, VS);
    addresses_of(w, in, at);
    take(w, in->data, count, from);
    if (w->taint & w->active) fault(w, UNDEFINED_STORE)->lane = (u32)__builtin_ctzll(w->taint & w->active);
    if (w->fault.kind) return;
    Access mine = access_by(w, VS, sequence, false);
    Region *last = NULL;
    for (u64 left = w->active; left; left &= left - 1) {
        u32 l = (u32)__builtin_ctzll(left), x[4];
        u8 *to = locate(w, &last, at[l], bytes, true, l);
        if (!to) return;
        note_write(w, last->shadow, at[l] - last->address, bytes, mine, l, at[l]);
        for (u32 i = 0; i < count; i++) x[i] = in->op->part ? from[i][l] >> 16 : from[i][l];
        memcpy(to, x, bytes);
    }
    if (w->group->launch->counting) count_segments(in, at, w->active, bytes);
    in->lanes += (u64)__builtin_popcountll(w->active);
}

static void release(Wave *w, u64 address) {
    Launch *launch = w->group->launch;
    if (launch->release_count == launch->release_room) {
        launch->release_room = launch->release_room ? 2 * launch->release_room : 64;
        launch->releases = realloc(launch->releases, launch->release_room * sizeof *launch->releases);
    }
    Release *r = launch->releases + launch->release_count++;
    r->address = address;
    r->group = w->group->index;
    memcpy(r->released, w->group->released, sizeof r->released);
    memcpy(r->released[w->index], w->done, sizeof w->done);
    r->released[w->index][VM] = w->issued[VM];  // an atomic orders itself
}

void global_atomic(Wave *w, Instruction *in, Update *update) {
    u64 at[MAX_LANES];
    const u32 *from[4];
    Counter counter = in->glc ? VM : VS;
    u32 sequence = issue(w, counter);
    addresses_of(w, in, at);
    take(w, in->data, 1, from);
    if (w->taint & w->active) fault(w, UNDEFINED_STORE);
    if (w->fault.kind) return;
    u32 given[MAX_LANES];
    memcpy(given, from[0], sizeof given);
    if (in->glc) expect(w, in->result, 1, VM, sequence);
    Access mine = access_by(w, counter, sequence, true);
    Region *last = NULL;
    for (u64 left = w->active; left; left &= left - 1) {
        u32 l = (u32)__builtin_ctzll(left), old, new;
        u8 *to = locate(w, &last, at[l], 4, true, l);
        if (!to) return;
        release(w, at[l]);
        note_write(w, last->shadow, at[l] - last->address, 4, mine, l, at[l]);
        memcpy(&old, to, 4);
        new = (u32)update(old, given[l]);
        memcpy(to, &new, 4);
        if (in->glc) w->v[in->result][l] = old;
    }
    if (in->glc) define(w, in->result, 1, w->active, 0);
    if (w->group->launch->counting) count_segments(in, at, w->active, 4);
    in->lanes += (u64)__builtin_popcountll(w->active);
}

void scalar_load(Wave *w, Instruction *in) {
    u64 address = sgpr_pair(w, in->base) + (u64)(i64)in->offset + sgpr(w, in->address);
    u32 sequence = issue(w, SCALAR), bytes = in->op->bytes;
    if (w->taint) fault(w, UNDEFINED_ADDRESS);
    if (address & 3) fault(w, MISALIGNED)->address = address;
    Region *last = NULL;
    u8 *from = locate(w, &last, address, bytes, false, 0);
    if (!from) return;
    Access mine = access_by(w, SCALAR, sequence, false);
    bool unknown = unreliable(w, in, last, address, mine, 0);
    for (u32 i = 0; i < bytes / 4; i++) {
        u32 r = (in->result + i) % SGPRS;
        settle_s(w, r);
        memcpy(&w->s[r], from + 4 * i, 4);
        w->undefined_s[r] = unknown ? ~0u : 0;
        w->origin_s[r] = index_of(w);
        w->pending_s[r] = sequence << 2 | SCALAR;
        w->loader_s[r] = index_of(w);
    }
    in->lanes++;
    in->segments += ((address + bytes - 1) >> 6) - (address >> 6) + 1;
}

// ---- scratch: bytes of a lane's own

static u8 *scratch_at(Wave *w, const Instruction *in, u32 lane, u32 bytes) {
    Launch *launch = w->group->launch;
    u32 at = (u32)in->offset + (in->base == NULL_SGPR ? 0 : w->s[in->base]) + (in->sve ? w->v[in->address][lane] : 0);
    if (at + (u64)bytes > launch->scratch_bytes) {
        Fault *f = fault(w, READ_OUTSIDE);
        f->address = at;
        f->bytes = bytes;
        return NULL;
    }
    return w->scratch + (size_t)lane * launch->scratch_bytes + at;
}
void scratch_load(Wave *w, Instruction *in) {
    u32 bytes = in->op->bytes, count = registers_of(bytes);
    vgpr(w, in->address);
    expect(w, in->result, count, VM, issue(w, VM));
    for (u64 left = w->active; left; left &= left - 1) {
        u32 l = (u32)__builtin_ctzll(left), x[4] = {0};
        u8 *from = scratch_at(w, in, l, bytes);
        if (!from) return;
        memcpy(x, from, bytes);
        fill(w, in->op, in->result, l, x);
    }
    define(w, in->result, count, w->active, 0);
    in->lanes += (u64)__builtin_popcountll(w->active);
}
void scratch_store(Wave *w, Instruction *in) {
    const u32 *from[4];
    u32 bytes = in->op->bytes, count = registers_of(bytes);
    issue(w, VS);
    take(w, in->data, count, from);
    for (u64 left = w->active; left; left &= left - 1) {
        u32 l = (u32)__builtin_ctzll(left), x[4];
        u8 *to = scratch_at(w, in, l, bytes);
        if (!to) return;
        for (u32 i = 0; i < count; i++) x[i] = in->op->part ? from[i][l] >> 16 : from[i][l];
        memcpy(to, x, bytes);
    }
    in->lanes += (u64)__builtin_popcountll(w->active);
}

// ---- LDS

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

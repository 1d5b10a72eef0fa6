// Memory as a wave sees it: bounds, waits, and who may see whose writes.
#include <stdlib.h>
#include <string.h>

#include "access.h"

enum { RAW_BUFFER = 3 };  // the last bits of a descriptor: see there

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

// ---- buffers

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

// What the lanes access.
typedef struct {
    u64 at[MAX_LANES];
    u32 bytes[MAX_LANES];  // less than the operation's where a descriptor's buffer ends: what is beyond reads as 0 and is not written
    u64 lanes;             // those with any bytes
} Accesses;

// An address of 64 bits a lane, or a scalar base and 32 bits a lane.
static void global_addresses(Wave *w, const Instruction *in, Accesses *to) {
    const u32 *low = vgpr(w, in->address);
    if (in->base == NULL_SGPR) {
        const u32 *high = vgpr(w, in->address + 1u);
        for (int l = 0; l < w->lanes; l++) to->at[l] = (low[l] | (u64)high[l] << 32) + (u64)(i64)in->offset;
    } else {
        u64 base = sgpr_pair(w, in->base) + (u64)(i64)in->offset;
        for (int l = 0; l < w->lanes; l++) to->at[l] = base + low[l];
    }
    for (int l = 0; l < w->lanes; l++) to->bytes[l] = in->op->bytes;
    to->lanes = w->active;
}

// A descriptor in four scalar registers (V#): where a buffer begins and how many bytes it has. Of the guide's kinds it must be
// "raw": no stride, nothing swizzled, and bounds checked for each dword.
typedef struct {
    u64 base;
    u32 bytes;
} Descriptor;

static Descriptor descriptor_at(Wave *w, u32 r) {
    u32 high = sgpr(w, r + 1), kind = sgpr(w, r + 3);
    if (high >> 16 || kind >> 28 != RAW_BUFFER) fault(w, BAD_INSTRUCTION);
    return (Descriptor){sgpr(w, r) | (u64)high << 32, sgpr(w, r + 2)};
}
static u32 bytes_inside(Descriptor d, u64 offset, u32 wanted) {
    u64 left = offset < d.bytes ? d.bytes - offset : 0;
    return left >= wanted ? wanted : wanted > 4 ? (u32)left & ~3u : 0;
}

// A descriptor, an offset of 32 bits a lane and a scalar one.
static void buffer_addresses(Wave *w, const Instruction *in, Accesses *to) {
    Descriptor buffer = descriptor_at(w, in->base);
    u64 offset = (u64)in->offset + (in->scalar_offset < SGPRS ? sgpr(w, in->scalar_offset) : 0);
    static const u32 NOTHING[MAX_LANES];
    const u32 *own = in->sve ? vgpr(w, in->address) : NOTHING;
    to->lanes = 0;
    for (int l = 0; l < w->lanes; l++) {
        to->at[l] = buffer.base + offset + own[l];
        to->bytes[l] = bytes_inside(buffer, offset + own[l], in->op->bytes);
        if (to->bytes[l]) to->lanes |= w->active & 1ull << l;
    }
}

static void accesses_of(Wave *w, const Instruction *in, Accesses *to) {
    w->taint = 0;
    if (in->op->encoding == MUBUF) buffer_addresses(w, in, to);
    else global_addresses(w, in, to);
    if (w->taint & w->active) fault(w, UNDEFINED_ADDRESS);
    w->taint = 0;
}

// Whether what is read at an address is not the launch's, or another wave is writing it.
static bool unreliable(Wave *w, Instruction *in, const Region *r, u64 address, u32 bytes, Access mine, u32 lane) {
    if (r->access == OUTSIDE) in->outside = address;
    if (r->access == OUTSIDE || !r->shadow) return r->access == OUTSIDE;
    return reads_in_flight(w, r->shadow, address - r->address, bytes, mine, lane, address);
}

void global_load(Wave *w, Instruction *in) {
    Accesses lane;
    u32 count = registers_of(in->op->bytes), sequence = issue(w, VM);
    accesses_of(w, in, &lane);
    if (w->fault.kind) return;
    expect(w, in->result, count, VM, sequence);
    Access mine = access_by(w, VM, sequence, false);
    Region *last = NULL;
    u64 undefined = 0;
    for (u64 left = w->active; left; left &= left - 1) {
        u32 l = (u32)__builtin_ctzll(left), x[4] = {0};
        if (lane.bytes[l]) {
            u8 *from = locate(w, &last, lane.at[l], lane.bytes[l], false, l);
            if (!from) return;
            undefined |= (u64)unreliable(w, in, last, lane.at[l], lane.bytes[l], mine, l) << l;
            memcpy(x, from, lane.bytes[l]);
        }
        fill(w, in->op, in->result, l, x);
    }
    define(w, in->result, count, w->active, undefined);
    if (w->group->launch->counting) count_segments(in, lane.at, lane.lanes, in->op->bytes);
    in->lanes += (u64)__builtin_popcountll(w->active);
}

void global_store(Wave *w, Instruction *in) {
    Accesses lane;
    const u32 *from[4];
    u32 count = registers_of(in->op->bytes), sequence = issue(w, VS);
    accesses_of(w, in, &lane);
    take(w, in->data, count, from);
    if (w->taint & w->active) fault(w, UNDEFINED_STORE)->lane = (u32)__builtin_ctzll(w->taint & w->active);
    if (w->fault.kind) return;
    Access mine = access_by(w, VS, sequence, false);
    Region *last = NULL;
    for (u64 left = lane.lanes; left; left &= left - 1) {
        u32 l = (u32)__builtin_ctzll(left), x[4];
        u8 *to = locate(w, &last, lane.at[l], lane.bytes[l], true, l);
        if (!to) return;
        note_write(w, last->shadow, lane.at[l] - last->address, lane.bytes[l], mine, l, lane.at[l]);
        for (u32 i = 0; i < count; i++) x[i] = in->op->part ? from[i][l] >> 16 : from[i][l];
        memcpy(to, x, lane.bytes[l]);
    }
    if (w->group->launch->counting) count_segments(in, lane.at, lane.lanes, in->op->bytes);
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
    Accesses lane;
    const u32 *from[4];
    Counter counter = in->glc ? VM : VS;
    u32 sequence = issue(w, counter);
    accesses_of(w, in, &lane);
    take(w, in->data, 1, from);
    if (w->taint & w->active) fault(w, UNDEFINED_STORE);
    if (w->fault.kind) return;
    u32 given[MAX_LANES];
    memcpy(given, from[0], sizeof given);
    if (in->glc) expect(w, in->result, 1, VM, sequence);
    Access mine = access_by(w, counter, sequence, true);
    Region *last = NULL;
    for (u64 left = w->active; left; left &= left - 1) {
        u32 l = (u32)__builtin_ctzll(left), old = 0, new;
        if (lane.bytes[l]) {
            u8 *to = locate(w, &last, lane.at[l], 4, true, l);
            if (!to) return;
            release(w, lane.at[l]);
            note_write(w, last->shadow, lane.at[l] - last->address, 4, mine, l, lane.at[l]);
            memcpy(&old, to, 4);
            new = (u32)update(old, given[l]);
            memcpy(to, &new, 4);
        }
        if (in->glc) w->v[in->result][l] = old;
    }
    if (in->glc) define(w, in->result, 1, w->active, 0);
    if (w->group->launch->counting) count_segments(in, lane.at, lane.lanes, 4);
    in->lanes += (u64)__builtin_popcountll(w->active);
}

// `there`: how many of the bytes a descriptor's buffer has; the others read as 0.
static void load_scalars(Wave *w, Instruction *in, u64 address, u32 there) {
    u32 sequence = issue(w, SCALAR), bytes = in->op->bytes, x[16] = {0};
    if (w->taint) fault(w, UNDEFINED_ADDRESS);
    if (address & 3) fault(w, MISALIGNED)->address = address;
    bool unknown = false;
    if (there) {
        Region *last = NULL;
        u8 *from = locate(w, &last, address, there, false, 0);
        if (!from) return;
        unknown = unreliable(w, in, last, address, there, access_by(w, SCALAR, sequence, false), 0);
        memcpy(x, from, there);
    }
    for (u32 i = 0; i < bytes / 4; i++) {
        u32 r = (in->result + i) % SGPRS;
        settle_s(w, r);
        w->s[r] = x[i];
        w->undefined_s[r] = unknown ? ~0u : 0;
        w->origin_s[r] = index_of(w);
        w->pending_s[r] = sequence << 2 | SCALAR;
        w->loader_s[r] = index_of(w);
    }
    in->lanes++;
    in->segments += ((address + bytes - 1) >> 6) - (address >> 6) + 1;
}
void scalar_load(Wave *w, Instruction *in) {
    load_scalars(w, in, sgpr_pair(w, in->base) + (u64)(i64)in->offset + sgpr(w, in->address), in->op->bytes);
}
void scalar_buffer_load(Wave *w, Instruction *in) {
    Descriptor buffer = descriptor_at(w, in->base);
    u64 offset = (u64)(i64)in->offset + sgpr(w, in->address);
    load_scalars(w, in, buffer.base + offset, bytes_inside(buffer, offset, in->op->bytes));
}

// ---- scratch: bytes of a lane's own. Those of a wave's lanes lie side by side, a dword each.

static void count_scratch(const Wave *w, Instruction *in) {
    u64 lanes = (u64)__builtin_popcountll(w->active);
    in->lanes += lanes;
    in->segments += (4 * lanes + 63) / 64 * registers_of(in->op->bytes);
}

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
    if (in->sve) vgpr(w, in->address);
    expect(w, in->result, count, VM, issue(w, VM));
    for (u64 left = w->active; left; left &= left - 1) {
        u32 l = (u32)__builtin_ctzll(left), x[4] = {0};
        u8 *from = scratch_at(w, in, l, bytes);
        if (!from) return;
        memcpy(x, from, bytes);
        fill(w, in->op, in->result, l, x);
    }
    define(w, in->result, count, w->active, 0);
    count_scratch(w, in);
}
void scratch_store(Wave *w, Instruction *in) {
    const u32 *from[4];
    u32 bytes = in->op->bytes, count = registers_of(bytes);
    issue(w, VS);
    if (in->sve) vgpr(w, in->address);
    take(w, in->data, count, from);
    for (u64 left = w->active; left; left &= left - 1) {
        u32 l = (u32)__builtin_ctzll(left), x[4];
        u8 *to = scratch_at(w, in, l, bytes);
        if (!to) return;
        for (u32 i = 0; i < count; i++) x[i] = in->op->part ? from[i][l] >> 16 : from[i][l];
        memcpy(to, x, bytes);
    }
    count_scratch(w, in);
}

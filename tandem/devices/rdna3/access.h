// What accesses to buffers, scratch memory and LDS have in common: the registers that they fill, waits, and who may see whose.
#ifndef RDNA3_ACCESS_H
#define RDNA3_ACCESS_H

#include "wave.h"

#define LEAST(a, b) ((a) < (b) ? (a) : (b))

// ---- registers

static inline u32 registers_of(u32 bytes) { return (bytes + 3) / 4; }

// What was loaded, extended or put into a half of the register.
static inline u32 loaded(const Operation *op, u32 old, u32 x) {
    if (op->bytes == 1 && (op->result == I32 || op->result == I16)) x = (u32)(i32)(i8)x;
    if (op->bytes == 2 && op->result == I32) x = (u32)(i32)(i16)x;
    if (op->result == U16 || op->result == I16) x = op->part ? (old & 0xffff) | x << 16 : (old & 0xffff0000) | (x & 0xffff);
    return x;
}

static inline void fill(Wave *w, const Operation *op, u32 r, u32 lane, const u32 *x) {
    for (u32 i = 0; i < registers_of(op->bytes); i++) {
        u32 *to = &w->v[(r + i) % VGPRS][lane];
        *to = op->bytes < 4 ? loaded(op, *to, x[i]) : x[i];
    }
}

static inline void define(Wave *w, u32 r, u32 count, u64 lanes, u64 undefined) {
    for (u32 i = r; i < r + count; i++) {
        w->undefined[i % VGPRS] = (w->undefined[i % VGPRS] & ~lanes) | undefined;
        if (undefined) w->origin[i % VGPRS] = index_of(w);
    }
}

static inline void take(Wave *w, u32 data, u32 count, const u32 *from[4]) {
    w->taint = 0;
    for (u32 i = 0; i < count; i++) from[i] = vgpr(w, data + i);
}

// ---- waits

static inline u32 issue(Wave *w, Counter counter) { return ++w->issued[counter]; }

// A load will fill registers; loads of one kind answer in order, so one may follow another into the same register.
static inline void expect(Wave *w, u32 r, u32 count, Counter counter, u32 sequence) {
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
static inline u32 acquired(const Launch *launch, const Access *a, u32 group) {
    for (u32 i = 0; i < launch->release_count; i++) {
        const Release *r = launch->releases + i;
        if (r->group != a->group || a->sequence > r->released[a->wave][a->counter]) continue;
        for (u32 j = i + 1; j < launch->release_count; j++)
            if (launch->releases[j].group == group && launch->releases[j].address == r->address) return j + 1;
    }
    return 0;
}

enum { SEVERAL = 255 };  // waves of a group, or groups, have read a dword: `sequence` is then the group's barriers

static inline bool ordered(const Wave *w, const Access *a) {
    const Group *g = w->group;
    if (a->group != g->index) return a->wave != SEVERAL && acquired(g->launch, a, g->index);
    if (a->wave == SEVERAL) return g->barriers > a->sequence;
    return a->wave == w->index || a->sequence <= g->released[a->wave][a->counter];
}

static inline Fault race(const Wave *w, const Access *a, u32 lane, u64 address) {
    return (Fault){.kind = RACE, .instruction = index_of(w), .other = a->instruction, .group = w->group->index,
                   .wave = w->index, .lane = lane, .other_group = a->group, .other_wave = a->wave, .address = address,
                   .bytes = 4};
}
static inline void conflict(Wave *w, const Access *a, u32 lane, u64 address) {
    if (!w->fault.kind) w->fault = race(w, a, lane, address);
}

static inline u8 bytes_in(u64 at, u32 bytes, u64 dword) {  // of a dword, as bits
    u64 from = at > 4 * dword ? at : 4 * dword, to = LEAST(at + bytes, 4 * dword + 4);
    return (u8)(((1u << (to - from)) - 1) << (from & 3));
}

static inline bool clashes(const Wave *w, const Access *a, const Access *mine) {
    return a->bytes & mine->bytes && !(a->atomic && mine->atomic) && !ordered(w, a);
}

static inline void note_write(Wave *w, Shadow *cells, u64 at, u32 bytes, Access mine, u32 lane, u64 address) {
    for (u64 dword = at / 4; dword <= (at + bytes - 1) / 4; dword++) {
        Access *write = &cells[dword].write, *read = &cells[dword].read;
        mine.bytes = bytes_in(at, bytes, dword);
        if (clashes(w, write, &mine)) conflict(w, write, lane, address);
        if (clashes(w, read, &mine)) conflict(w, read, lane, address);
        if (write->group == mine.group && write->wave == mine.wave) mine.bytes |= write->bytes;
        *write = mine;
    }
}

static inline Access access_by(const Wave *w, Counter counter, u32 sequence, bool atomic) {
    return (Access){.group = w->group->index, .sequence = sequence, .instruction = (u16)index_of(w), .wave = (u8)w->index,
                    .counter = (u8)counter, .atomic = atomic};
}

#endif

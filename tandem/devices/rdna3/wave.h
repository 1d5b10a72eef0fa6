// An RDNA3 wave and its instructions, as the emulator holds them. Names and numbers are those of AMD's "RDNA3 Instruction
// Set Architecture" reference guide.
#ifndef RDNA3_WAVE_H
#define RDNA3_WAVE_H

#include <stdbool.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;

enum { MAX_LANES = 64, VGPRS = 256, SGPRS = 128, MAX_WAVES = 32 };
enum { VCC = 106, NULL_SGPR = 124, M0 = 125, EXEC = 126 };  // numbers of special scalar registers
enum { LITERAL = 255, FIRST_VGPR = 256 };                   // numbers of operands

typedef enum {
    SOP1, SOP2, SOPC, SOPK, SOPP, SMEM, VOP1, VOP2, VOPC, VOP3, VOP3SD, VOP3P, VOPD, DS, GLOBAL, SCRATCH, MUBUF, ENCODINGS
} Encoding;

// What a register holds. NONE: the operation has no such operand. MASK: a bit a lane, in one or two SGPRs.
typedef enum { NONE, U32, I32, F32, U16, I16, F16, U64, I64, MASK, B128, B256, B512 } Type;

typedef struct Wave Wave;
typedef struct Instruction Instruction;

typedef struct {
    const char *name;
    Encoding encoding;
    u16 opcode;
    void (*run)(Wave *, Instruction *);
    Type result, source[3];
    u8 bytes;     // of a memory access, a lane and address
    u8 part;      // 1: the high half of a register; of two-address LDS operations: the stride of offsets
    bool literal; // always followed by a literal
} Operation;

struct Instruction {
    const Operation *op;
    u32 at;      // byte in the code
    u32 target;  // of a branch: index of an instruction; of operations that always have a literal: that
    u16 source[3], result, scalar_result;  // operands as encoded
    u64 constant[3];                       // the values of those that are constants
    u8 negate, absolute, high, negate_high, select_high;  // a bit a source; `high` bit 3: the result's high half
    u8 multiply, clamp;                    // of the result: 1: times 2, 2: times 4, 3: halved
    bool dual;                             // issued with the next one (VOPD)
    bool encoding_is_vop3;                 // carries and masks are operands; VCC else
    u8 dpp;                                // 16 or 8; 0: none
    u32 dpp_control;
    bool fetch_inactive, bound_control;
    u8 row_mask, bank_mask;
    i32 offset;
    u32 offset1;
    u16 address, data, data1, base;
    u16 scalar_offset;     // of a buffer access: an operand
    bool glc, sve;         // an atomic operation returns; a scratch or buffer address has a vector register
    u32 immediate;
    // What a launch counts: how often it ran; for memory also active lanes, 64-byte segments and LDS cycles.
    u64 count, lanes, segments, cycles;
    u64 outside;  // an address that it read, of what is not the launch's
};

// Counters that s_waitcnt waits for. LGKM is two here: LDS answers in order, scalar loads do not.
typedef enum { VM, VS, LDS, SCALAR, COUNTERS } Counter;

typedef enum {
    OK, BAD_INSTRUCTION, READ_OUTSIDE, WRITE_OUTSIDE, LDS_OUTSIDE, NOT_WAITED, UNDEFINED_ADDRESS, UNDEFINED_STORE,
    UNDEFINED_BRANCH, UNDEFINED_EXEC, RACE, NOT_REPLICATED, TOO_LONG, MISALIGNED,
    STALE
} FaultKind;

typedef struct {
    FaultKind kind;
    i32 instruction;  // index
    i32 other;        // index of the instruction that caused it or that it conflicts with; -1: none
    u32 group, wave, lane, other_group, other_wave;
    u64 address;
    u32 bytes;
} Fault;

// Who accessed a dword last, and how: memory has one for writes and one for reads.
typedef struct {
    u32 group, sequence;
    u16 instruction;
    u8 wave;
    u8 bytes : 4, counter : 2, atomic : 1;
} Access;

typedef struct Group Group;
typedef struct Launch Launch;

struct Wave {
    u32 v[VGPRS][MAX_LANES];
    u32 s[SGPRS];
    u32 scc;
    int lanes;
    u32 pc;
    enum { RUNNING, AT_BARRIER, ENDED } state;
    u64 active;            // lanes that the present instruction writes: exec, less what DPP disables
    u64 mask_of;           // the lanes of `mask`
    u32 mask[MAX_LANES];   // all ones in active lanes
    u32 dpp_source[MAX_LANES];  // source 0 after DPP
    Instruction *current;
    // Undefined values: a bit a lane of a register that was never written, or computed from such. They may be moved
    // and computed with; an address, a branch, exec or a store to a buffer that depends on one is a fault.
    u64 undefined[VGPRS];
    u32 undefined_s[SGPRS];  // bits
    u8 undefined_scc;
    i32 origin[VGPRS], origin_s[SGPRS];  // index of the instruction that read what was undefined
    u64 taint;             // undefined lanes among the present instruction's sources
    i32 taint_origin;
    // Registers that a load still has to write: sequence number << 2 | counter; 0: none.
    u32 pending[VGPRS], pending_s[SGPRS];
    i32 loader[VGPRS], loader_s[SGPRS];  // by which instruction
    u32 issued[COUNTERS], done[COUNTERS];
    u8 *scratch;           // bytes_of_scratch a lane
    u32 invalidated;       // atomic operations of the launch before this wave's last buffer_gl0_inv
    Fault fault, raced;    // `raced`: the last load of what another was writing, if anything comes to depend on it
    Group *group;
    u32 index;             // in its workgroup
};

typedef struct {
    Access write, read;
} Shadow;

enum { OUTSIDE, READABLE, WRITABLE };

typedef struct {
    u64 address, bytes;
    u8 *host;
    Shadow *shadow;  // of each dword; NULL: nobody writes here
    i32 access;      // see rdna3_region
} Region;

struct Group {
    u32 index, id[3];
    u32 waves, barriers;
    u8 *lds;
    Shadow *lds_shadow;
    u8 *lds_defined;       // a bit a byte, four bits a dword
    i32 *lds_origin;       // of a dword that an undefined value was stored to: Wave.origin
    u32 released[MAX_WAVES][COUNTERS];  // accesses up to here are ordered before what follows the last barrier
    Wave *wave;
    Launch *launch;
};

// An atomic operation: later ones on the same address order what was released by it before what follows them.
typedef struct {
    u64 address;
    u32 group;
    u32 released[MAX_WAVES][COUNTERS];
} Release;

struct Launch {
    Instruction *code;
    u32 instructions;
    int lanes;
    u32 threads[3], groups[3];
    u32 lds_bytes, scratch_bytes, vgprs;
    u32 user_sgprs;
    u32 user[SGPRS];
    u32 group_ids;         // bits: which of the three are given
    bool wave_number;      // whether a register with the wave's number in its workgroup follows
    bool flush_denormals;
    bool counting;         // segments and LDS cycles, which take time
    Region regions[64];
    u32 region_count;
    u64 seed;
    u64 limit;             // instructions
    u64 executed;
    Fault fault;
    Release *releases;
    u32 release_count, release_room;
};

static inline u64 all_lanes(const Wave *w) { return w->lanes == 64 ? ~0ull : 0xffffffffull; }
static inline u64 exec_of(const Wave *w) { return w->s[EXEC] | (w->lanes == 64 ? (u64)w->s[EXEC + 1] << 32 : 0); }
static inline i32 index_of(const Wave *w) { return (i32)(w->current - w->group->launch->code); }

Fault *fault(Wave *, FaultKind);
void fault_pending(Wave *, u32 pending, i32 loader);

// A register is about to be read or written: the load that fills it must have been waited for.
static inline void settle(Wave *w, u32 r) {
    if (w->pending[r]) {
        if (w->pending[r] >> 2 > w->done[w->pending[r] & 3]) fault_pending(w, w->pending[r], w->loader[r]);
        w->pending[r] = 0;
    }
}
static inline void settle_s(Wave *w, u32 r) {
    if (w->pending_s[r]) {
        if (w->pending_s[r] >> 2 > w->done[w->pending_s[r] & 3]) fault_pending(w, w->pending_s[r], w->loader_s[r]);
        w->pending_s[r] = 0;
    }
}
static inline u32 *vgpr(Wave *w, u32 r) {
    r &= VGPRS - 1;
    settle(w, r);
    if (w->undefined[r]) {
        w->taint |= w->undefined[r];
        if (w->undefined[r] & w->active) w->taint_origin = w->origin[r];
    }
    return w->v[r];
}
static inline u32 sgpr(Wave *w, u32 r) {
    settle_s(w, r);
    if (w->undefined_s[r]) w->taint = ~0ull, w->taint_origin = w->origin_s[r];
    return r == NULL_SGPR ? 0 : w->s[r];
}
static inline u64 sgpr_pair(Wave *w, u32 r) { return sgpr(w, r) | (r == NULL_SGPR ? 0 : (u64)sgpr(w, (r + 1) % SGPRS) << 32); }
// A bit a lane: what is undefined of it taints those lanes only.
static inline u64 lane_mask(Wave *w, u32 r) {
    u32 next = w->lanes == 64 ? (r + 1) % SGPRS : r;
    settle_s(w, r);
    settle_s(w, next);
    w->taint |= w->undefined_s[r] | (u64)w->undefined_s[next] << 32;
    if (w->undefined_s[r]) w->taint_origin = w->origin_s[r];
    return w->s[r] | (w->lanes == 64 ? (u64)w->s[next] << 32 : 0);
}

// operations.c
extern const Operation OPERATIONS[];
extern const u32 OPERATION_COUNT;

// memory.c
void global_load(Wave *, Instruction *);
void global_store(Wave *, Instruction *);
void scratch_load(Wave *, Instruction *);
void scratch_store(Wave *, Instruction *);
void scalar_load(Wave *, Instruction *);
void scalar_buffer_load(Wave *, Instruction *);
typedef u64 Update(u64 old, u64 given);
void global_atomic(Wave *, Instruction *, Update *);
void wait_for(Wave *, Counter, u32 left);

// lds.c
void lds_load(Wave *, Instruction *);
void lds_load_pair(Wave *, Instruction *);
void lds_store(Wave *, Instruction *);
void lds_store_pair(Wave *, Instruction *);
void lds_append(Wave *, Instruction *);
void lds_atomic(Wave *, Instruction *, Update *, bool returns);

// decode.c
i32 decode(const u32 *words, u32 count, Instruction *out, u32 room, u32 *bad_word);

#endif

// A launch: workgroups of waves, a few at a time, in an order that a seed decides.
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#include "emulator.h"
#include "wave.h"

#define EXPORT __attribute__((visibility("default")))

enum { RESIDENT_GROUPS = 4, MAX_SLICE = 256 };

struct rdna3_program {
    u32 instructions;
    Instruction *code;
};

// ---- one instruction

// Source 0 from other lanes of its row of 16, or of 8. A lane whose source is outside or inactive gets 0 or is not written.
static void fetch_dpp(Wave *w, const Instruction *in) {
    const u32 *from = vgpr(w, in->source[0] - FIRST_VGPR);
    u64 exec = exec_of(w), undefined = w->taint, tainted = 0;
    u32 c = in->dpp_control;
    for (int l = 0; l < w->lanes; l++) {
        int row = l & ~15, i = l & 15, k;
        bool inside = true;
        if (in->dpp == 8) k = (l & ~7) | (int)(c >> 3 * (l & 7) & 7);
        else if (c < 0x100) k = (l & ~3) | (int)(c >> 2 * (l & 3) & 3);                      // quad_perm
        else if (c < 0x110) k = row | (i + (int)(c & 15)), inside = i + (int)(c & 15) < 16;  // row_shl
        else if (c < 0x120) k = row | (i - (int)(c & 15)), inside = i >= (int)(c & 15);      // row_shr
        else if (c < 0x130) k = row | ((i - (int)(c & 15)) & 15);                            // row_ror
        else if (c == 0x140) k = row | (15 - i);                                             // row_mirror
        else if (c == 0x141) k = (l & ~7) | (7 - (l & 7));                                   // row_half_mirror
        else if (c >= 0x150 && c < 0x160) k = row | (int)(c & 15);                           // row_share
        else if (c >= 0x160 && c < 0x170) k = row | (i ^ (int)(c & 15));                     // row_xmask
        else k = l, fault(w, BAD_INSTRUCTION);
        bool there = inside && (in->fetch_inactive || exec >> k & 1);
        w->dpp_source[l] = there ? from[k] : 0;
        if (there && undefined >> k & 1) tainted |= 1ull << l;
        bool written = in->row_mask >> l / 16 % 4 & 1 && in->bank_mask >> l / 4 % 4 & 1 && (there || in->bound_control);
        if (!written) w->active &= ~(1ull << l);
    }
    w->taint = tainted;
}

// Both halves of a dual instruction read before either writes.
static void run_dual(Wave *w, Instruction *x) {
    Instruction *y = x + 1;
    u32 r = x->result, before[MAX_LANES], after[MAX_LANES];
    size_t bytes = 4 * (size_t)w->lanes;
    u64 undefined_before = w->undefined[r];
    memcpy(before, w->v[r], bytes);
    x->op->run(w, x);
    u64 undefined_after = w->undefined[r];
    memcpy(after, w->v[r], bytes);
    memcpy(w->v[r], before, bytes);
    w->undefined[r] = undefined_before;
    w->taint = 0;
    w->pc++;
    y->count++;
    y->op->run(w, y);
    memcpy(w->v[r], after, bytes);
    w->undefined[r] = undefined_after;
}

static void run_slice(Wave *w, u32 budget) {
    Instruction *code = w->group->launch->code;
    while (w->state == RUNNING && budget--) {
        Instruction *in = w->current = code + w->pc++;
        in->count++;
        w->taint = 0;
        w->taint_origin = -1;
        w->active = exec_of(w);
        if (in->dpp) fetch_dpp(w, in);
        if (in->dual) run_dual(w, in);
        else in->op->run(w, in);
        w->group->launch->executed++;
        if (w->fault.kind) return;
    }
}

// ---- workgroups

static void start_wave(Launch *launch, Group *g, u32 index) {
    Wave *w = g->wave + index;
    u8 *scratch = w->scratch;
    memset((u8 *)w + sizeof w->v, 0, sizeof *w - sizeof w->v);
    memset(w->v, 0xa5, sizeof *w->v * launch->vgprs);
    memset(w->undefined_s, 0xff, sizeof w->undefined_s);
    memset(w->origin, 0xff, sizeof w->origin);
    memset(w->origin_s, 0xff, sizeof w->origin_s);
    w->undefined_scc = 1;
    w->scratch = scratch;
    w->group = g;
    w->index = index;
    w->lanes = launch->lanes;
    for (int r = 0; r < VGPRS; r++) w->undefined[r] = all_lanes(w);
    u32 n = launch->user_sgprs;
    memcpy(w->s, launch->user, 4 * n);
    for (int i = 0; i < 3; i++)
        if (launch->group_ids >> i & 1) w->s[n++] = g->id[i];
    if (launch->wave_number) w->s[n++] = g->waves | index << 20;
    memset(w->undefined_s, 0, 4 * n);
    w->undefined_s[NULL_SGPR] = w->undefined_s[EXEC] = w->undefined_s[EXEC + 1] = 0;
    u32 threads = launch->threads[0] * launch->threads[1] * launch->threads[2], first = index * (u32)w->lanes;
    u64 exec = 0;
    for (u32 l = 0; l < (u32)w->lanes && first + l < threads; l++) {
        u32 t = first + l, x = t % launch->threads[0], y = t / launch->threads[0] % launch->threads[1];
        w->v[0][l] = x | y << 10 | t / launch->threads[0] / launch->threads[1] << 20;
        exec |= 1ull << l;
    }
    w->undefined[0] = all_lanes(w) & ~exec;
    w->s[EXEC] = (u32)exec;
    w->s[EXEC + 1] = (u32)(exec >> 32);
}

static void start_group(Launch *launch, Group *g, u32 number) {
    g->index = number;
    g->id[0] = number % launch->groups[0];
    g->id[1] = number / launch->groups[0] % launch->groups[1];
    g->id[2] = number / launch->groups[0] / launch->groups[1];
    g->barriers = 0;
    memset(g->released, 0, sizeof g->released);
    memset(g->lds, 0xa5, launch->lds_bytes);
    memset(g->lds_shadow, 0, launch->lds_bytes / 4 * sizeof *g->lds_shadow);
    memset(g->lds_defined, 0, launch->lds_bytes / 4);
    memset(g->lds_origin, 0xff, launch->lds_bytes);
    for (u32 i = 0; i < g->waves; i++) start_wave(launch, g, i);
}

// All waves that have not ended are at the barrier: what each had completed before is now ordered for all.
static void pass_barrier(Group *g) {
    for (u32 i = 0; i < g->waves; i++) {
        Wave *w = g->wave + i;
        if (w->state == AT_BARRIER) memcpy(g->released[i], w->done, sizeof w->done), w->state = RUNNING;
        if (w->state == ENDED) memcpy(g->released[i], w->issued, sizeof w->issued);
    }
    g->barriers++;
}

static u32 draw(u64 *state) {  // xorshift*
    *state ^= *state >> 12, *state ^= *state << 25, *state ^= *state >> 27;
    return (u32)(*state * 0x2545f4914f6cdd1dull >> 32);
}

// The next wave to run: any that can, from a random one on.
static Wave *pick(Group *groups, u32 resident, u64 *random) {
    u32 waves = groups->waves, total = resident * waves, from = draw(random) % total;
    for (u32 i = 0; i < total; i++) {
        u32 at = (from + i) % total;
        Wave *w = groups[at / waves].wave + at % waves;
        if (w->state == RUNNING) return w;
    }
    return NULL;
}

static void run_groups(Launch *launch, Group *groups, u32 resident) {
    u32 total = launch->groups[0] * launch->groups[1] * launch->groups[2], next = 0;
    u64 random = launch->seed * 2 + 1;
    for (; next < resident; next++) start_group(launch, groups + next, next);
    for (Wave *w; (w = pick(groups, resident, &random));) {
        Group *g = w->group;
        run_slice(w, 1 + draw(&random) % MAX_SLICE);
        if (w->fault.kind) {
            launch->fault = w->fault;
            return;
        }
        if (launch->executed > launch->limit) {
            fault(w, TOO_LONG);
            launch->fault = w->fault;
            return;
        }
        if (w->state == RUNNING) continue;
        u32 waiting = 0, ended = 0;
        for (u32 i = 0; i < g->waves; i++) waiting += g->wave[i].state == AT_BARRIER, ended += g->wave[i].state == ENDED;
        if (ended == g->waves && next < total) start_group(launch, g, next++);
        else if (waiting && waiting + ended == g->waves) pass_barrier(g);
    }
}

static bool make_groups(Launch *launch, Group *groups, u32 resident, u32 waves) {
    bool made = true;
    for (u32 i = 0; i < resident; i++) {
        Group *g = groups + i;
        g->launch = launch;
        g->waves = waves;
        g->wave = calloc(waves, sizeof *g->wave);
        g->lds = malloc(launch->lds_bytes + 16);
        g->lds_shadow = malloc((launch->lds_bytes / 4 + 1) * sizeof *g->lds_shadow);
        g->lds_defined = malloc(launch->lds_bytes / 4 + 1);
        g->lds_origin = malloc(launch->lds_bytes + 4);
        made &= g->wave && g->lds && g->lds_shadow && g->lds_defined && g->lds_origin;
        for (u32 j = 0; made && launch->scratch_bytes && j < waves; j++)
            made &= (g->wave[j].scratch = calloc((size_t)launch->lanes, launch->scratch_bytes)) != NULL;
    }
    return made;
}

static void free_groups(Group *groups, u32 resident) {
    for (u32 i = 0; i < resident; i++) {
        for (u32 j = 0; groups[i].wave && j < groups[i].waves; j++) free(groups[i].wave[j].scratch);
        free(groups[i].wave);
        free(groups[i].lds);
        free(groups[i].lds_shadow);
        free(groups[i].lds_defined);
        free(groups[i].lds_origin);
    }
}

// ---- for Python

EXPORT int tandem_rdna3_operations(void) { return (int)OPERATION_COUNT; }
EXPORT void tandem_rdna3_operation(int i, rdna3_operation *out) {
    *out = (rdna3_operation){OPERATIONS[i].name, (int)OPERATIONS[i].encoding, OPERATIONS[i].opcode, OPERATIONS[i].bytes};
}

EXPORT rdna3_program *tandem_rdna3_decode(const uint32_t *words, int count, uint32_t *bad_word) {
    rdna3_program *program = calloc(1, sizeof *program);
    u32 room = 2 * (u32)count + 4;
    u32 *padded = calloc((size_t)count + 4, sizeof *padded);
    if (program) program->code = malloc(room * sizeof *program->code);
    if (padded) memcpy(padded, words, (size_t)count * sizeof *words);
    i32 n = padded && program && program->code ? decode(padded, (u32)count, program->code, room, bad_word) : -1;
    free(padded);
    if (n < 0) {
        tandem_rdna3_free(program);
        return NULL;
    }
    program->instructions = (u32)n;
    return program;
}

EXPORT void tandem_rdna3_free(rdna3_program *program) {
    if (program) free(program->code);
    free(program);
}

EXPORT int tandem_rdna3_instructions(const rdna3_program *program, rdna3_instruction *out) {
    for (u32 i = 0; out && i < program->instructions; i++) {
        const Instruction *in = program->code + i;
        out[i] = (rdna3_instruction){(int)(in->op - OPERATIONS), (int)in->at, in->dual, (int)in->result, in->count, in->lanes,
                                     in->segments, in->cycles};
    }
    return (int)program->instructions;
}

EXPORT int tandem_rdna3_run(rdna3_program *program, const rdna3_launch *given, rdna3_fault *found) {
    Launch launch = {
        .code = program->code, .instructions = program->instructions, .lanes = given->lanes, .lds_bytes = given->lds_bytes,
        .scratch_bytes = given->scratch_bytes, .vgprs = given->vgprs, .user_sgprs = given->user_sgprs,
        .group_ids = given->group_ids, .wave_number = given->wave_number, .flush_denormals = given->flush_denormals, .counting = given->counting,
        .seed = given->seed, .limit = given->limit, .region_count = given->region_count,
    };
    memcpy(launch.threads, given->threads, sizeof launch.threads);
    memcpy(launch.groups, given->groups, sizeof launch.groups);
    memcpy(launch.user, given->user, 4 * launch.user_sgprs);
    bool made = launch.region_count <= sizeof launch.regions / sizeof *launch.regions;
    for (u32 i = 0; made && i < launch.region_count; i++) {
        const rdna3_region *r = given->regions + i;
        launch.regions[i] = (Region){r->address, r->bytes, r->host, NULL, r->access};
        if (r->access == WRITABLE) made &= (launch.regions[i].shadow = calloc(r->bytes / 4 + 2, sizeof(Shadow))) != NULL;
    }
    for (u32 i = 0; i < launch.instructions; i++) {
        Instruction *in = launch.code + i;
        in->count = in->lanes = in->segments = in->cycles = in->outside = 0;
    }
    u32 threads = launch.threads[0] * launch.threads[1] * launch.threads[2];
    u32 waves = (threads + (u32)launch.lanes - 1) / (u32)launch.lanes;
    u32 total = launch.groups[0] * launch.groups[1] * launch.groups[2];
    u32 resident = total < RESIDENT_GROUPS ? total : RESIDENT_GROUPS;
    Group groups[RESIDENT_GROUPS] = {0};
    made &= waves <= MAX_WAVES && make_groups(&launch, groups, resident, waves);
    u32 control = _mm_getcsr();
    if (launch.flush_denormals) _mm_setcsr(control | 0x8040);
    if (made && total) run_groups(&launch, groups, resident);
    _mm_setcsr(control);
    free_groups(groups, resident);
    for (u32 i = 0; made && i < launch.region_count; i++) free(launch.regions[i].shadow);
    free(launch.releases);
    const Fault *f = &launch.fault;
    *found = (rdna3_fault){(int)f->kind, f->instruction, f->other, f->group, f->wave, f->lane, f->other_group, f->other_wave,
                           f->address, f->bytes, launch.executed};
    return made ? (int)f->kind : -1;
}

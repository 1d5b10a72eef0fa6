// What each operation of operations.h does to a wave.
#include "lanes.h"
#include "special.h"

// ---- the table's lines as functions

#define C_U32 u32
#define C_I32 i32
#define C_F32 float
#define C_U16 u32
#define C_I16 i32
#define C_F16 float
#define C_U64 u64
#define C_I64 i64
#define FIELD_U32 u
#define FIELD_I32 u
#define FIELD_F32 f
#define FIELD_U16 u
#define FIELD_I16 u
#define FIELD_F16 f
#define FIELD_U64 q
#define FIELD_I64 q
#define WIDE_U32 false
#define WIDE_I32 false
#define WIDE_U64 true
#define WIDE_I64 true
#define USES_SCC(text) (__builtin_strstr(text, "scc") != NULL)

static void finish_scalar(Wave *w, u32 result, u64 r, u64 undefined, bool wide, bool writes_scc, u32 scc, bool of_result) {
    if (wide) write_sgpr_pair(w, result, r, undefined);
    else write_sgpr_bits(w, result, (u32)r, (u32)undefined);
    if (!writes_scc) return;
    w->scc = scc;
    w->undefined_scc = undefined != 0 && !(of_result && r & ~undefined & (wide ? ~0ull : 0xffffffff));
}

#define FINISH_SCALAR(result, r, undefined, R, X, SCC)                                                                         \
    if (USES_SCC(#X) && w->undefined_scc) undefined = ~0ull;                                                                   \
    finish_scalar(w, result, (u64)r, undefined, WIDE_##R, !!strcmp(#SCC, "scc"), (SCC) != 0, !strcmp(#SCC, "r != 0"))
// Of bitwise operations each bit of the result depends on the same bit of the sources: it is undefined if it changes with an
// undefined bit of theirs.
#define BITWISE(T, X)                                                                                                          \
    for (int ones = 0; undefined && ones < 4; ones++) {                                                                        \
        C_##T first = a, second = b;                                                                                           \
        a = (C_##T)(ones & 1 ? first | ua : first & ~ua), b = (C_##T)(ones & 2 ? second | ub : second & ~ub);                  \
        differs |= (u64)r ^ (u64)(X);                                                                                          \
        a = first, b = second;                                                                                                 \
    }                                                                                                                          \
    undefined = differs
#define S1(code, name, R, A, X, SCC)                                                                                           \
    static void name(Wave *w, Instruction *in) {                                                                               \
        u64 undefined;                                                                                                         \
        C_##A a = (C_##A)scalar_bits(w, in, 0, WIDE_##A, &undefined);                                                          \
        u32 scc = w->scc, d = w->s[in->result & 127];                                                                          \
        (void)d, (void)scc;                                                                                                    \
        C_##R r = (C_##R)(X);                                                                                                  \
        if (undefined && strcmp(#X, "a") && strcmp(#X, "~a")) undefined = ~0ull;                                               \
        FINISH_SCALAR(in->result, r, undefined, R, X, SCC);                                                                    \
    }
#define SAVEEXEC_OF(name, T, wide, X)                                                                                          \
    static void name(Wave *w, Instruction *in) {                                                                               \
        u64 ua, ub = 0, differs = 0;                                                                                           \
        C_##T a = (C_##T)scalar_bits(w, in, 0, wide, &ua), b = (C_##T)(w->s[EXEC] | (u64)w->s[EXEC + 1] << 32), r = (X);       \
        u64 undefined = ua;                                                                                                    \
        BITWISE(T, X);                                                                                                         \
        if (wide) write_sgpr_pair(w, in->result, b, 0);                                                                        \
        else write_sgpr_bits(w, in->result, (u32)b, 0);                                                                        \
        finish_scalar(w, EXEC, r, undefined, wide, true, r != 0, true);                                                        \
    }
#define SAVEEXEC(code, name, X) SAVEEXEC_OF(name##_b32, U32, false, X) SAVEEXEC_OF(name##_b64, U64, true, X)
#define SCALAR_OF_2(name, R, A, B, X, SCC, WHOLE)                                                                              \
    static void name(Wave *w, Instruction *in) {                                                                               \
        u64 ua, ub, differs = 0;                                                                                               \
        C_##A a = (C_##A)scalar_bits(w, in, 0, WIDE_##A, &ua);                                                                 \
        C_##B b = (C_##B)scalar_bits(w, in, 1, WIDE_##B, &ub);                                                                 \
        u32 scc = w->scc;                                                                                                      \
        (void)scc, (void)differs;                                                                                              \
        C_##R r = (C_##R)(X);                                                                                                  \
        u64 undefined = ua | ub ? ~0ull : 0;                                                                                   \
        WHOLE;                                                                                                                 \
        FINISH_SCALAR(in->result, r, undefined, R, X, SCC);                                                                    \
    }
#define S2(code, name, R, A, X, SCC) SCALAR_OF_2(name, R, A, A, X, SCC, )
#define S2_BITS(code, name, T, X, SCC) SCALAR_OF_2(name, T, T, T, X, SCC, BITWISE(T, X))
#define S2_64(code, name, R, X, SCC) SCALAR_OF_2(name, R, R, U32, X, SCC, )
#define S2_32(code, name, R, X, SCC) SCALAR_OF_2(name, R, U32, U32, X, SCC, )
#define SC(code, name, A, B, X)                                                                                                \
    static void name(Wave *w, Instruction *in) {                                                                               \
        u64 ua, ub;                                                                                                            \
        C_##A a = (C_##A)scalar_bits(w, in, 0, WIDE_##A, &ua);                                                                 \
        C_##B b = (C_##B)scalar_bits(w, in, 1, WIDE_##B, &ub);                                                                 \
        w->scc = (X) != 0, w->undefined_scc = (ua | ub) != 0;                                                                  \
    }
#define IMMEDIATE_I32 (i32)(i16)in->immediate
#define IMMEDIATE_U32 in->immediate
#define SK(code, name, T, X, SCC)                                                                                              \
    static void name(Wave *w, Instruction *in) {                                                                               \
        C_##T k = IMMEDIATE_##T, d = (C_##T)w->s[in->result];                                                                  \
        u32 scc = w->scc;                                                                                                      \
        u64 undefined = 0;                                                                                                     \
        (void)d, (void)scc;                                                                                                    \
        if (strcmp(#X, "k")) settle_s(w, in->result), undefined = w->undefined_s[in->result] ? ~0ull : 0;                      \
        C_##T r = (X);                                                                                                         \
        FINISH_SCALAR(in->result, (u32)r, undefined, T, X, SCC);                                                               \
    }
#define SK_COMPARE(code, name, T, X)                                                                                           \
    static void name(Wave *w, Instruction *in) {                                                                               \
        C_##T k = IMMEDIATE_##T, d = (C_##T)sgpr(w, in->result);                                                               \
        w->scc = (X) != 0, w->undefined_scc = w->taint != 0;                                                                   \
    }
#define CONTROL(encoding, code, name, ...)                                                                                     \
    static void name(Wave *w, Instruction *in) {                                                                               \
        (void)w, (void)in;                                                                                                     \
        __VA_ARGS__;                                                                                                           \
    }

#define V1(code, name, R, A, X)                                                                                                \
    static void name(Wave *w, Instruction *in) {                                                                               \
        Lanes ra, d;                                                                                                           \
        const C_##A *pa = read_##A(w, in, 0, &ra);                                                                             \
        EACH_LANE {                                                                                                            \
            C_##A a = pa[lane];                                                                                                \
            ((C_##R *)d.FIELD_##R)[lane] = (C_##R)(X);                                                                         \
        }                                                                                                                      \
        write_##R(w, in, &d);                                                                                                  \
    }
#define VECTOR_OF_2(name, R, A, B, X)                                                                                          \
    static void name(Wave *w, Instruction *in) {                                                                               \
        Lanes ra, rb, d;                                                                                                       \
        const C_##A *pa = read_##A(w, in, 0, &ra);                                                                             \
        const C_##B *pb = read_##B(w, in, 1, &rb);                                                                             \
        EACH_LANE {                                                                                                            \
            C_##A a = pa[lane];                                                                                                \
            C_##B b = pb[lane];                                                                                                \
            ((C_##R *)d.FIELD_##R)[lane] = (C_##R)(X);                                                                         \
        }                                                                                                                      \
        write_##R(w, in, &d);                                                                                                  \
    }
#define V2(code, name, R, T, X) VECTOR_OF_2(name, R, T, T, X)
#define V3_OF_2(code, name, R, T, X) VECTOR_OF_2(name, R, T, T, X)
#define V3_SHIFT64(code, name, T, X) VECTOR_OF_2(name, T, U32, T, X)
#define V2_ACCUMULATE(code, name, T, X)                                                                                        \
    static void name(Wave *w, Instruction *in) {                                                                               \
        Lanes ra, rb, rd, r;                                                                                                   \
        const C_##T *pa = read_##T(w, in, 0, &ra), *pb = read_##T(w, in, 1, &rb);                                              \
        Instruction old = *in;                                                                                                 \
        old.source[2] = (u16)(FIRST_VGPR + in->result), old.negate &= 3, old.absolute &= 3;                                    \
        old.high = (u8)(in->high >> 3 << 2);                                                                                   \
        const C_##T *pd = read_##T(w, &old, 2, &rd);                                                                           \
        EACH_LANE {                                                                                                            \
            C_##T a = pa[lane], b = pb[lane], d = pd[lane];                                                                    \
            ((C_##T *)r.FIELD_##T)[lane] = (X);                                                                                \
        }                                                                                                                      \
        write_##T(w, in, &r);                                                                                                  \
    }
#define V2_LITERAL(code, name, T, X)                                                                                           \
    static void name(Wave *w, Instruction *in) {                                                                               \
        Lanes ra, rb, d;                                                                                                       \
        const C_##T *pa = read_##T(w, in, 0, &ra), *pb = read_##T(w, in, 1, &rb);                                              \
        C_##T k = as_float(in->target);                                                                                        \
        EACH_LANE {                                                                                                            \
            C_##T a = pa[lane], b = pb[lane];                                                                                  \
            ((C_##T *)d.FIELD_##T)[lane] = (X);                                                                                \
        }                                                                                                                      \
        write_##T(w, in, &d);                                                                                                  \
    }
#define V3(code, name, R, T, X)                                                                                                \
    static void name(Wave *w, Instruction *in) {                                                                               \
        Lanes ra, rb, rc, d;                                                                                                   \
        const C_##T *pa = read_##T(w, in, 0, &ra), *pb = read_##T(w, in, 1, &rb), *pc = read_##T(w, in, 2, &rc);               \
        EACH_LANE {                                                                                                            \
            C_##T a = pa[lane], b = pb[lane], c = pc[lane];                                                                    \
            ((C_##R *)d.FIELD_##R)[lane] = (C_##R)(X);                                                                         \
        }                                                                                                                      \
        write_##R(w, in, &d);                                                                                                  \
    }
// Dot products of bytes and halves: `negate` says which sources are signed, so it is not applied to them.
#define DOT(code, name, R, X)                                                                                                  \
    static void name(Wave *w, Instruction *in) {                                                                               \
        Lanes ra, rb, rc, d;                                                                                                   \
        const u32 *pa = read_bits(w, in, 0, 0, &ra), *pb = read_bits(w, in, 1, 0, &rb), *pc = read_bits(w, in, 2, 0, &rc);     \
        EACH_LANE {                                                                                                            \
            u32 a = pa[lane], b = pb[lane], c = pc[lane];                                                                      \
            ((C_##R *)d.FIELD_##R)[lane] = (X);                                                                                \
        }                                                                                                                      \
        write_##R(w, in, &d);                                                                                                  \
    }

// The halves that a packed operation computes with: `high` and `select_high` say from where each comes.
static void unpack(Wave *w, const Instruction *in, int i, Lanes half[2]) {
    Lanes room;
    const u32 *from = read_bits(w, in, i, 0, &room);
    for (int h = 0; h < 2; h++) {
        int shift = ((h ? in->select_high : in->high) >> i & 1) * 16;
        u32 flip = ((h ? in->negate_high : in->negate) >> i & 1) << 15;
        for (int l = 0; l < w->lanes; l++) half[h].u[l] = ((from[l] >> shift) & 0xffff) ^ flip;
    }
}
#define PACKED(code, name, sources, X)                                                                                         \
    static void name(Wave *w, Instruction *in) {                                                                               \
        Lanes source[3][2], r[2];                                                                                              \
        memset(source[2], 0, sizeof source[2]);                                                                                \
        for (int i = 0; i < sources; i++) {                                                                                    \
            unpack(w, in, i, source[i]);                                                                                       \
            for (int h = 0; h < 2; h++) halves_to_floats(source[i][h].u, source[i][h].f, w->lanes);                            \
        }                                                                                                                      \
        for (int h = 0; h < 2; h++) {                                                                                          \
            float d[MAX_LANES];                                                                                                \
            EACH_LANE {                                                                                                        \
                float a = source[0][h].f[lane], b = source[1][h].f[lane], c = source[2][h].f[lane];                            \
                (void)c;                                                                                                       \
                d[lane] = (X);                                                                                                 \
            }                                                                                                                  \
            if (in->clamp) finish_floats(w, in, d);                                                                            \
            floats_to_halves(d, r[h].u, w->lanes);                                                                             \
        }                                                                                                                      \
        EACH_LANE r[0].u[lane] |= r[1].u[lane] << 16;                                                                          \
        write_bits(w, in->result, r[0].u);                                                                                     \
    }
#define PACKED_INTEGER(code, name, sources, X)                                                                                 \
    static void name(Wave *w, Instruction *in) {                                                                               \
        Lanes source[3][2], r;                                                                                                 \
        memset(source[2], 0, sizeof source[2]);                                                                                \
        for (int i = 0; i < sources; i++) unpack(w, in, i, source[i]);                                                         \
        memset(&r, 0, sizeof r);                                                                                               \
        for (int h = 0; h < 2; h++)                                                                                            \
            EACH_LANE {                                                                                                        \
                u32 a = source[0][h].u[lane], b = source[1][h].u[lane], c = source[2][h].u[lane];                              \
                (void)c;                                                                                                       \
                r.u[lane] |= ((X) & 0xffff) << 16 * h;                                                                         \
            }                                                                                                                  \
        write_bits(w, in->result, r.u);                                                                                        \
    }
#define VECTOR(encoding, code, name, R, A, B, C, function)

#define COMPARE(code, suffix, A, B, X)                                                                                         \
    static u64 suffix##_mask(Wave *w, Instruction *in) {                                                                       \
        Lanes ra, rb, d;                                                                                                       \
        const C_##A *pa = read_##A(w, in, 0, &ra);                                                                             \
        const C_##B *pb = read_##B(w, in, 1, &rb);                                                                             \
        EACH_LANE {                                                                                                            \
            C_##A a = pa[lane];                                                                                                \
            C_##B b = pb[lane];                                                                                                \
            d.u[lane] = (X) ? ~0u : 0;                                                                                         \
        }                                                                                                                      \
        return pack_mask(d.u, w->lanes) & w->active;                                                                           \
    }                                                                                                                          \
    static void v_cmp_##suffix(Wave *w, Instruction *in) {                                                                     \
        u64 mask = suffix##_mask(w, in);                                                                                       \
        write_lane_mask(w, in->encoding_is_vop3 ? in->result : VCC, mask);                                                     \
    }                                                                                                                          \
    static void v_cmpx_##suffix(Wave *w, Instruction *in) {                                                                    \
        u64 mask = suffix##_mask(w, in);                                                                                       \
        write_lane_mask(w, EXEC, mask);                                                                                        \
    }
#define COMPARE_FLOAT(code, t, T)                                                                                              \
    COMPARE(code + 1, lt_##t, T, T, a < b)                                                                                     \
    COMPARE(code + 2, eq_##t, T, T, a == b)                                                                                    \
    COMPARE(code + 3, le_##t, T, T, a <= b)                                                                                    \
    COMPARE(code + 4, gt_##t, T, T, a > b)                                                                                     \
    COMPARE(code + 5, lg_##t, T, T, a < b || a > b)                                                                            \
    COMPARE(code + 6, ge_##t, T, T, a >= b)                                                                                    \
    COMPARE(code + 7, o_##t, T, T, a == a && b == b)                                                                           \
    COMPARE(code + 8, u_##t, T, T, a != a || b != b)                                                                           \
    COMPARE(code + 9, nge_##t, T, T, !(a >= b))                                                                                \
    COMPARE(code + 10, nlg_##t, T, T, !(a < b || a > b))                                                                       \
    COMPARE(code + 11, ngt_##t, T, T, !(a > b))                                                                                \
    COMPARE(code + 12, nle_##t, T, T, !(a <= b))                                                                               \
    COMPARE(code + 13, neq_##t, T, T, !(a == b))                                                                               \
    COMPARE(code + 14, nlt_##t, T, T, !(a < b))
#define COMPARE_INTEGER(code, t, T)                                                                                            \
    COMPARE(code + 1, lt_##t, T, T, a < b)                                                                                     \
    COMPARE(code + 2, eq_##t, T, T, a == b)                                                                                    \
    COMPARE(code + 3, le_##t, T, T, a <= b)                                                                                    \
    COMPARE(code + 4, gt_##t, T, T, a > b)                                                                                     \
    COMPARE(code + 5, ne_##t, T, T, a != b)                                                                                    \
    COMPARE(code + 6, ge_##t, T, T, a >= b)

#define SCALAR_LOAD(code, name, bytes, function)
#define LOAD(code, name, bytes, T, part)
#define STORE(code, name, bytes, part)
#define ATOMIC(code, name, T, X)                                                                                               \
    static u64 update_##name(u64 old, u64 given) {                                                                             \
        C_##T a = (C_##T)old, b = (C_##T)given;                                                                                \
        (void)a;                                                                                                               \
        return (u32)(X);                                                                                                       \
    }                                                                                                                          \
    static void global_atomic_##name(Wave *w, Instruction *in) { global_atomic(w, in, update_##name); }
#define LDS_ATOMIC(code, stem, type, T, X)                                                                                     \
    static u64 update_lds_##stem##_##type(u64 old, u64 given) {                                                                \
        C_##T a = (C_##T)old, b = (C_##T)given;                                                                                \
        return (u32)(X);                                                                                                       \
    }                                                                                                                          \
    static void ds_##stem##_##type(Wave *w, Instruction *in) { lds_atomic(w, in, update_lds_##stem##_##type, false); }         \
    static void ds_##stem##_rtn_##type(Wave *w, Instruction *in) { lds_atomic(w, in, update_lds_##stem##_##type, true); }
#define LDS_LOAD(code, name, bytes, T, part)
#define LDS_STORE(code, name, bytes, part)
#define LDS_PAIR(code, name, bytes, stride, function)
#define LDS_OTHER(code, name, bytes, function)

#include "operations.h"

// ---- and as entries

#undef S1
#undef SAVEEXEC
#undef S2
#undef S2_BITS
#undef S2_64
#undef S2_32
#undef SC
#undef SK
#undef SK_COMPARE
#undef CONTROL
#undef V1
#undef V2
#undef V2_ACCUMULATE
#undef V2_LITERAL
#undef V3
#undef V3_OF_2
#undef V3_SHIFT64
#undef DOT
#undef PACKED
#undef PACKED_INTEGER
#undef VECTOR
#undef COMPARE
#undef SCALAR_LOAD
#undef LOAD
#undef STORE
#undef ATOMIC
#undef LDS_ATOMIC
#undef LDS_LOAD
#undef LDS_STORE
#undef LDS_PAIR
#undef LDS_OTHER

#define ENTRY(name, encoding, code, run, R, A, B, C) {name, encoding, code, run, R, {A, B, C}, 0, 0, false}
#define S1(code, name, R, A, X, SCC) ENTRY(#name, SOP1, code, name, R, A, NONE, NONE),
#define SAVEEXEC(code, name, X)                                                                                                \
    ENTRY(#name "_b32", SOP1, code, name##_b32, U32, U32, NONE, NONE),                                                         \
    ENTRY(#name "_b64", SOP1, code + 1, name##_b64, U64, U64, NONE, NONE),
#define S2(code, name, R, A, X, SCC) ENTRY(#name, SOP2, code, name, R, A, A, NONE),
#define S2_BITS(code, name, T, X, SCC) ENTRY(#name, SOP2, code, name, T, T, T, NONE),
#define S2_64(code, name, R, X, SCC) ENTRY(#name, SOP2, code, name, R, R, U32, NONE),
#define S2_32(code, name, R, X, SCC) ENTRY(#name, SOP2, code, name, R, U32, U32, NONE),
#define SC(code, name, A, B, X) ENTRY(#name, SOPC, code, name, NONE, A, B, NONE),
#define SK(code, name, T, X, SCC) ENTRY(#name, SOPK, code, name, T, NONE, NONE, NONE),
#define SK_COMPARE(code, name, T, X) ENTRY(#name, SOPK, code, name, T, NONE, NONE, NONE),
#define CONTROL(encoding, code, name, ...) ENTRY(#name, encoding, code, name, NONE, NONE, NONE, NONE),
#define V1(code, name, R, A, X) ENTRY(#name, VOP1, code, name, R, A, NONE, NONE),
#define V2(code, name, R, T, X) ENTRY(#name, VOP2, code, name, R, T, T, NONE),
#define V2_ACCUMULATE(code, name, T, X) ENTRY(#name, VOP2, code, name, T, T, T, NONE),
#define V2_LITERAL(code, name, T, X) {#name, VOP2, code, name, T, {T, T, NONE}, 0, 0, true},
#define V3(code, name, R, T, X) ENTRY(#name, VOP3, code, name, R, T, T, T),
#define V3_OF_2(code, name, R, T, X) ENTRY(#name, VOP3, code, name, R, T, T, NONE),
#define V3_SHIFT64(code, name, T, X) ENTRY(#name, VOP3, code, name, T, U32, T, NONE),
#define DOT(code, name, R, X) ENTRY(#name, VOP3P, code, name, R, U32, U32, U32),
#define PACKED(code, name, sources, X) ENTRY(#name, VOP3P, code, name, U32, F16, F16, sources > 2 ? F16 : NONE),
#define PACKED_INTEGER(code, name, sources, X) ENTRY(#name, VOP3P, code, name, U32, U16, U16, sources > 2 ? U16 : NONE),
#define VECTOR(encoding, code, name, R, A, B, C, function) ENTRY(#name, encoding, code, function, R, A, B, C),
#define COMPARE(code, suffix, A, B, X)                                                                                         \
    ENTRY("v_cmp_" #suffix, VOPC, code, v_cmp_##suffix, MASK, A, B, NONE),                                                     \
    ENTRY("v_cmpx_" #suffix, VOPC, code + 128, v_cmpx_##suffix, MASK, A, B, NONE),
#define SCALAR_LOAD(code, name, bytes, function) {#name, SMEM, code, function, NONE, {NONE, NONE, NONE}, bytes, 0, false},
#define LOAD(code, name, bytes, T, part)                                                                                       \
    {"global_" #name, GLOBAL, code, global_load, T, {NONE, NONE, NONE}, bytes, part, false},                                   \
    {"buffer_" #name, MUBUF, code, global_load, T, {NONE, NONE, NONE}, bytes, part, false},                                    \
    {"scratch_" #name, SCRATCH, code, scratch_load, T, {NONE, NONE, NONE}, bytes, part, false},
#define STORE(code, name, bytes, part)                                                                                         \
    {"global_" #name, GLOBAL, code, global_store, NONE, {U32, NONE, NONE}, bytes, part, false},                                \
    {"buffer_" #name, MUBUF, code, global_store, NONE, {U32, NONE, NONE}, bytes, part, false},                                 \
    {"scratch_" #name, SCRATCH, code, scratch_store, NONE, {U32, NONE, NONE}, bytes, part, false},
#define ATOMIC(code, name, T, X)                                                                                               \
    {"global_atomic_" #name, GLOBAL, code, global_atomic_##name, T, {T, NONE, NONE}, 4, 0, false},                             \
    {"buffer_atomic_" #name, MUBUF, code, global_atomic_##name, T, {T, NONE, NONE}, 4, 0, false},
#define LDS_ATOMIC(code, stem, type, T, X)                                                                                     \
    {"ds_" #stem "_" #type, DS, code, ds_##stem##_##type, NONE, {T, NONE, NONE}, 4, 0, false},                                 \
    {"ds_" #stem "_rtn_" #type, DS, code + 32, ds_##stem##_rtn_##type, T, {T, NONE, NONE}, 4, 0, false},
#define LDS_LOAD(code, name, bytes, T, part) {#name, DS, code, lds_load, T, {NONE, NONE, NONE}, bytes, part, false},
#define LDS_STORE(code, name, bytes, part) {#name, DS, code, lds_store, NONE, {U32, NONE, NONE}, bytes, part, false},
#define LDS_PAIR(code, name, bytes, stride, function) {#name, DS, code, function, NONE, {NONE, NONE, NONE}, bytes, stride, false},
#define LDS_OTHER(code, name, bytes, function) {#name, DS, code, function, U32, {NONE, NONE, NONE}, bytes, 0, false},

const Operation OPERATIONS[] = {
#include "operations.h"
};
const u32 OPERATION_COUNT = sizeof OPERATIONS / sizeof *OPERATIONS;
